"""Programs that import torch, started from a process that has imported it.

Importing torch, and what the first optimizer imports, takes four seconds of processor time: more
than most programs of the tests. `WarmPython` starts one process that imports both, and makes a
folder with commands ``python`` and ``gpuprobe``. Each connects to that process, which forks: the
child has the command's arguments, environment, folder and streams, and ends as it ends. Only what
imports torch is run that way, and only with the server's own interpreter settings (`_KEPT`);
everything else is executed as usual. With `NESTED` in its environment, a program that is run that
way starts others of its kind that way too: ``sys.executable`` is the command ``python``.

What a program of this kind cannot show is the import of torch: tests of that, such as
`tests/test_imports.py`, start interpreters with `sys.executable`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

_COMMANDS = ("baseline", "check", "estimate", "fit", "run")
"""Commands of gpuprobe that import torch, or start a process that does."""
_KEPT = ("LANG", "LC_", "LD_", "MKL_", "OMP_", "PYTHON", "PYTORCH_", "TORCH")
"""Beginnings of the names of settings that an interpreter or torch reads at its start."""
_ANY = (
    "OMP_WAIT_POLICY",  # libgomp reads it at its start; how threads wait, of which there is one
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONUNBUFFERED",
    "PYTHONWARNINGS",
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it when its compiler is imported
)
"""Of these, the ones that may differ: `_begin` applies them, or they are read at each use."""

NESTED = {"WARM_PYTHON_NESTED": "1"}
"""For the environment of a program whose own processes import torch as well."""

_BEGAN_WITH = dict(os.environ)
"""The environment before the first test that starts a process changes it."""


@functools.cache
def shared() -> WarmPython:
    """The one of this process, until its end."""
    base = tempfile.mkdtemp(prefix="warm-")
    made = WarmPython(Path(base))
    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner:  # not a child that a test has forked
            made.close()
            shutil.rmtree(base, ignore_errors=True)

    atexit.register(end)
    return made


def gpuprobe(
    *arguments: object, cwd: Path | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """One command of gpuprobe, with what it printed; in a process that may crash, and that may not
    hang: after ``timeout`` seconds subprocess.TimeoutExpired is raised. The processes that the
    command starts are forked as well (`NESTED`).
    """
    return subprocess.run(
        [shared().python, "-m", "gpuprobe", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **NESTED},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


class WarmPython:
    """``folder`` is put first on the PATH of commands; ``python`` is the command in it. They are
    those of this interpreter where the system lacks what the server needs.
    """

    def __init__(self, base: Path) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self.folder = Path(sys.executable).parent
        self.python = sys.executable
        if hasattr(os, "pidfd_open") and sys.platform == "linux":
            self._start(base)

    def _start(self, base: Path) -> None:
        from default_sigint import default_sigint  # not in the commands: they have no path to it

        self.folder = base / "bin"
        self.folder.mkdir()
        address = base / "socket"
        settings = _settings(_BEGAN_WITH)
        for name in ("python", "gpuprobe"):
            command = self.folder / name
            command.write_text(
                f"#!{sys.executable} -IS\n"
                f"import runpy, sys\n"
                f"sys.argv[1:1] = [{name!r}, {str(address)!r}, {json.dumps(settings)!r}]\n"
                f"runpy.run_path({__file__!r}, run_name='client')\n"
            )
            command.chmod(0o755)
        self.python = str(self.folder / "python")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(address))
        listening.listen(16)
        with default_sigint():  # the programs inherit the server's
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno())],
                env=_BEGAN_WITH,
                pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE,  # its end is the server's
            )
        listening.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()


def _settings(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_KEPT) and name not in _ANY
    }


# -- the command


def _client() -> None:
    name, address, settings, *words = sys.argv[1:]
    interpreter = sys.executable
    argv = [interpreter, *(("-m", "gpuprobe") if name == "gpuprobe" else ()), *words]
    if not _imports_torch(argv[1:]) or _settings(dict(os.environ)) != json.loads(settings):
        os.execv(interpreter, argv)
    request = {
        "argv": argv[1:],
        "cwd": str(Path.cwd()),
        "environment": dict(os.environ),
        "session": os.getsid(0) == os.getpid(),
        "command": str(Path(address).parent / "bin" / "python"),
    }
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    message = json.dumps(request).encode()
    socket.send_fds(line, [len(message).to_bytes(4, "little")], [0, 1, 2])
    line.sendall(message)
    replies = line.makefile("r")
    process = int(replies.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda given, frame: _send(process, given))
    status = int(replies.readline() or -signal.SIGKILL)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _imports_torch(words: list[str]) -> bool:
    if words[:2] == ["-m", "gpuprobe.api.trial_server"]:
        return True
    if words[:2] == ["-m", "gpuprobe"]:
        return len(words) > 2 and words[2] in _COMMANDS and not {"-h", "--help"} & {*words}
    return words[:1] == ["-c"] or words[:2] == ["-m", "pytest"] or words[:1][0].endswith(".py")


# -- the server


def _serve(listening: socket.socket) -> list[str]:
    """Fork for each command. Returns in the forked process, with the arguments."""
    import gc

    import gpuprobe
    from gpuprobe.native.process import preload

    preload()  # a program that is forked can have a simulated GPU
    # Else pytest warns that the package of a plugin is imported already.
    gpuprobe.__doc__ = "PYTEST_DONT_REWRITE"

    import torch
    import torch._dynamo
    import torch.utils.data

    torch.nn.Linear(2, 2)
    gc.collect()
    gc.freeze()  # collections in the forked processes leave these objects, and their memory, alone
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if 0 in select.select([listening, 0], [], [])[0]:
            os._exit(0)  # the tests have ended
        line, _ = listening.accept()
        if os.fork():
            line.close()
            continue
        listening.close()
        head, streams, _, _ = socket.recv_fds(line, 4, 3)
        size = int.from_bytes(head, "little")
        text = b""
        while len(text) < size:
            text += line.recv(size - len(text))
        request = json.loads(text)
        process = os.fork()
        if process:
            _wait(process, line, whole_session=request["session"])
        if request["session"]:
            os.setsid()
        line.close()
        return _begin(request, streams)


def _wait(process: int, line: socket.socket, whole_session: bool) -> None:
    """Report to the command how its process ended. If the command is gone, end the process, and its
    process group if the command led a session: it was ended as a group too."""
    line.sendall(f"{process}\n".encode())
    ended = os.pidfd_open(process)
    if ended not in select.select([ended, line], [], [])[0]:
        os.kill(process, signal.SIGKILL)
        if whole_session:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(OSError):
        line.sendall(f"{status}\n".encode())
    os._exit(0)


def _begin(request: dict[str, Any], streams: list[int]) -> list[str]:
    """Become the process of a command."""
    import io
    import random
    import warnings

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if NESTED.items() <= os.environ.items():
        sys.executable = request["command"]
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        at_once = bool(request["environment"].get("PYTHONUNBUFFERED"))
        raw = open(number, "wb", 0 if at_once else -1, closefd=False)  # noqa: SIM115
        lines = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=lines, write_through=at_once)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    given = request["environment"].get("PYTHONWARNINGS", "")
    warnings._processoptions(filter(None, given.split(",")))  # type: ignore[attr-defined]
    random.seed()
    argv: list[str] = request["argv"]
    return argv


def _run(argv: list[str]) -> None:
    """What the interpreter does with its arguments."""
    import runpy

    kind = argv[0]
    if kind == "-m":
        sys.argv = argv[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *argv[2:]], ""
        code = compile(argv[1], "<string>", "exec")
    else:
        sys.argv, sys.path[0] = argv, str(Path(kind).resolve().parent)
        main.__file__ = str(Path.cwd() / kind)
        code = compile(Path(kind).read_bytes(), main.__file__, "exec")
    vars(main)["__builtins__"] = __builtins__
    exec(code, vars(main))


def _is_ours(file: str) -> bool:
    return file in (__file__, "<frozen runpy>") or file.endswith("runpy.py")


def _main() -> None:
    argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        _run(argv)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *args: None
            raise  # the interpreter ends itself by SIGINT
        sys.exit(1)


if __name__ == "client":
    _client()
elif __name__ == "__main__":
    _main()
