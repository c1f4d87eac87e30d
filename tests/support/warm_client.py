"""The commands of `warm_python`: a request to its server.

Every process that a test starts begins here: this imports no package of the standard library, which
would take five times as long as the start of the interpreter.
"""

from __future__ import annotations

import _signal
import _socket
import marshal
import os
import sys

COMMANDS = ("baseline", "check", "estimate", "explain", "fit", "mcp", "run")
"""Commands of gpuprobe that import torch, or start processes that do."""
_KEPT = ("LANG", "LC_", "LD_", "MKL_", "OMP_", "PYTHON", "PYTORCH_", "TORCH")
"""Beginnings of the names of settings that an interpreter or torch reads at its start."""
_ANY = (
    "OMP_WAIT_POLICY",  # libgomp reads it at its start; how threads wait, of which there is one
    "PYTHON_EXEC",  # torchrun reads it
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONUNBUFFERED",
    "PYTHONWARNINGS",
    "TORCHELASTIC_",  # torchrun sets these, and reads them in its ranks
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it when its compiler is imported
    "TORCH_FR_",  # read when a group is made
    "TORCH_NCCL_",  # likewise
)
"""Beginnings of those that may differ: `warm_python` applies them, or they are read at each use."""

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Those that torch reads when it is imported, but can set later as well, except for a backend."""

RANKS = "WARM_PYTHON_RANKS"
ADDRESS = "WARM_PYTHON_ADDRESS"
"""The environment variable with the server's socket, for the programs that it has forked."""

PROGRAMS = {
    "python": [],
    "gpuprobe": ["-m", "gpuprobe"],
    "torchrun": ["-m", "torch.distributed.run"],
}
"""The commands, and what the interpreter runs for each."""

OWN = ("gpuprobe.agents.worker", "gpuprobe.api.trial_server", "gpuprobe.planning.worker")
"""gpuprobe's own processes: modules that it runs with ``-m``."""
_WORKER = ["-c", "import sys;exec(eval(sys.stdin.readline()))"]
"""How execnet starts a worker of pytest-xdist, with ``-u``."""
_TESTS = ["-m", "pytest"]
_MEASURED_AGAIN = ["-m", "gpuprobe", "baseline", "update", "--no-notes"]
_RUN_TO_EXPLAIN = ["-m", "gpuprobe", "run", "--quiet"]


EXPANDABLE = "expandable_segments:True"
"""What gpuprobe sets to try it."""


def settings(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_KEPT)
        and not name.startswith(_ANY)
        and not (name in _ALLOCATOR and value == EXPANDABLE)
    }


def expandable(environment: dict[str, str]) -> bool:
    """Whether the program's allocator has the one setting that `warm_python` applies."""
    return any(environment.get(name) == EXPANDABLE for name in _ALLOCATOR)


def inherits(words: list[str]) -> bool:
    """Whether the program is one of gpuprobe's own processes (trials, runs to be explained, and
    those of a check that measures again) or a pytest, which inherit a simulated GPU, or belongs to
    a job of `warm_python.ranks`. Other processes of users' programs show how an interpreter begins
    with one.
    """
    if _is_own(words) or words[:2] == _TESTS or words[:5] == _MEASURED_AGAIN:
        return True
    if words[:4] == _RUN_TO_EXPLAIN and any("/gpuprobe-explain-" in word for word in words):
        return True
    return RANKS in os.environ and (
        words[:2] == PROGRAMS["torchrun"] or words[:1][0].endswith(".py")
    )


def _is_own(words: list[str]) -> bool:
    return words[:1] == ["-m"] and words[1] in OWN


def without_engine(environment: dict[str, str]) -> dict[str, str]:
    """The environment without the settings that load the engine, which the server has loaded."""
    kept = dict(environment)
    for name, separator, ours in (
        ("LD_PRELOAD", " ", "libgpuprobe-preload.so"),
        ("PYTHONPATH", os.pathsep, "startup"),
    ):
        entries = environment.get(name, "").split(separator)
        rest = [entry for entry in entries if entry and entry.rpartition("/")[2] != ours]
        if rest:
            kept[name] = separator.join(rest)
        else:
            kept.pop(name, None)
    return kept


def _imports_torch(words: list[str]) -> bool:
    if _is_own(words) or words[:2] == PROGRAMS["torchrun"]:
        return True
    if words[:2] == PROGRAMS["gpuprobe"]:
        command = words[2] if len(words) > 2 else ""
        uses_torch = command in COMMANDS or words[2:4] == ["doctor", "--distributed"]
        return uses_torch and not {"-h", "--help"} & {*words}
    return words[:1] == ["-c"] or words[:2] == _TESTS or words[:1][0].endswith(".py")


def main(name: str, address: str, of_server: dict[str, str]) -> None:
    """Run a command as the server does, or, with other settings than ``of_server``, execute it."""
    interpreter = sys.executable
    argv = [interpreter, *PROGRAMS[name], *sys.argv[1:]]
    if argv[1:2] == ["-u"] and (RANKS in os.environ or argv[2:] == _WORKER):
        del argv[1]
        os.environ["PYTHONUNBUFFERED"] = "1"
    environment = dict(os.environ)
    compared = without_engine(environment) if inherits(argv[1:]) else environment
    if not _imports_torch(argv[1:]) or settings(compared) != of_server:
        os.execv(interpreter, argv)
    request = {
        "argv": argv[1:],
        "cwd": os.getcwd(),  # noqa: PTH109
        "environment": {**environment, ADDRESS: address},
        "session": os.getsid(0) == os.getpid(),
        "command": address.rpartition("/")[0] + "/bin/python",
        "end": "libraries",
    }
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    line.connect(address)
    send(line, request, [0, 1, 2])
    status = _followed(line)
    if status < 0:
        if -status != _signal.SIGKILL:
            _signal.signal(-status, _signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def send(line: _socket.socket, request: dict[str, object], streams: list[int]) -> None:
    """The size of the request, with the descriptors, and the request."""
    message = marshal.dumps(request)
    numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in streams)
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)
    line.sendmsg([len(message).to_bytes(4, "little")], [rights])
    line.sendall(message)


def _followed(line: _socket.socket) -> int:
    """How the process ended. Signals for this process are sent to that one."""
    text = b""
    while text.count(b"\n") < 2:
        part = line.recv(64)
        if not part:  # the server has ended
            return -_signal.SIGKILL
        if not text:
            _forward_signals(int(part.split()[0]))
        text += part
    return int(text.split()[1])


def _forward_signals(process: int) -> None:
    def forward(number: int, frame: object) -> None:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            return  # it has ended

    for number in (_signal.SIGINT, _signal.SIGTERM):
        _signal.signal(number, forward)
