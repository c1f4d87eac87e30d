"""Run a script or module in this process as Python itself would.

The new ``__main__`` is a separate module, installed in ``sys.modules`` permanently: threads,
``atexit`` handlers, pickles and spawned workers of the program find it where they expect it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final, NoReturn

from gpuprobe.code_origin import PACKAGE
from gpuprobe.errors import GpuprobeError, ProgramFailed, UsageError

_FROM_USER: Final = {
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGCHLD")
    if hasattr(signal, name)
}
"""Signals that end a process at somebody's request, and one that by default does nothing."""


class Program:
    """A program to run: its compiled code, and the attributes of its ``__main__``."""

    def __init__(
        self,
        code: CodeType,
        argv: Sequence[str],
        path0: str,
        *,
        file: str,
        spec: importlib.machinery.ModuleSpec | None = None,
        package: str | None = None,
    ) -> None:
        self.code = code
        self.argv = list(argv)
        self.path0 = path0  # what Python puts first on sys.path for this program
        self.file = file
        self.spec = spec
        self.package = package
        # What differs from its file, for other processes that run it: `planning.trials`.
        self.changes: dict[str, Any] = {}

    def run(self) -> None:
        """Run the program to its end. Whatever it raises passes through, SystemExit included.

        A child that the program forks, and that returns here, ends here as it would in Python: what
        the caller does next (a summary, a comparison) is the parent's.
        """
        main = ModuleType("__main__")
        main.__dict__.update(
            __file__=self.file,
            __builtins__=builtins,
            __spec__=self.spec,
            __package__=self.package,
            __loader__=importlib.machinery.SourceFileLoader("__main__", self.file)
            if self.spec is None
            else self.spec.loader,
            __cached__=None if self.spec is None else self.spec.cached,
        )
        if sys.version_info < (3, 14):  # newer versions create them when they are first read
            main.__annotations__ = {}
        sys.modules["__main__"] = main
        sys.argv[:] = self.argv
        # sys.path[0] is the folder of the gpuprobe command; with -P there is no such entry.
        if sys.path and not getattr(sys.flags, "safe_path", False):
            sys.path[0] = self.path0
        process = os.getpid()
        try:
            exec(self.code, main.__dict__)
        except BaseException as error:
            if os.getpid() != process:
                _end_child(error)
            raise
        if os.getpid() != process:
            _end_child(None)


@contextlib.contextmanager
def restored_if_it_fails() -> Iterator[None]:
    """For a caller of `Program.run` that continues after a failure: restore ``__main__``,
    ``sys.argv`` and ``sys.path`` then.
    """
    main, argv, path = sys.modules["__main__"], list(sys.argv), list(sys.path)
    try:
        yield
    except Exception:
        sys.modules["__main__"] = main
        sys.argv[:], sys.path[:] = argv, path
        raise


@contextlib.contextmanager
def signals_restored(*, until_exit: bool = False) -> Iterator[None]:
    """For a caller of `Program.run` that continues: signal handlers that the program has set cannot
    interrupt or end the caller, and a timer that is still running is ignored. torch's data loader
    has a handler that raises once a worker is reported dead, possibly after that has made the
    program fail. ``until_exit``: the program's handlers apply again when the interpreter ends, and
    waits for the program's threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # the program could not set any either
        return
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    found = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            own = signal.getsignal(number)
            if own != handler and own is not None and handler is not None:
                found[number] = own
                ends = handler == signal.SIG_DFL and number not in _FROM_USER
                signal.signal(number, signal.SIG_IGN if ends else handler)
        if until_exit and found:
            threading._register_atexit(_set_signals, found)  # type: ignore[attr-defined]


def _set_signals(handlers: Mapping[int, Callable[..., object] | int]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _end_child(error: BaseException | None) -> NoReturn:
    """End a forked process as ``Py_FinalizeEx`` does: first threads, then ``atexit``."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    elif error is not None:
        code = 1
        sys.excepthook(type(error), error, own_frames(error))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code & 0xFF)


def load_script(script: str, arguments: Sequence[str]) -> Program:
    """Compile a script.

    Raises UsageError if it cannot be read, and ProgramFailed, with Python's own message, if it is
    not Python.
    """
    path = Path(script)
    if path.is_dir():
        raise UsageError(f"{script} is a directory", hint="give a Python file, or use -m module")
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"no such file: {script}") from None
    except OSError as error:
        raise UsageError(f"cannot read {script}: {error.strerror}") from None
    # As in CPython: __file__ is absolute, sys.argv[0] as it was given, and sys.path[0] is the
    # directory that a symbolic link points to.
    file = os.path.abspath(script)  # noqa: PTH100 - Path.absolute keeps ".."
    code = _compiled(source, file, script)
    directory = str(Path(script).resolve().parent)
    return Program(code, [script, *arguments], directory, file=file)


def load_module(name: str, arguments: Sequence[str]) -> Program:
    """Find and compile a module, or the ``__main__`` of a package, as ``python -m`` does.

    Raises UsageError if there is no such module.
    """
    sys.path[0] = str(Path.cwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"no module named {name}: {error}") from None
    if spec is None or spec.loader is None:
        raise UsageError(f"no module named {name}")
    loader = spec.loader
    if not isinstance(loader, importlib.abc.InspectLoader):
        raise UsageError(f"{name} has no code to run")
    try:
        code = loader.get_code(name)
    except SyntaxError as error:
        raise _not_python(error, spec.origin or name) from None
    if code is None:
        raise UsageError(f"{name} has no code to run")
    file = spec.origin or name
    package = spec.name.rpartition(".")[0] or None
    return Program(code, [file, *arguments], sys.path[0], file=file, spec=spec, package=package)


def _compiled(source: bytes, file: str, shown: str) -> CodeType:
    try:
        return compile(source, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise _not_python(error, shown) from None


def _not_python(error: Exception, name: str) -> ProgramFailed:
    line = getattr(error, "lineno", None)
    where = f"{name}:{line}" if line else name
    message = getattr(error, "msg", None) or str(error)
    return ProgramFailed(f"{type(error).__name__} in {where}: {message}")


def own_traceback(error: BaseException) -> str:
    """The traceback that the program would have alone: without the frames of gpuprobe that ran it,
    or that are in between (of a simulated GPU), also if one of them raises the error that CUDA
    would (out of memory). An unexpected error of gpuprobe's code keeps them: a report needs them.
    """
    shown = traceback.TracebackException(
        type(error), error, _without_ours(error.__traceback__), compact=True
    )
    part: traceback.TracebackException | None = shown
    while part is not None:
        frames = list(part.stack)
        if isinstance(error, GpuprobeError) or not frames or not _is_fault(frames[-1]):
            part.stack = traceback.StackSummary.from_list(_others(frames))
        part = part.__cause__ or part.__context__
    return "".join(shown.format())


def _others(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames of the program and its libraries, without gpuprobe's and without torch's own calls
    of operators from one of those.
    """
    found = []
    inside = False
    for frame in frames:
        inside = _ours(frame.filename) or (inside and frame.filename.endswith(_OPERATORS))
        if not inside:
            found.append(frame)
    return found


_OPERATORS: Final = os.path.join("torch", "_ops.py")  # noqa: PTH118 - the end of a path


def _is_fault(last: traceback.FrameSummary) -> bool:
    """Whether gpuprobe's code failed in its last frame, rather than raised an error on purpose."""
    return _ours(last.filename) and not (last.line or "").startswith("raise ")


def own_frames(error: BaseException) -> TracebackType | None:
    """The traceback of an error from where the program begins."""
    return _without_ours(error.__traceback__)


def _ours(filename: str) -> bool:
    return filename.startswith(PACKAGE)


def _without_ours(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and _ours(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb
