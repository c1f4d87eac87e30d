"""How programs end: exit codes, errors, handlers, finalizers."""

from __future__ import annotations

import atexit
import builtins
import os
import sys
import threading
import weakref
from collections.abc import Iterator

from parts import Run, ending, part


@ending()
def exits_at_once(run: Run) -> None:
    print("lost, if it is buffered")
    os._exit(run.choose.choice((0, 1, 5, 70, 255)))


@ending()
def exits_with_a_number(run: Run) -> None:
    sys.exit(run.choose.choice((0, 1, 3, 120, 130, 255, 256, -1, 2**40, True)))


@ending()
def exits_with_something_else(run: Run) -> None:
    sys.exit(run.choose.choice((None, "a sentence", "", 1.5, (1, 2), b"bytes", [])))


class _Unprintable:
    def __str__(self) -> str:
        raise LookupError("no text")


@ending(teardown=True)
def exits_with_what_cannot_be_printed(run: Run) -> None:
    sys.exit(_Unprintable())  # type: ignore[arg-type]


class _Exit(SystemExit):
    pass


@ending()
def exits_by_a_subclass(run: Run) -> None:
    raise _Exit(12)


@ending()
def exits_while_it_handles_an_error(run: Run) -> None:
    try:
        raise LookupError("first")
    finally:
        sys.exit(run.choose.choice((0, 13)))


@ending()
def raises(run: Run) -> None:
    raise ValueError("of the program")


@ending()
def raises_with_causes_and_notes(run: Run) -> None:
    try:
        raise LookupError("first")
    except LookupError as error:
        second = RuntimeError("second")
        if hasattr(second, "add_note"):
            second.add_note("a note")
        raise second from error


@ending()
def raises_a_group(run: Run) -> None:
    group = getattr(builtins, "ExceptionGroup", None)  # of Python 3.11
    raise ValueError("one") if group is None else group("several", [ValueError("one"), OSError()])


class _Base(BaseException):
    pass


@ending()
def raises_what_is_no_exception(run: Run) -> None:
    raise run.choose.choice((_Base, GeneratorExit, StopIteration, MemoryError))("of the program")


class _Unreadable(Exception):
    def __str__(self) -> str:
        raise LookupError("no text")


@ending()
def raises_an_error_without_text(run: Run) -> None:
    raise _Unreadable


@ending(started=True)
def raises_from_the_depth(run: Run) -> None:
    raises_from_the_depth(run)


@ending()
def raises_syntax(run: Run) -> None:
    compile("a b", "<its own>", "exec")


@ending("backward", "step", "end")
def raises_in_torch(run: Run) -> None:
    import torch

    torch.ones(2, 3, device=run.device) @ torch.ones(2, 3, device=run.device)


# -- what happens afterwards


@part()
def writes_at_exit(run: Run) -> None:
    @atexit.register
    def last() -> None:
        with open(run.folder / "at exit.txt", "w") as file:
            file.write(f"{file.fileno()}\n")
        print("printed at exit")


@part()
def raises_at_exit(run: Run) -> None:
    @atexit.register
    def last() -> None:
        raise LookupError("at exit")


@part()
def exits_at_exit(run: Run) -> None:
    atexit.register(sys.exit, 21)


@part()
def ends_at_exit(run: Run) -> None:
    atexit.register(os._exit, 22)


@part()
def registers_at_exit_at_exit(run: Run) -> None:
    atexit.register(lambda: atexit.register(run.note, "second"))


@part()
def forgets_what_was_registered_for_the_exit(run: Run) -> None:
    atexit.register(run.note, "not called")
    atexit._clear()


@part()
def starts_a_thread_at_exit(run: Run) -> None:
    @atexit.register
    def last() -> None:
        thread = threading.Thread(target=run.note, args=("thread at exit",))
        thread.start()
        thread.join()


class _Ends:
    def __init__(self, run: Run, fails: bool) -> None:
        self.run, self.fails = run, fails

    def __del__(self) -> None:
        self.run.note("finalizer")
        if self.fails:
            raise LookupError("in a finalizer")


@part(teardown=True)
def has_finalizers(run: Run) -> None:
    sys.modules["__main__"].left = _Ends(run, fails=run.choose.random() < 0.5)  # type: ignore[attr-defined]
    weakref.finalize(run, print, "finalized")


def _generator(run: Run) -> Iterator[int]:
    try:
        yield 1
    finally:
        run.note("generator ends")


@part(teardown=True)
def leaves_a_generator(run: Run) -> None:
    generator = _generator(run)
    next(generator)
    sys.modules["__main__"].suspended = generator  # type: ignore[attr-defined]


@part()
def has_an_error_in_a_finalizer(run: Run) -> None:
    thing = _Ends(run, fails=True)
    del thing


@part(teardown=True)
def trains_at_exit(run: Run) -> None:
    @atexit.register
    def last() -> None:
        torch = sys.modules.get("torch")
        if torch is None:  # imported twice, it may crash at the interpreter's end
            return
        torch.manual_seed(3)
        layer = torch.nn.Linear(3, 3, device=run.device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(torch.ones(2, 3, device=run.device)).sum().backward()
        optimizer.step()
        run.note_tensors("at exit", [*layer.parameters()])


@part("end")
def deletes_its_modules(run: Run) -> None:
    for name in ("json", "pathlib", "tempfile", "shutil", "threading", "torch"):
        sys.modules.pop(name, None)
