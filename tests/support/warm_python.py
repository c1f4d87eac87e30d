"""Programs that import torch, started from a process that has imported it.

Importing torch, and what the first optimizer imports, takes four seconds of processor time: more
than most programs of the tests. `WarmPython` starts one process that imports both, and makes a
folder with the commands ``python``, ``gpuprobe`` and ``torchrun`` (`warm_client`). Each connects to
that process, which forks: the child has the command's arguments, environment, folder and streams,
and ends as it ends, without the interpreter's teardown. Only what imports torch is run that way,
and only with the server's own interpreter settings (`warm_client.settings`); everything else is
executed as usual. With `NESTED` in its environment, a program that is run that way starts others of
its kind that way too: ``sys.executable`` is the command ``python``. gpuprobe's own processes for
estimates and trials are run that way also with a simulated GPU in their environment
(`warm_client.inherits`).

What a program of this kind cannot show is the import of torch, and of gpuprobe: tests of that, such
as `tests/test_imports.py`, start interpreters with `sys.executable`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import marshal
import os
import pkgutil
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal, NamedTuple, NoReturn

import warm_client

_ROOMS = (
    "allocator",
    "analysis",
    "catalogue",
    "gate",
    "hazard_watch",
    "hazards",
    "model",
    "native",
    "planning",
    "recording",
    "reporters",
    "sampler",
    "torch_support",
)
_OF_COMMANDS = (
    *(("gpuprobe.agents.server",) if find_spec("mcp") else ()),
    *(f"gpuprobe.cli.commands.{name}" for name in warm_client.COMMANDS),
    *(
        f"gpuprobe.api.{name}"
        for name in (
            *("check", "explain", "hazards"),
            *("recordings", "render", "trials", "watch"),
        )
    ),
    "gpuprobe.cli.parser",
    "gpuprobe.cli.supervise",
)

NESTED = {"WARM_PYTHON_NESTED": "1"}
"""For the environment of a program whose own processes import torch as well."""

_BEGAN_WITH = dict(os.environ)
"""The environment before the first test that starts a process changes it."""


def modules_of(*rooms: str) -> list[str]:
    """gpuprobe's modules of these packages."""
    import gpuprobe

    names = []
    for room in rooms:
        paths = [str(Path(path) / room) for path in gpuprobe.__path__]
        names += [one.name for one in pkgutil.walk_packages(paths, f"gpuprobe.{room}.")]
    return names


def modules_of_commands() -> list[str]:
    """What commands of gpuprobe import sooner or later."""
    imported = [name for name in modules_of(*_ROOMS) if name not in warm_client.OWN]
    return [*_OF_COMMANDS, *imported]


@functools.cache
def shared() -> WarmPython:
    """The one of this process, until its end; in a process that was forked from one, such as a
    pytest of `tests/native/test_marked_gpu.py`, that one. It has imported what commands of gpuprobe
    import sooner or later, which takes as long as a small program under one of them.
    """
    if warm_client.ADDRESS in os.environ:
        return WarmPython(Path(os.environ[warm_client.ADDRESS]).parent)
    base = tempfile.mkdtemp(prefix="warm-")
    made = WarmPython(Path(base), modules_of_commands())
    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner:  # not a child that a test has forked
            made.close()
            shutil.rmtree(base, ignore_errors=True)

    atexit.register(end)
    return made


def ranks() -> dict[str, str]:
    """For the environment of a job: torchrun, and the ranks that it starts, are run this way as
    well, with the simulated GPU of the job.
    """
    folder = shared().folder
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    return {"PATH": path, "PYTHON_EXEC": shared().python, warm_client.RANKS: "1"}


def gpuprobe(
    *arguments: object,
    cwd: Path | None = None,
    timeout: float = 300,
    environment: Mapping[str, str] = {},
) -> subprocess.CompletedProcess[str]:
    """One command of gpuprobe, with what it printed; in a process that may crash, and that may not
    hang: after ``timeout`` seconds subprocess.TimeoutExpired is raised. The processes that the
    command starts are forked as well (`NESTED`). ``environment``: in addition to this one.
    """
    return subprocess.run(
        [shared().python, "-m", "gpuprobe", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **NESTED, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


class WarmPython:
    """``folder`` is put first on the PATH of commands; ``python`` is the command in it. They are
    those of this interpreter where the system lacks what the server needs. ``modules``: what the
    process imports as well. ``environment``: the one it starts with. ``one_at_a_time``: programs
    wait for each other, and each takes one fork instead of two. If a server listens in ``base``
    already, it is used.
    """

    def __init__(
        self,
        base: Path,
        modules: Sequence[str] = (),
        environment: Mapping[str, str] = _BEGAN_WITH,
        *,
        one_at_a_time: bool = False,
    ) -> None:
        self._order = "one at a time" if one_at_a_time else "together"
        self._server: subprocess.Popen[bytes] | None = None
        self._modules = modules
        self._environment = dict(environment)
        self._address = base / "socket"
        self.folder = Path(sys.executable).parent
        self.python = sys.executable
        if self._address.exists():
            self._use(base / "bin")
        elif hasattr(os, "pidfd_open") and sys.platform == "linux":
            self._start(base)

    def _use(self, folder: Path) -> None:
        self.folder = folder
        self.python = str(folder / "python")

    def _start(self, base: Path) -> None:
        from default_sigint import default_sigint  # not in the commands: they have no path to it

        self._use(base / "bin")
        self.folder.mkdir()
        settings = warm_client.settings(self._environment)
        for name in warm_client.PROGRAMS:
            command = self.folder / name
            command.write_text(
                f"#!{sys.executable} -IS\n"
                f"import sys\n"
                f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
                f"import warm_client\n"
                f"warm_client.main({name!r}, {str(self._address)!r}, {settings!r})\n"
            )
            command.chmod(0o755)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(self._address))
        listening.listen(16)
        with default_sigint():  # the programs inherit the server's
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno()), self._order, *self._modules],
                env=self._environment,
                pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE,  # its end is the server's
            )
        listening.close()

    def start(self, request: Request, streams: Mapping[int, int]) -> int:
        """Run a program to its end and return how it ended: its exit code, or the number of the
        signal that ended it as a negative one. ``streams``: its descriptors, and the caller's that
        they are; it has no others.
        """
        with socket.socket(socket.AF_UNIX) as line, line.makefile("r") as replies:
            line.connect(str(self._address))
            sent = request._replace(numbers=[*streams])._asdict()
            warm_client.send(line, sent, [*streams.values()])
            replies.readline()  # the process
            return int(replies.readline())

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()


End = Literal["interpreter", "libraries", "at once"]
"""How a process ends: as an interpreter does, which takes 0.3 s of processor time; or when its
threads, its ``atexit`` handlers and the names of ``__main__`` have ended. "libraries": if it is
still a rank of a group, or a collective failed, then with what its C libraries do at the end, which
takes as long: it leaves the group. What the server's modules do at exit by `weakref.finalize` is
left out of the latter two.
"""


class Request(NamedTuple):
    """A process to start. ``argv`` excludes the interpreter. ``numbers``: of the descriptors that
    are sent. ``session``: it leads a session. ``command``: its ``sys.executable`` if its
    environment contains `NESTED`; ``""``: the interpreter.

    ``limits``: those of the process, by the numbers of `resource`. ``umask``: -1 keeps the
    server's. ``program``: execute this program, with the arguments ``argv``, instead of forking;
    ``""``: fork. ``end``: see `End`. ``seconds``: how long the process and those that it leaves
    behind may take in all, after which they are killed, by a server that runs programs one at a
    time; 0: as long as they need, and those left behind are left alone.
    """

    argv: list[str]
    cwd: str
    environment: dict[str, str]
    session: bool = False
    command: str = ""
    numbers: list[int] = [0, 1, 2]  # noqa: RUF012 - of a tuple, never changed
    limits: list[tuple[int, int]] = []  # noqa: RUF012
    umask: int = -1
    program: str = ""
    end: End = "interpreter"
    seconds: float = 0.0


# -- the server


def _serve(listening: socket.socket, modules: Sequence[str], *, one_at_a_time: bool) -> Request:
    """Fork for each command. Returns in the forked process, with its request."""
    import importlib

    from gpuprobe.native.process import preload

    preload()  # a program that is forked can have a simulated GPU

    import pytest  # noqa: F401 - of tests marked simulated
    import torch
    import torch._dynamo
    import torch.utils.data

    torch.nn.Linear(2, 2)
    for module in modules:
        importlib.import_module(module)
    # Else pytest warns that the package of a plugin is imported already.
    for name in {"anyio", "gpuprobe"} & sys.modules.keys():
        sys.modules[name].__doc__ = "PYTEST_DONT_REWRITE"
    if "gpuprobe.native.session" in modules:
        _prepare_simulated_gpus()
    gc.collect()
    gc.freeze()  # collections in the forked processes leave these objects, and their memory, alone
    return _next(listening, one_at_a_time)


def _prepare_simulated_gpus() -> None:
    """Do what each program with a simulated GPU would do first, and what stays after it: that takes
    0.15 s of processor time.
    """
    from gpuprobe.catalogue.gpus import find
    from gpuprobe.torch_support.operator_calls import watch

    find("h100-80gb")
    watch(lambda op, args, kwargs, below: below(op, args, kwargs))()


def _next(listening: socket.socket, one_at_a_time: bool) -> Request:
    """Fork for each request. Returns in the forked process."""
    running: dict[int, Running] = {}
    while True:
        _wait(listening, running)
        line = listening.accept()[0]
        received = _received(line)
        if received is None:
            line.close()
            continue
        request, streams = received
        assert one_at_a_time or not request.seconds
        if request.seconds:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        process = os.fork()
        if not process:
            break
        for stream in streams:
            os.close(stream)
        started = Running(process, line, request, time.monotonic())
        ended = os.pidfd_open(process)
        with contextlib.suppress(OSError):
            line.sendall(f"{process}\n".encode())
        if one_at_a_time:
            select.select([ended, line], [], [], request.seconds or None)
            _finish(started, ended)
        else:
            running[ended] = started
    listening.close()
    line.close()
    for ended, one in running.items():
        os.close(ended)
        one.line.close()
    if request.session:
        os.setsid()
    _begin(request, streams)
    return request


def _wait(listening: socket.socket, running: dict[int, Running]) -> None:
    """Report ends, until a command connects."""
    ready: list[Any] = []
    while listening not in ready:
        waiting = [listening, 0, *running, *(one.line for one in running.values())]
        ready = select.select(waiting, [], [])[0]
        if 0 in ready:  # the tests have ended
            for one in running.values():
                _kill(one)
            os._exit(0)
        for ended, one in [*running.items()]:
            if ended in ready or one.line in ready:
                del running[ended]
                _finish(one, ended)


def _received(line: socket.socket) -> tuple[Request, list[int]] | None:
    """The request of a command and its descriptors, or None if the command is gone."""
    head, streams, _, _ = socket.recv_fds(line, 4, 16)
    size = int.from_bytes(head, "little")
    text = b""
    while len(text) < size:
        part = line.recv(size - len(text))
        if not part:
            break
        text += part
    if not text or len(text) < size:
        for stream in streams:
            os.close(stream)
        return None
    return Request(**marshal.loads(text)), streams


class Running(NamedTuple):
    process: int
    line: socket.socket  # to the command: its end is the command's
    request: Request
    started: float  # `time.monotonic`


_PR_SET_CHILD_SUBREAPER = 36
"""Of ``prctl``: processes that a child leaves behind become children of this one."""


def _kill(one: Running) -> None:
    """End a process, and its process group if the command led a session: that was ended as a group,
    too.
    """
    os.kill(one.process, signal.SIGKILL)
    if one.request.session:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process, signal.SIGKILL)


def _finish(one: Running, ended: int) -> None:
    """Report to the command how its process ended. If the command is gone, or the process took too
    long, end it.
    """
    if ended not in select.select([ended], [], [], 0)[0]:
        _kill(one)
    status = os.waitstatus_to_exitcode(os.waitpid(one.process, 0)[1])
    if one.request.seconds:
        _end_others(one.started + one.request.seconds)
    os.close(ended)
    with contextlib.suppress(OSError):
        one.line.sendall(f"{status}\n".encode())
    one.line.close()


def _end_others(limit: float) -> None:
    """Wait for the processes that a program left behind, until ``limit``; then end them."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        if time.monotonic() > limit:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for child in map(int, children):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def _begin(request: Request, streams: list[int]) -> None:
    """Become the process of a command."""
    # Above all numbers that it may have: none of those to come is overwritten.
    high = [fcntl.fcntl(stream, fcntl.F_DUPFD, 200) for stream in streams]
    for number, stream in zip(request.numbers, high, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    if request.seconds:
        listed = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
        for number in set(listed) - {*request.numbers}:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(number)
    else:
        for stream in streams:
            os.close(stream)
    os.chdir(request.cwd)
    if request.umask >= 0:
        os.umask(request.umask)
    for kind, limit in request.limits:
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
    if request.program:
        os.execve(request.program, [request.program, *request.argv], request.environment)
    if request.end != "interpreter":
        # Those of the server's imports: torch's take a third of the time of a small program.
        for living in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            living.atexit = False
    os.environ.clear()
    os.environ.update(request.environment)
    if request.command and NESTED.items() <= os.environ.items():
        sys.executable = request.command
    sys.argv, sys.orig_argv = request.argv, [sys.executable, *request.argv]
    _begin_python(request)
    _set_allocator(request.environment)
    if request.command and warm_client.inherits(request.argv) and "GPUPROBE_NATIVE" in os.environ:
        from gpuprobe.api.inherited import follow_torch

        follow_torch()  # as `gpuprobe/startup/sitecustomize.py` does


def _set_allocator(environment: Mapping[str, str]) -> None:
    """What torch does as it is imported, if the setting is in the environment."""
    if not warm_client.expandable(environment):
        return
    import torch

    # The second is its name in older versions.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (change or torch.cuda.memory._set_allocator_settings)(warm_client.EXPANDABLE)


def _begin_python(request: Request) -> None:
    """Set what an interpreter sets at its start: streams, warnings, random numbers."""
    import io
    import random
    import warnings

    at_once = bool(request.environment.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream: io.TextIOWrapper | None = None
        if number in request.numbers:
            mode = "wb" if number else "rb"
            buffering = 0 if at_once and number else -1
            raw = open(number, mode, buffering, closefd=False)  # noqa: SIM115
            stream = io.TextIOWrapper(
                raw,
                "utf-8",
                "backslashreplace" if number == 2 else "strict",
                line_buffering=number == 2 or (number == 1 and os.isatty(number)),
                write_through=at_once and number > 0,
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    given = request.environment.get("PYTHONWARNINGS", "")
    warnings._processoptions(filter(None, given.split(",")))  # type: ignore[attr-defined]
    random.seed()


def _run_module(argv: list[str]) -> None:
    """What the interpreter does with ``-m MODULE``."""
    import runpy

    sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = argv[1:]
    sys.path[0] = str(Path.cwd())
    runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]


def _program(argv: list[str]) -> tuple[CodeType, dict[str, Any]]:
    """The code of a script, or of ``-c CODE``, and the names of its ``__main__``."""
    kind = argv[0]
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
    return code, vars(main)


def _is_ours(file: str) -> bool:
    return file in (__file__, "<frozen runpy>") or file.endswith("runpy.py")


def _print(text: str) -> None:
    """Write to stderr as the interpreter does: to the descriptor if the stream fails."""
    try:
        sys.stderr.write(text)
    except Exception:  # noqa: BLE001 - of the program's stream
        with contextlib.suppress(OSError):
            os.write(2, text.encode())


def _reported(error: BaseException) -> object:
    """Report a program's error as the interpreter does, and return the code that it exits with."""
    if isinstance(error, SystemExit):
        return error.code
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as ended:
        return ended.code
    except BaseException as second:  # noqa: BLE001 - as Python does
        own = second.__traceback__ and second.__traceback__.tb_next
        if second.__context__ is error:  # Python handles no exception when it calls the hook
            second.__context__ = None
        for title, shown, frames in (
            ("Error in sys.excepthook:\n", second, own),
            ("\nOriginal exception was:\n", error, trace),
        ):
            _print(title)
            sys.__excepthook__(type(shown), shown.with_traceback(frames), frames)
    return KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else 1


def _flushed(name: str) -> bool:
    """Whether a stream was flushed, if there is one; see ``flush_std_files`` of CPython."""
    stream = getattr(sys, name, None)
    with contextlib.suppress(Exception):  # detached
        if stream is None or getattr(stream, "closed", False):
            return True
    try:
        stream.flush()  # type: ignore[union-attr]
    except Exception as error:  # noqa: BLE001 - of the program's stream
        if name == "stdout":
            trace = error.__traceback__ and error.__traceback__.tb_next
            lines = traceback.format_exception_only(error)
            if trace is not None:
                lines[:0] = ["Traceback (most recent call last):\n", *traceback.format_tb(trace)]
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(f"Exception ignored in: {stream!r}\n{''.join(lines)}")
        return False
    return True


def _flush_after_a_file() -> None:
    """What the interpreter does when a file has run, before it prints its error; see ``flush_io``
    of CPython.
    """
    for name in ("stderr", "stdout"):
        stream = getattr(sys, name, None)
        with contextlib.suppress(Exception):  # as Python does
            stream.flush()  # type: ignore[union-attr]


def _collective_failed() -> bool:
    """Whether the simulated GPU of this process, if it has one, has reported a failed one."""
    text = getattr(ctypes.CDLL(None), "gpn_ncclGetLastError", None)
    if text is None:
        return False
    text.restype = ctypes.c_char_p
    return bool(text(None))


def _end(code: object, how: End) -> NoReturn:
    """End the process as the interpreter does. KeyboardInterrupt: by SIGINT."""
    interrupted = code is KeyboardInterrupt
    if how == "interpreter":
        if interrupted:
            sys.excepthook = lambda *args: None
            raise KeyboardInterrupt
        sys.exit(code)  # type: ignore[arg-type]
    if code is not None and not isinstance(code, int):
        if not interrupted and getattr(sys, "stderr", None) is not None:  # or deleted
            with contextlib.suppress(Exception):  # it is full, or the program's
                sys.stderr.write(str(code))
            _print("\n")
        elif not interrupted:  # print would write it to stdout
            with contextlib.suppress(OSError):
                os.write(2, f"{code}\n".encode())
        code = 1
    threads = sys.modules.get("threading")  # as Python does: of the module that has the name
    if threads is not None:
        threads._shutdown()
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    if not all([*map(_flushed, ("stdout", "stderr"))]):
        code = 120
    for name in ("__stdout__", "__stderr__"):  # they are flushed when they are deleted
        with contextlib.suppress(Exception):
            getattr(sys, name).flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    distributed = sys.modules.get("torch.distributed")
    if how == "libraries":
        ctypes.CDLL(None).fflush(None)
        if (distributed is not None and distributed.is_initialized()) or _collective_failed():
            ctypes.PyDLL(None).exit((code or 0) & 0xFF)
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    # Without functions in between, the program's depth is that of an interpreter, but for one.
    _request = _serve(
        socket.socket(fileno=int(sys.argv[1])),
        sys.argv[3:],
        one_at_a_time=sys.argv[2] == "one at a time",
    )
    _code: object = None
    try:
        if _request.argv[0] == "-m":
            _run_module(_request.argv)
        else:
            try:
                exec(*_program(_request.argv))
            finally:
                _flush_after_a_file()
    except BaseException as _error:  # noqa: BLE001 - it ends the process
        _code = _reported(_error)
    _end(_code, _request.end)
