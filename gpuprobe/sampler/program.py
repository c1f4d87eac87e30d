"""Running somebody's script or module in this process as if Python had been told to.

The new ``__main__`` is a module of its own, installed in ``sys.modules`` for good: threads,
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final, NoReturn

from gpuprobe.code_origin import PACKAGE
from gpuprobe.errors import GpuprobeError, ProgramFailed, UsageError

_MEANT_FOR_US: Final = {
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGCHLD")
    if hasattr(signal, name)
}
"""Signals that end a process because somebody wants that, and one that by default does nothing."""


class Program:
    """Something to run: its compiled code, and what its ``__main__`` looks like."""

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
        # In what it differs from its file, for other processes that run it: `planning.trials`.
        self.changes: dict[str, Any] = {}

    def run(self) -> None:
        """Run it to its end. Whatever it raises, SystemExit included, passes through.

        A child that the program forks, and that comes back here, ends here as it would in Python:
        what the caller does next (a summary, a comparison) is the parent's.
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
        if sys.version_info < (3, 14):  # from then on they are made when they are asked for
            main.__annotations__ = {}
        sys.modules["__main__"] = main
        sys.argv[:] = self.argv
        # sys.path[0] is where the gpuprobe command lies; with -P there is no such entry.
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
def put_back_if_it_fails() -> Iterator[None]:
    """Around `Program.run`, for a caller that goes on after a failure: ``__main__``, ``sys.argv``
    and ``sys.path`` are then what they were before.
    """
    main, argv, path = sys.modules["__main__"], list(sys.argv), list(sys.path)
    try:
        yield
    except Exception:
        sys.modules["__main__"] = main
        sys.argv[:], sys.path[:] = argv, path
        raise


@contextlib.contextmanager
def signals_put_back(*, until_exit: bool = False) -> Iterator[None]:
    """Around `Program.run`, for a caller that goes on: what the program has set for signals cannot
    interrupt the caller, nor end it: a timer that is still running is ignored. torch's loaders of
    data have a handler that raises once a worker is reported dead, which may be after the program
    has failed for that. ``until_exit``: what it has set holds again when the interpreter ends, and
    waits for the program's threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # neither could the program set any
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
                ends = handler == signal.SIG_DFL and number not in _MEANT_FOR_US
                signal.signal(number, signal.SIG_IGN if ends else handler)
        if until_exit and found:
            threading._register_atexit(_set_signals, found)  # type: ignore[attr-defined]


def _set_signals(handlers: Mapping[int, Any]) -> None:
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

    Raises UsageError where it cannot be read, and ProgramFailed, with Python's own message
    for it, where it is not Python.
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
    # As CPython does it: __file__ is absolute, sys.argv[0] as it was given, and sys.path[0] is
    # the directory of what a symbolic link points to.
    file = os.path.abspath(script)  # noqa: PTH100 - Path.absolute keeps ".."
    code = _compiled(source, file, script)
    directory = str(Path(script).resolve().parent)
    return Program(code, [script, *arguments], directory, file=file)


def load_module(name: str, arguments: Sequence[str]) -> Program:
    """Find and compile a module, or the ``__main__`` of a package, as ``python -m`` does.

    Raises UsageError where there is none.
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
    """The traceback as the program's own: without the frames of gpuprobe that ran it, or that
    stand in between (a virtual device's). An error that gpuprobe's code did not mean to raise
    keeps them: they are what a report of it needs.
    """
    shown = traceback.TracebackException(
        type(error), error, _without_ours(error.__traceback__), compact=True
    )
    part: traceback.TracebackException | None = shown
    while part is not None:
        frames = list(part.stack)
        if isinstance(error, GpuprobeError) or not frames or not _ours(frames[-1].filename):
            kept = [frame for frame in frames if not _ours(frame.filename)]
            part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__
    return "".join(shown.format())


def own_frames(error: BaseException) -> TracebackType | None:
    """Its traceback from where the program begins."""
    return _without_ours(error.__traceback__)


def _ours(filename: str) -> bool:
    return filename.startswith(PACKAGE)


def _without_ours(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and _ours(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb
