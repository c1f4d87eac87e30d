"""gpuprobe's own processes that serve requests: their start, messages, limits and end.

A message is a line of JSON. `Server` is the process that requests see, `Channel` has the streams of
the serving one, out of the reach of the program that it runs. `serve` forks a process for each
request from one that has imported what all of them need: importing torch takes as long as many
small programs.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from gpuprobe.clocks import monotonic
from gpuprobe.model.io.descriptors import KeptDescriptor, LostDescriptor

if TYPE_CHECKING:
    from typing_extensions import Self

Document = dict[str, Any]
"""A message: what ``json`` reads and writes."""

SECONDS: Final = "seconds"
"""The key of a request to `serve` with its limit of time."""

_SET_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_MOST_LOG: Final = 1 << 16  # bytes of a process's output that are read
_PATIENCE: Final = 10.0  # seconds that a server has to end the process of a request


def command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of gpuprobe (its ``__main__`` part) in a separate process."""
    return [sys.executable, "-m", module, *arguments]


def end_with_parent(how: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process the signal when the thread that started it has ended: no
    process remains of a gpuprobe that is killed. Linux only; elsewhere it does nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, how)


def end_text(code: int) -> str:
    """How a process ended: ``by SIGKILL``, ``with code 3``. ``code``: as in `subprocess`."""
    return f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"


def last_document(output: str) -> Document | None:
    """The last line of a process's output that is a document; None without one."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                found: Document = json.loads(line)
                return found
    return None


def last_line(output: str) -> str:
    """The last line that is not empty; "" without one."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def in_foreground() -> bool:
    """Whether this process is in the terminal's foreground group, which gets Ctrl-C."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # no terminal, or no stdin at all
        return False


# -- the process that requests


class ServerReply(NamedTuple):
    """The reply to a request. ``document``: what its process returned; None if it ended without
    one, with ``code`` (as in `subprocess`), or did not end in its time (``late``). ``log``: the end
    of what it printed. ``lost``: all of this is about the server, which ended.
    """

    document: Document | None
    code: int = 0
    log: str = ""
    late: bool = False
    lost: bool = False


class Server:
    """A process that runs `serve`. It starts with the first request, and again after it has ended.
    A context manager: leaving it ends the process and that of its current request.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = command(module, *arguments)
        self._cwd = cwd
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit
        self._rest = b""
        self._ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._log.close()

    def reply(self, request: Mapping[str, object], seconds: float | None = None) -> ServerReply:
        """The reply to a request. After ``seconds``, those of the server's start included, the
        server is ended (`ServerReply.late`).
        """
        until = None if seconds is None else monotonic() + seconds
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            if not self._ready:
                self._line(process, until)
                self._ready = True
            return ServerReply(**json.loads(self._line(process, until)))
        except TimeoutError:
            self.end()
            return ServerReply(None, late=True)
        except (BrokenPipeError, EOFError):
            code = process.wait()
            self._close()
            return ServerReply(None, code, _end_of(self._log), lost=True)

    def _start(self) -> subprocess.Popen[bytes]:
        self._rest, self._ready = b"", False
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is handled by this process
            cwd=self._cwd,
            env=self._environment,
        )

    def _line(self, process: subprocess.Popen[bytes], until: float | None) -> bytes:
        """The next line. Raises TimeoutError at ``until``, EOFError if the process has ended."""
        assert process.stdout is not None
        while b"\n" not in self._rest:
            if not _readable(until, process.stdout.fileno()):
                raise TimeoutError
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                raise EOFError
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def end(self) -> None:
        """End the process: at once while it starts, later by the end of its requests, at which it
        ends that of the current one.
        """
        process = self._process
        if process is None:
            return
        if not self._ready:
            process.kill()
        self._close()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _close(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what is left to write
                    stream.close()


# -- the process that serves


class Replies:
    """This process's stdout as the stream of its replies: what the program prints there goes to
    stderr, from C too.
    """

    def __init__(self) -> None:
        self._replies = KeptDescriptor(os.dup(1))
        os.dup2(2, 1)

    def send(self, document: Mapping[str, object]) -> None:
        self.write(json.dumps(document).encode())

    def write(self, line: bytes) -> None:
        """Send a line that is JSON already."""
        rest = memoryview(line + b"\n")
        while rest:
            rest = rest[os.write(self._replies.number, rest) :]


class Channel(Replies):
    """The replies of this process, and its requests, which come on stdin: the program has none."""

    def __init__(self) -> None:
        super().__init__()
        self._requests = KeptDescriptor(os.dup(0))
        self._rest = b""
        to_null(0)

    @property
    def requests(self) -> int:
        """The descriptor of the requests. Raises LostDescriptor."""
        return self._requests.number

    def receive(self) -> Document | None:
        """The next request; None when there are no more."""
        while b"\n" not in self._rest:
            part = os.read(self.requests, 1 << 16)
            if not part:
                return None
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        found: Document = json.loads(line)
        return found

    def end_with_requests(self) -> None:
        """End this process group when the other side has closed the requests, or has ended."""
        threading.Thread(target=self._end_with_requests, daemon=True).start()

    def _end_with_requests(self) -> None:
        try:
            while os.read(self.requests, 1 << 16):
                pass
        except LostDescriptor:
            return  # closed by the program: the other side still ends the process
        os.killpg(0, signal.SIGKILL)


def serve(channel: Channel, run: Callable[[Document], Mapping[str, object]]) -> None:
    """For each request, fork a process that calls ``run``, and send a `ServerReply` with
    what that returned. Each has its own process group, which is ended after it, at its limit of
    time (`SECONDS`) and when the requests end, at which this returns.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side handles it
    wake, alarm = os.pipe()
    for end in (wake, alarm):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    gc.collect()
    gc.freeze()  # the pages stay shared with the forks
    channel.send({"ready": True})
    while (request := channel.receive()) is not None:
        with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as log:
            child = _fork()
            if not child:
                signal.set_wakeup_fd(-1)
                os.close(wake)
                os.close(alarm)
                _run_and_exit(run, request, result, log)
            try:
                code = _code(child, request.get(SECONDS), channel, wake)
            except TimeoutError:
                reply = ServerReply(None, late=True)
            except EOFError:
                return
            else:
                result.seek(0)
                text = result.read()
                reply = ServerReply(json.loads(text) if text else None, code, _end_of(log))
        channel.send(reply._asdict())


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns about the threads of NumPy's BLAS, which handles forks itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _run_and_exit(
    run: Callable[[Document], Mapping[str, object]],
    request: Document,
    result: IO[bytes],
    log: IO[bytes],
) -> NoReturn:
    """In the forked process: run a request, write its result, and exit."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        kept = KeptDescriptor(os.dup(result.fileno()))
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        result.close()
        log.close()
        document = json.dumps(run(request)).encode()
        with open(kept.number, "wb", closefd=False) as stream:
            stream.write(document)
        code = 0
    except BaseException:  # noqa: BLE001 - it is in the reply
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):  # of the program's streams
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _code(child: int, seconds: float | None, channel: Channel, wake: int) -> int:
    """Wait for a forked process, and end its group; its exit code, as in `subprocess`. Raises
    TimeoutError after ``seconds``, EOFError at the end of the requests.
    """
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    until = None if seconds is None else monotonic() + seconds
    try:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            ready = _readable(until, channel.requests, wake)
            if not ready:
                raise TimeoutError
            if wake not in ready:
                raise EOFError  # no request comes while one runs
            os.read(wake, 1 << 10)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)  # and its child processes
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _readable(until: float | None, *descriptors: int) -> list[int]:
    """The descriptors of any number that can be read; empty at ``until``."""
    waiting = select.poll()  # select.select takes numbers below 1024
    for number in descriptors:
        waiting.register(number, select.POLLIN)
    left = None if until is None else max(0.0, until - monotonic()) * 1000
    return [number for number, _ in waiting.poll(left)]


def _end_of(log: IO[bytes]) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _MOST_LOG))
    return log.read().decode("utf-8", "replace")


def to_null(*descriptors: int) -> None:
    """Make descriptors those of the null device."""
    with open(os.devnull, "r+b", buffering=0) as nothing:  # noqa: PTH123 - a device
        for number in descriptors:
            os.dup2(nothing.fileno(), number)
