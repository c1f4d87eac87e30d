"""Commands that start vLLM: how they are recognised, and how they run for an estimate."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuprobe.errors import UsageError

_SIZES: Final = {
    "--tensor-parallel-size": "tensor",
    "-tp": "tensor",
    "--pipeline-parallel-size": "pipeline",
    "-pp": "pipeline",
    "--data-parallel-size": "data",
    "-dp": "data",
}
_IMPORTS: Final = re.compile(r"^\s*(?:from|import)\s+vllm\b", re.MULTILINE)
_PYTHON: Final = re.compile(r"python(?:3(?:\.\d+)?)?$")
_SERVERS: Final = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")


@dataclass(frozen=True)
class ServingCommand:
    """A command that starts vLLM. ``words`` are the user's, without the interpreter; ``module``:
    the first word is the name of a module. ``server``: it listens on a port. ``gpus``: the number
    of GPUs that it needs; 0 if unknown (for a script).
    """

    words: tuple[str, ...]
    module: bool
    server: bool
    gpus: int
    model: str

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
    vllm.entrypoints…`` or a script that imports vllm. None for all other programs.

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
    if words[0].endswith(".py") and _imports_vllm(Path(words[0])):
        return ServingCommand(tuple(words), False, False, 0, "")
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


def _imports_vllm(script: Path) -> bool:
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return _IMPORTS.search(text) is not None


def _with_options(words: list[str], *, module: bool, server: bool) -> ServingCommand:
    """A command with the model and the number of GPUs from its options."""
    sizes = {"tensor": 1, "pipeline": 1, "data": 1}
    model = ""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        value = value if equals else (words[at + 1] if at + 1 < len(words) else "")
        if name in _SIZES and value.isdecimal():
            sizes[_SIZES[name]] = max(int(value), 1)
        elif name == "--model":
            model = value
    if not model and not module and words[1:2] == ["serve"] and len(words) > 2:
        model = next((word for word in words[2:3] if not word.startswith("-")), "")
    gpus = sizes["tensor"] * sizes["pipeline"] * sizes["data"]
    return ServingCommand(tuple(words), module, server, gpus, model)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
