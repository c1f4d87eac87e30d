"""The status lines on stderr: that torch is being imported; while a program runs, its step, and the
step's time and peak; while it is estimated in a child process, what that does (`Progress`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING

from gpuprobe.clocks import monotonic
from gpuprobe.model.text import human_bytes, human_ns, visible
from gpuprobe.model.values import Unavailable

if TYPE_CHECKING:
    from gpuprobe.model.run.session import Step

INTERVAL = 10.0
"""Seconds between two lines, and before the first: they are mixed with the program's output."""


IMPORT_AFTER = 0.5
"""Seconds that an import takes before its line is shown."""

_ERASE = "\r\x1b[K"


class StatusLine:
    """Status lines on a terminal; nothing if ``stream`` (default: stderr) is not one.

    The program's streams are not wrapped, so a status line may follow an unfinished line.
    """

    def __init__(
        self, stream: IO[str] | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._next = clock() + INTERVAL

    def step(self, step: Step) -> None:
        """Show this step if `INTERVAL` has passed. Never raises for a closed terminal and never
        waits for a stopped one (Ctrl-S): the thread that writes the recording calls it.
        """
        now = self._clock()
        if now < self._next:
            return
        self._next = now + INTERVAL
        try:
            if self._stream.isatty() and _takes_text(self._stream):
                width = shutil.get_terminal_size().columns - 1
                self._stream.write(f"{text_of(step)[:width]}\n")
                self._stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, or none at all
            return


class Progress:
    """Lines on a terminal about a child process: what it does, and for how long.

    The child calls `report`, with text in memory that both processes share; the parent prints it
    every `SECONDS` inside `printed`. So the process that runs the program needs no thread and no
    timer, which the program could notice.
    """

    SECONDS = 5.0
    _SIZE = 200

    def __init__(self) -> None:
        self._stream = sys.stderr  # the program may replace it
        self._start = monotonic()
        self._first_step = 0.0  # when it began
        self._text = mmap.mmap(-1, self._SIZE)

    def report(self, text: str) -> None:
        """Replace the text."""
        data = text.encode("utf-8", "replace")[: self._SIZE]
        self._text[:] = data.ljust(self._SIZE, b"\0")

    def step(self, index: int, phase: str, *, of: int = 0) -> None:
        """Report a step and its phase, and of how many steps (0: unknown) it is, with the time that
        the others will take.
        """
        now = monotonic()
        text = f"step {index}, {phase}"
        if phase == "setup":  # of the first run, or of another one
            text, self._first_step = phase, 0.0
        elif not index:
            self._first_step = self._first_step or now
        elif index < of and self._first_step:
            left = (now - self._first_step) / index * (of - index)
            text += f" ({index} of {of} made, about {left:.0f} s left)"
        self.report(text)

    def line(self) -> str:
        """The line now; "" if nothing was reported."""
        text = self._text[:].rstrip(b"\0").decode("utf-8", "replace")
        return f"gpuprobe: {visible(text)} · {monotonic() - self._start:.0f} s" if text else ""

    @contextlib.contextmanager
    def printed(self) -> Iterator[None]:
        """Inside, the line is printed every `SECONDS`, if the stream is a terminal."""
        if self._stream is None or not self._stream.isatty():
            yield
            return
        import signal  # 2 ms, on a terminal only

        previous = signal.signal(signal.SIGALRM, lambda number, frame: self._print())
        signal.setitimer(signal.ITIMER_REAL, self.SECONDS, self.SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    def _print(self) -> None:
        line = self.line()
        try:
            if line and _takes_text(self._stream):
                width = shutil.get_terminal_size().columns - 1
                self._stream.write(f"{line[:width]}\n")
                self._stream.flush()
        except (OSError, ValueError):  # closed
            return


PROGRESS: Progress | None = None
"""Of the command in this process, if its parent shows it (`gpuprobe.cli.supervise`)."""


def text_of(step: Step) -> str:
    """``gpuprobe: step 12 · 31.9 ms · cuda:0 peak 14.1 MiB allocated, 20.0 MiB reserved``."""
    parts = [f"gpuprobe: step {step.index}", human_ns(step.duration_ns)]
    for window in step.windows:
        peaks = [
            f"{human_bytes(peak.at_most)} {name}"
            for name, peak in (
                ("allocated", window.peak_allocated),
                ("reserved", window.peak_reserved),
            )
            if not isinstance(peak, Unavailable)
        ]
        if peaks:
            parts.append(f"{window.device} peak {', '.join(peaks)}")
    if not step.windows and not isinstance(step.host.rss_end, Unavailable):
        parts.append(f"{human_bytes(step.host.rss_end)} resident")
    return " · ".join(parts)


@contextlib.contextmanager
def importing(
    module: str, stream: IO[str] | None = None, after: float = IMPORT_AFTER
) -> Iterator[None]:
    """Inside, an import of ``module`` that takes longer than ``after`` seconds has a line on
    ``stream`` (default: stderr) if that is a terminal. It is erased when the import ends, except on
    ``TERM=dumb``. In a job only rank 0 has one.
    """
    stream = sys.stderr if stream is None else stream
    if module in sys.modules or os.environ.get("RANK", "0") != "0" or not _is_terminal(stream):
        yield
        return
    from gpuprobe.patching import when_imported  # 2 ms, on a terminal only

    close = when_imported(module, lambda: None, lambda: _import_line(module, stream, after))
    try:
        yield
    finally:
        close()


def _import_line(module: str, stream: IO[str], after: float) -> Callable[[], None]:
    """Wait in a thread, and show the line. Returns a function that erases it and ends the thread:
    the command may fork afterwards.
    """
    dumb = os.environ.get("TERM", "") in ("", "dumb")
    shown = False

    def show() -> None:
        nonlocal shown
        if _takes_text(stream):
            shown = True
            _put(stream, f"gpuprobe: importing {module} …" + ("\n" if dumb else ""))

    def end() -> None:
        timer.cancel()
        timer.join()
        if shown and not dumb:
            _put(stream, _ERASE)

    timer = threading.Timer(after, show)
    timer.daemon = True
    timer.start()
    return end


def _put(stream: IO[str], text: str) -> None:
    """Write to a terminal, which may have been closed or have no such characters."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()


def _is_terminal(stream: IO[str] | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):  # closed
        return False


def _takes_text(stream: IO[str]) -> bool:
    """Whether the terminal accepts text now: one that was stopped (Ctrl-S) does not."""
    try:
        return bool(select.select([], [stream.fileno()], [], 0)[1])
    except (OSError, ValueError):  # no file: a stream in memory
        return True
