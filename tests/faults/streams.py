"""Standard streams that are closed, absent, replaced or redirected."""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import sys
import threading
import warnings
from typing import Any

from parts import Run, part


@part()
def prints(run: Run) -> None:
    print("printed", run.choose.random())
    print("to stderr", file=sys.stderr)
    warnings.warn("of the program", UserWarning, stacklevel=1)
    logging.getLogger("program").warning("logged")


@part()
def prints_without_an_end_of_line(run: Run) -> None:
    print("no end", end="")
    print("no end of an error", end="", file=sys.stderr)


@part()
def closes_stdout(run: Run) -> None:
    if sys.stdout is not None:
        sys.stdout.close()


@part()
def closes_stderr(run: Run) -> None:
    if sys.stderr is not None:
        sys.stderr.close()


@part()
def closes_stdin(run: Run) -> None:
    if sys.stdin is not None:
        sys.stdin.close()


@part()
def closes_the_descriptors_of_streams(run: Run) -> None:
    for number in run.choose.choice(((0,), (1,), (2,), (0, 1, 2))):
        try:
            os.close(number)
        except OSError as error:
            run.note("close", number, error.errno)
    with open(run.folder / "lowest.txt", "w") as file:
        run.note("lowest", file.fileno())
        file.write("its own\n")


@part()
def opens_in_place_of_streams(run: Run) -> None:
    """A daemon's: its own files are 0, 1 and 2, to the end."""
    os.closerange(0, 3)
    for name in ("zero", "one", "stderr"):
        run.note(name, os.open(run.folder / name, os.O_CREAT | os.O_RDWR, 0o644))


@part()
def has_no_stdout(run: Run) -> None:
    sys.stdout = None  # type: ignore[assignment]


@part()
def has_no_streams(run: Run) -> None:
    sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]


@part()
def deletes_the_streams(run: Run) -> None:
    del sys.stdout
    del sys.stderr


@part()
def replaces_stdout_by_text(run: Run) -> None:
    sys.stdout = text = io.StringIO()
    print("into text")
    run.later.append(lambda: run.note("text", repr(text.getvalue())))


@part()
def replaces_stderr_by_a_file(run: Run) -> None:
    sys.stderr = open(run.folder / "stderr.txt", "w")
    print("an error", file=sys.stderr)


class _Odd:
    """A stream that only writes."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def write(self, text: str) -> int:
        with open(self.path, "a") as file:
            return file.write(text)


class _Refusing(io.TextIOBase):
    def write(self, text: str) -> int:
        raise RuntimeError("this stream takes nothing")

    def flush(self) -> None:
        raise RuntimeError("this stream cannot be flushed")


@part()
def replaces_streams_by_objects(run: Run) -> None:
    sys.stdout = _Odd(run.folder / "odd.txt")  # type: ignore[assignment]
    print("written")


@part()
def replaces_stderr_by_one_that_refuses(run: Run) -> None:
    sys.stderr = _Refusing()


@part(teardown=True)
def replaces_stdout_by_one_that_refuses(run: Run) -> None:
    sys.stdout = _Refusing()


@part()
def detaches_stdout(run: Run) -> None:
    if sys.stdout is not None:
        raw = sys.stdout.detach()  # type: ignore[attr-defined]
        raw.write(b"detached\n")
        raw.flush()


@part()
def reconfigures_stdout(run: Run) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="ascii", errors="xmlcharrefreplace", line_buffering=True)
        print("größe")


@part()
def prints_what_no_encoding_has(run: Run) -> None:
    try:
        print("\udcff")
    except UnicodeEncodeError as error:
        run.note(error)


@part()
def writes_to_the_descriptors(run: Run) -> None:
    for number in (1, 2):
        try:
            run.note("wrote", os.write(number, b"raw\n"))
        except OSError as error:
            run.note("raw", number, error.errno)


@part()
def reads_stdin(run: Run) -> None:
    try:
        run.note("stdin", repr(None if sys.stdin is None else sys.stdin.read(40)))
    except (OSError, ValueError) as error:
        run.note("stdin", error)


@part()
def has_a_fault_handler(run: Run) -> None:
    file = open(run.folder / "stacks.txt", "w")
    faulthandler.enable(file)
    run.kept.append(file)
    run.note("fault handler", file.fileno(), faulthandler.is_enabled())


@part()
def prints_in_a_thread(run: Run) -> None:
    thread = threading.Thread(target=print, args=("in a thread",))
    thread.start()
    thread.join()


@part()
def replaces_the_hooks_of_errors(run: Run) -> None:
    def hook(*error: Any) -> None:
        run.note("hook", error[0].__name__, error[1])

    sys.excepthook = hook
    threading.excepthook = lambda args: run.note("thread's hook", args.exc_type.__name__)
    sys.unraisablehook = lambda args: run.note("unraisable", type(args.exc_value).__name__)

    def work() -> None:
        raise LookupError("in a thread")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@part(teardown=True, started=True)
def has_a_hook_that_fails(run: Run) -> None:
    def hook(*error: Any) -> None:
        raise RuntimeError("in the hook")

    sys.excepthook = hook
