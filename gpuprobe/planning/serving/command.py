"""The command that starts a vLLM: recognised, and as it is run for an estimate."""

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
    """A command that starts vLLM. ``words`` as the user wrote them, without the interpreter;
    ``module``: the first is the name of a module. ``server``: it listens on a port. ``gpus``: how
    many it needs; 0 where its options do not tell (of a script).
    """

    words: tuple[str, ...]
    module: bool
    server: bool
    gpus: int
    model: str

    def arguments(self) -> list[str]:
        """What is executed: with this interpreter, on a free port of this machine alone."""
        words = list(self.words)
        if self.module:
            start = [sys.executable, "-m", words[0]]
        elif words[0].endswith(".py"):
            start = [sys.executable, words[0]]
        else:
            start = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        port = ["--host", "127.0.0.1", "--port", str(_free_port())] if self.server else []
        return [*start, *words[1:], *port]


def serving_command(words: Sequence[str], *, module: bool = False) -> ServingCommand | None:
    """The command, where it starts vLLM: ``vllm serve …``, ``vllm bench latency …``, ``python -m
    vllm.entrypoints…`` or a script that imports vllm. None for all other programs.

    Raises UsageError for a command of vLLM that starts no engine.
    """
    given = list(words)
    if given and not module and _PYTHON.match(Path(given[0]).name):
        given = given[1:]
        if given[:1] == ["-m"]:
            given, module = given[1:], True
    if not given:
        return None
    first = given[0]
    if module:
        if first.partition(".")[0] != "vllm":
            return None
        if first in ("vllm", "vllm.entrypoints.cli.main"):
            return serving_command(["vllm", *given[1:]])
        return _described(given, module=True, server=first in _SERVERS)
    if Path(first).name == "vllm":
        if given[1:2] == ["serve"]:
            return _described(given, module=False, server=True)
        if given[1:2] == ["bench"] and given[2:3] and given[2] in ("latency", "throughput"):
            return _described(given, module=False, server=False)
        raise UsageError(
            "this command of vllm starts no engine",
            hint="vllm serve MODEL, vllm bench latency --model MODEL or vllm bench throughput …",
        )
    if first.endswith(".py"):
        try:
            text = Path(first).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        if _IMPORTS.search(text):
            return ServingCommand(tuple(given), False, False, 0, "")
    return None


def _described(words: list[str], *, module: bool, server: bool) -> ServingCommand:
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
