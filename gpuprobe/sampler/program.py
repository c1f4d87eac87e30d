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
import linecache
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final, NoReturn, Protocol

from gpuprobe.bytecode import write_whole
from gpuprobe.errors import GpuprobeError, ProgramFailed, UsageError
from gpuprobe.patching import when_imported
from gpuprobe.recursion import READS, call_count
from gpuprobe.user_frames import PACKAGE

_FROM_USER: Final = {
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGCHLD")
    if hasattr(signal, name)
}
"""Signals that end a process at somebody's request, and one that by default does nothing."""


class Runnable(Protocol):
    """A program: ``run()`` ends with it and raises its exceptions."""

    @property
    def argv(self) -> Sequence[str]: ...

    def run(self) -> None: ...


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
        write_whole()
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
        process, getpid = os.getpid(), os.getpid  # a program may replace it
        calls = call_count()
        below = 0
        if calls is not None:  # so that the program may recurse as deep as in Python
            names = calls.names()
            exec(READS, names)
            below = names["active"] - 1
            calls.forget(below)
        try:
            exec(self.code, main.__dict__)
        except BaseException as error:
            if getpid() != process:
                _end_child(error)
            raise
        finally:
            if calls is not None:
                calls.forget(-below)
        if getpid() != process:
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
    get, put = signal.getsignal, signal.signal  # a program may replace them
    before = {number: get(number) for number in signal.valid_signals()}
    found = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            own = get(number)
            if own != handler and own is not None and handler is not None:
                found[number] = own
                ends = handler == signal.SIG_DFL and number not in _FROM_USER
                put(number, signal.SIG_IGN if ends else handler)
        if until_exit and found:
            threading._register_atexit(_set_signals, found, put)  # type: ignore[attr-defined]


def _set_signals(
    handlers: Mapping[int, Callable[..., object] | int], put: Callable[..., object]
) -> None:
    for number, handler in handlers.items():
        put(number, handler)


@contextlib.contextmanager
def python_restored() -> Iterator[None]:
    """For a caller of `Program.run` that continues: the import, the modules and the functions of
    `os` are there again that the program has removed or replaced. When the interpreter ends, and
    waits for the program's threads, they are the program's.
    """
    modules, before = sys.modules, dict(sys.modules)
    missing = object()

    def keep_torch() -> None:  # it cannot be imported twice
        names = [name for name in modules if name.partition(".")[0] == "torch"]
        before.update((name, modules[name]) for name in names)

    stop = when_imported("torch", keep_torch)
    own: list[tuple[object, str, object]] = [
        (builtins, "__import__", builtins.__import__),
        (sys, "modules", modules),
        (sys, "meta_path", list(sys.meta_path)),
        (sys, "path", list(sys.path)),
        *((os, name, value) for name, value in vars(os).items() if callable(value)),
    ]
    register, get, put = threading._register_atexit, getattr, setattr  # type: ignore[attr-defined]
    at_exit = atexit.register
    try:
        yield
    finally:
        stop()
        removed = [name for name in before if name not in modules]
        # The interpreter waits for the threads of the module that has the name; of none, without.
        if "threading" in removed:
            removed.remove("threading")
            register = at_exit
        else:
            register = get(modules["threading"], "_register_atexit", register)
        modules.update((name, before[name]) for name in removed)
        for name in removed:
            register(modules.pop, name, None)
        for owner, name, value in own:
            theirs = get(owner, name, missing)
            if theirs is value or theirs == value:
                continue
            if isinstance(value, list) and isinstance(theirs, list):
                value = [*value, *(one for one in theirs if one not in value)]
            put(owner, name, value)
            if theirs is not missing:
                register(put, owner, name, theirs)


def _end_child(error: BaseException | None) -> NoReturn:
    """End a forked process as ``Py_FinalizeEx`` does: first threads, then ``atexit``. Before it,
    ``pyrun_file`` writes what a script has printed, whether or not that fails.
    """
    for name in ("stderr", "stdout"):
        with contextlib.suppress(BaseException):
            getattr(sys, name).flush()
    code = 0
    if isinstance(error, SystemExit):
        code = exit_code(error)
    elif error is not None:
        code = show(error)
    threading._shutdown()  # type: ignore[attr-defined]
    _run_exit_functions()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException as failure:  # noqa: BLE001 - as Python does
            # An error that is ignored is printed on the stream, and nowhere if there is none.
            if name == "stdout" and getattr(sys, "stderr", None) is not None:
                _print(_ignored(stream, failure))
            code = 120
    os._exit(code & 0xFF)


def _ignored(stream: object, error: BaseException) -> str:
    """What Python prints of an error in a stream that it flushes at its end."""
    trace = error.__traceback__ and error.__traceback__.tb_next  # without the call here
    lines = traceback.format_exception_only(error)
    if trace is not None:
        lines[:0] = ["Traceback (most recent call last):\n", *traceback.format_tb(trace)]
    return f"Exception ignored in: {stream!r}\n{''.join(lines)}"


def _run_exit_functions() -> None:
    """Run what ``atexit`` has. An error is shown without gpuprobe's frames; also without the one
    here, which Python names for the error of a function in C: it is active, and none is where the
    interpreter does this.
    """
    hook = sys.unraisablehook

    def without_gpuprobe(shown: Any) -> None:
        if shown.exc_value is not None:
            cut_traceback(shown.exc_value)
            shown = type(shown)((*shown[:2], shown.exc_value.__traceback__, *shown[3:]))
        hook(shown)

    sys.unraisablehook = without_gpuprobe
    atexit._run_exitfuncs()


def exit_code(error: SystemExit) -> int:
    """Python's exit code for SystemExit: a number, 0 for None, 1 for others, which are printed on
    stderr.
    """
    code = error.code
    if code is None:
        return 0
    if isinstance(code, int):
        return (int(code) if -(2**63) <= code < 2**63 else -1) & 0xFF
    with contextlib.suppress(Exception):  # a text or stream that fails: only the end of the line
        text = str(code)
        if getattr(sys, "stderr", None) is None:
            _print(text)
        else:
            sys.stderr.write(text)
    _print("\n")
    return 1


def _print(text: str) -> None:
    """Print on stderr as the interpreter does: on the descriptor if there is no stream."""
    stream = getattr(sys, "stderr", None)
    with contextlib.suppress(Exception):
        if stream is not None:
            stream.write(text)
            return
    with contextlib.suppress(OSError):
        os.write(2, text.encode("utf-8", "backslashreplace"))


def show(error: BaseException) -> int:
    """Show an error that ends the program as Python does, by the program's ``sys.excepthook``,
    without gpuprobe's frames. Returns the exit code: 1, or that of a SystemExit in the hook.
    """
    cut_traceback(error)
    kind, trace = type(error), error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    hook = getattr(sys, "excepthook", None)
    if not hasattr(sys, "excepthook"):
        _print("sys.excepthook is missing\n")
        hook = _display
    try:
        show_by(hook, error, trace)
    except SystemExit as end:
        return exit_code(end)
    return 1


def show_by(hook: Any, error: BaseException, trace: TracebackType | None) -> None:
    """Show an error by a ``sys.excepthook``; if that fails, as Python does, without
    gpuprobe's frames. Raises SystemExit if it does.
    """
    try:
        hook(type(error), error, trace)
    except SystemExit:
        raise
    except BaseException as second:  # noqa: BLE001 - as Python does
        _print("Error in sys.excepthook:\n")
        cut_traceback(second)
        _display(type(second), second, second.__traceback__)
        _print("\nOriginal exception was:\n")
        _display(type(error), error, trace)


_display: Final = sys.__excepthook__


def load_script(script: str, arguments: Sequence[str]) -> Program:
    """Compile a script.

    Raises UsageError if it cannot be read, and ProgramFailed, with Python's own message, if it is
    not Python.
    """
    path = Path(script)
    if path.is_dir():
        hint = "give a Python file, or use -m module"
        if path.suffix == ".gpuprobe":
            hint = f"it is a recording: gpuprobe report {shlex.quote(script)}"
        raise UsageError(f"{script} is a directory", hint=hint)
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"no such file: {script}", hint=_similar(path)) from None
    except OSError as error:
        raise UsageError(f"cannot read {script}: {error.strerror}") from None
    # As in CPython: __file__ is absolute, sys.argv[0] as it was given, and sys.path[0] is the
    # directory that a symbolic link points to.
    file = os.path.abspath(script)  # noqa: PTH100 - Path.absolute keeps ".."
    code = _compiled(source, file, script)
    directory = str(Path(script).resolve().parent)
    return Program(code, [script, *arguments], directory, file=file)


def _similar(path: Path) -> str:
    """A hint for a script that does not exist: a Python file there with a similar name."""
    import difflib  # 2 ms

    with contextlib.suppress(OSError):
        scripts = [one.name for one in path.parent.iterdir() if one.suffix == ".py"]
        near = difflib.get_close_matches(path.name, scripts, n=1)
        if near:
            return f"did you mean {str(path.with_name(near[0]))!r}?"
    return f"give a Python file, by its path from {Path.cwd()}, or use -m module"


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
    """The traceback that the program would have alone; see `cut_traceback`."""
    cut_traceback(error)
    return "".join(traceback.format_exception(error))


def cut_traceback(error: BaseException) -> None:
    """Take out of the error's traceback, and of those of its causes, the frames of gpuprobe that
    ran the program, or that are in between (of a simulated GPU), also if one of them raises the
    error that CUDA would (out of memory). An unexpected error of gpuprobe's code keeps them: a
    report needs them.
    """
    on_purpose = isinstance(error, GpuprobeError)
    waiting: list[BaseException | None] = [error]
    known: set[int] = set()
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in known:
            continue
        known.add(id(part))
        entries = []
        entry = part.__traceback__
        while entry is not None:
            entries.append(entry)
            entry = entry.tb_next
        while entries and _ours(entries[0].tb_frame.f_code.co_filename) and part is error:
            del entries[0]
        interrupted = isinstance(part, KeyboardInterrupt)
        if on_purpose or interrupted or not entries or not _is_fault(entries[-1]):
            entries = _others(entries)
        kept = None
        for entry in reversed(entries):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        part.__traceback__ = kept
        waiting += [part.__cause__, part.__context__, *getattr(part, "exceptions", ())]


def _others(entries: Sequence[TracebackType]) -> list[TracebackType]:
    """The entries of the program and its libraries, without gpuprobe's and without torch's own
    calls of operators from one of those.
    """
    found = []
    inside = False
    for entry in entries:
        file = entry.tb_frame.f_code.co_filename
        inside = _ours(file) or (inside and file.endswith(_OPERATORS))
        if not inside:
            found.append(entry)
    return found


_OPERATORS: Final = os.path.join("torch", "_ops.py")  # noqa: PTH118 - the end of a path


def _is_fault(last: TracebackType) -> bool:
    """Whether gpuprobe's code failed in its last frame, rather than raised an error on purpose, or
    called the function in C that it has replaced: that one is named ``original`` everywhere.
    """
    file = last.tb_frame.f_code.co_filename
    if not _ours(file):
        return False
    line = linecache.getline(file, last.tb_lineno).lstrip()
    return not line.startswith("raise ") and "original(" not in line


def _ours(filename: str) -> bool:
    return filename.startswith(PACKAGE)
