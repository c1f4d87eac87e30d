"""What a command line runs: a command of Python, a launcher of ranks, or one that starts vLLM."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from gpuprobe.catalogue.gpus import counted, parse_spec
from gpuprobe.errors import UsageError

_SIZES: Final = {
    "--tensor-parallel-size": "tensor",
    "-tp": "tensor",
    "--pipeline-parallel-size": "pipeline",
    "-pp": "pipeline",
    "--data-parallel-size": "data",
    "-dp": "data",
}
_ENGINES: Final = ("LLM", "from_engine_args", "from_vllm_config", "run_server")
_TRAINING: Final = ("backward", "train")
_PYTHON: Final = re.compile(r"python(?:3(?:\.\d+)?)?$")
_SERVERS: Final = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_INTERPRETERS: Final = (b"python", b"pypy")


def is_command(word: str) -> bool:
    """Whether the first word of a program is a command, and not a Python file. Raises UsageError if
    it is neither.
    """
    path = Path(word)
    if path.suffix == ".py" or path.is_dir():
        return False
    if path.is_file() and not (
        os.sep in word and os.access(path, os.X_OK) and not _is_python(path)
    ):
        return False
    if path.is_file() or shutil.which(word):
        return True
    raise UsageError(f"no such file or command: {word}")


def _is_python(path: Path) -> bool:
    """Whether the first line of a file names Python."""
    with path.open("rb") as file:
        first = file.readline(200)
    return first.startswith(b"#!") and any(name in first for name in _INTERPRETERS)


def name_of(words: Sequence[str]) -> tuple[str, bool]:
    """The program that a command runs, for the recording's name, and whether it is a module: its
    first Python file, or the module after the last ``-m``, or its first word.
    """
    file = next((word for word in words if word.endswith(".py")), "")
    if file:
        return file, False
    modules = [after for word, after in itertools.pairwise(words) if word == "-m"]
    return (modules[-1], True) if modules else (words[0], False)


class Launched(NamedTuple):
    """What a command launches: a Python file or a module with its arguments, and the ranks."""

    target: str
    arguments: tuple[str, ...]
    module: bool
    ranks: int


def launched_by(words: Sequence[str], gpu: str) -> Launched:
    """The program that Python or a launcher of ranks (``torchrun``, ``accelerate launch``,
    ``deepspeed``) runs, and how many ranks it has. A launcher that is given no number starts one
    for each of the GPUs that ``gpu`` names, ``torchrun`` one.

    Raises UsageError for other commands.
    """
    name = Path(words[0]).name
    launcher = is_launcher(words)
    if not launcher and not name.startswith("python"):
        raise UsageError(
            f"{words[0]} is neither Python nor a launcher of ranks",
            hint=f"gpuprobe run --gpu GPU -- {words[0]} … records whatever a command runs",
        )
    rest = [word for word in words[1:] if word not in _LAUNCHER_MODULES]
    at = next((i for i, word in enumerate(rest) if word.endswith(".py")), -1)
    modules = [i + 1 for i, word in enumerate(rest[:-1]) if word in ("-m", "--module")]
    if at < 0 and not modules:
        raise UsageError(f"{words[0]}: the command names no Python file and no module")
    module = at < 0
    at = modules[-1] if module else at
    ranks = _ranks(rest[:at], gpu, words) if launcher else 1
    return Launched(rest[at], tuple(rest[at + 1 :]), module, ranks)


def machine_of(words: Sequence[str], gpu: str) -> str:
    """The simulated machine of a command: for a launcher of several ranks, as many of the one GPU
    that ``gpu`` names without a number as it starts ranks on this machine. Else as given.
    """
    if not gpu or "," in gpu or counted(gpu) or not is_launcher(words):
        return gpu
    rest = [word for word in words[1:] if word not in _LAUNCHER_MODULES]
    at = next((i for i, word in enumerate(rest) if word.endswith(".py")), len(rest))
    ranks = _ranks_of_node(_options(rest[:at]), gpu, words)
    return f"{ranks}x{gpu}" if ranks > 1 else gpu


def is_launcher(words: Sequence[str]) -> bool:
    """Whether a command is that of a launcher of ranks."""
    name = Path(words[0]).name
    return name in _LAUNCHERS or any(word in _LAUNCHER_MODULES for word in words[1:])


_LAUNCHERS: Final = ("torchrun", "accelerate", "accelerate-launch", "deepspeed")
_LAUNCHER_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch", "launch")
_PROCESSES: Final = ("--nproc-per-node", "--num-processes", "--num-gpus")


def _ranks(options: Sequence[str], gpu: str, words: Sequence[str]) -> int:
    given = _options(options)
    nodes = given.get("--nnodes", "1")
    return _ranks_of_node(given, gpu, words) * (int(nodes) if nodes.isdecimal() else 1)


def _options(words: Sequence[str]) -> dict[str, str]:
    """The options of a launcher, each with what follows it."""
    given: dict[str, str] = {}
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.replace("_", "-").partition("=")
        given[name] = value if equals else after
    return given


def _ranks_of_node(given: Mapping[str, str], gpu: str, words: Sequence[str]) -> int:
    """The ranks that a launcher starts on one machine."""
    count = next((given[name] for name in _PROCESSES if name in given), "")
    if not count and (Path(words[0]).name == "torchrun" or _LAUNCHER_MODULES[0] in words):
        count = "1"
    return int(count) if count.isdecimal() else len(parse_spec(gpu))


# -- vLLM


@dataclass(frozen=True)
class ServingCommand:
    """A command that starts vLLM. ``words`` are the user's, without the interpreter; ``module``:
    the first word is the name of a module. ``server``: it listens on a port. ``tensor``,
    ``pipeline`` and ``data`` are the sizes of its parallelism; 0 if unknown (for a script).
    """

    words: tuple[str, ...]
    module: bool
    server: bool
    tensor: int = 0
    pipeline: int = 0
    data: int = 0

    @property
    def gpus(self) -> int:
        """The number of GPUs that it needs; 0 if unknown."""
        return self.tensor * self.pipeline * self.data

    def arguments(self) -> list[str]:
        """The command line to run, with this interpreter, on a free port of this machine only."""
        first, *rest = self.words
        if self.module:
            start = [sys.executable, "-m", first]
        elif first.endswith(".py"):
            start = [sys.executable, first]
        else:
            start = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        port = ["--host", "127.0.0.1", "--port", str(_free_port())] if self.server else []
        return [*start, *rest, *port]


def serving_command(words: Sequence[str], *, module: bool = False) -> ServingCommand | None:
    """The command if it starts vLLM: ``vllm serve …``, ``vllm bench latency …``, ``python -m
    vllm.entrypoints…`` or a script that makes an engine (`_makes_engine`). None for all other
    programs.

    Raises UsageError for a command of vLLM that starts no engine.
    """
    words = list(words)
    if words and not module and _PYTHON.match(Path(words[0]).name):
        words = words[1:]
        if words[:1] == ["-m"]:
            words, module = words[1:], True
    if not words:
        return None
    if module:
        return _module(words)
    if Path(words[0]).name == "vllm":
        return _vllm(words)
    if words[0].endswith(".py") and _makes_engine(Path(words[0])):
        return ServingCommand(tuple(words), module=False, server=False)
    return None


def _module(words: list[str]) -> ServingCommand | None:
    """The command of ``python -m``."""
    if words[0].partition(".")[0] != "vllm":
        return None
    if words[0] in ("vllm", "vllm.entrypoints.cli.main"):
        return _vllm(["vllm", *words[1:]])
    return _with_options(words, module=True, server=words[0] in _SERVERS)


def _vllm(words: list[str]) -> ServingCommand:
    """The command of ``vllm``."""
    if words[1:2] == ["serve"]:
        return _with_options(words, module=False, server=True)
    if words[1:2] == ["bench"] and words[2:3] and words[2] in ("latency", "throughput"):
        return _with_options(words, module=False, server=False)
    raise UsageError(
        "this command of vllm starts no engine",
        hint="vllm serve MODEL, vllm bench latency --model MODEL or vllm bench throughput …",
    )


def _makes_engine(script: Path) -> bool:
    """Whether a script's own code calls ``LLM(...)``, an engine's ``from_engine_args`` or
    ``from_vllm_config``, or ``run_server``, of vllm, and does not train: it calls neither
    ``backward()`` nor ``train()``. Importing vllm is not enough, as trainers do that for rollouts.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    calls = [_dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if any(len(name) > 1 and name[-1] in _TRAINING for name in calls):
        return False
    ours = _names_of_vllm(tree)
    return any([ours[first], *rest][-1] in _ENGINES for first, *rest in calls if first in ours)


def _names_of_vllm(tree: ast.Module) -> dict[str, str]:
    """The names by which a script knows vllm and what is in it, with the names that vllm gave."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "vllm":
                    found[alias.asname or "vllm"] = alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
    return found


def _dotted(node: ast.expr) -> list[str]:
    """The parts of ``vllm.LLM``; empty strings for what is not a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    return [""]


def _with_options(words: list[str], *, module: bool, server: bool) -> ServingCommand:
    """A command with the sizes of its parallelism from its options."""
    sizes = {"tensor": 1, "pipeline": 1, "data": 1}
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        value = value if equals else (words[at + 1] if at + 1 < len(words) else "")
        if name in _SIZES and value.isdecimal():
            sizes[_SIZES[name]] = max(int(value), 1)
    return ServingCommand(tuple(words), module, server, **sizes)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
