"""One line at the bottom of the terminal while a program runs, out of the way of its output.

The line is drawn only where the program's own output stands at the beginning of a line, and is
taken away before the program writes. For that, ``sys.stdout`` and ``sys.stderr`` are replaced by
streams that pass everything on, as progress bars do, and ``input`` by one that takes the line
away first. A program that asks for the streams' bytes (``sys.stdout.buffer``) has no line from
then on. What goes past Python (a child process, a library that writes to the terminal itself) is
not seen: an unfinished line of theirs may be drawn over.
"""

from __future__ import annotations

import builtins
import io
import os
import select
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gpuprobe.model.text import human_bytes, human_ns
from gpuprobe.model.values import Unavailable

if TYPE_CHECKING:
    from gpuprobe.model.run.session import Step

__all__ = ["INTERVAL", "StatusLine", "text_of"]

INTERVAL = 0.25
"""Seconds between two steps that are shown: more cannot be read."""

REDRAW = 0.03
"""Seconds between drawing the line again below what the program prints."""

_ERASE = "\r\x1b[K"


class StatusLine:
    """The line, for the time of a ``with`` block, where both streams are terminals that can erase
    one.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, width: Callable[[], int] | None = None
    ) -> None:
        self._clock = clock
        self._width = width or (lambda: shutil.get_terminal_size().columns)
        self._lock = threading.RLock()  # of all that is written; a signal handler may print, too
        self._streams: tuple[Any, Any] | None = None
        self._terminals: tuple[Any, Any] = (None, None)
        self._replaced: tuple[_Through, _Through] | None = None
        self._input: Callable[..., str] = builtins.input
        self._asking: Any = None  # what stands for input
        self._text = ""
        self._shown = False  # the text is on the terminal now
        self._next = 0.0
        self._next_draw = 0.0

    def __enter__(self) -> StatusLine:
        streams = (sys.stdout, sys.stderr)
        dumb = os.environ.get("TERM") == "dumb"
        if not dumb and all(_is_terminal(stream) for stream in streams):
            self._streams = self._terminals = streams
            self._replaced = (_Through(streams[0], self), _Through(streams[1], self))
            sys.stdout, sys.stderr = self._replaced
            self._input = builtins.input
            self._asking = builtins.input = self._ask
            _forget_in_children(self)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._replaced is None:
            return
        with self._lock:
            self._take_away()
            self._streams = None
            out, err = self._replaced
            # The program may have put something of its own there: then that stays.
            if sys.stdout is out:
                sys.stdout = self._terminals[0]
            if sys.stderr is err:
                sys.stderr = self._terminals[1]
            if builtins.input is self._asking:
                builtins.input = self._input

    def step(self, step: Step) -> None:
        """Show this step, if the last one was shown long enough. Never raises for a terminal
        that is gone, and never waits for one that is stopped: this is called by the thread that
        writes the recording.
        """
        now = self._clock()
        if self._streams is None or now < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            self._next = now + INTERVAL
            self._text = text_of(step)[: max(0, self._width() - 1)]
            if self._streams is not None and _takes_text(self._streams[1]):
                self._draw(now)
        finally:
            self._lock.release()

    def passing(self, through: _Through, text: str) -> int:
        """Let the program write ``text``."""
        with self._lock:
            self._take_away()
            written: int = through.below.write(text)
            if text:
                through.line_start = text.endswith("\n")
                now = self._clock()
                if self._text and now >= self._next_draw and self._at_line_start():
                    through.below.flush()
                    self._draw(now)
            return written

    def flushing(self, through: _Through) -> None:
        """Let what the program wrote before appear."""
        with self._lock:
            if not through.line_start:
                self._take_away()
            through.below.flush()

    def give_up(self) -> None:
        """No line any more: the program writes in ways that are not seen here."""
        with self._lock:
            self._take_away()
            self._streams = None

    def _ask(self, *args: Any) -> str:
        """``input``, which writes its prompt itself; and the answer begins a new line."""
        with self._lock:
            self._take_away()
            streams, self._streams = self._streams, None
        try:
            return self._input(*args)
        finally:
            with self._lock:
                self._streams = streams

    def _at_line_start(self) -> bool:
        return self._replaced is not None and all(part.line_start for part in self._replaced)

    def _draw(self, now: float) -> None:
        if self._streams is not None and self._at_line_start():
            self._next_draw = now + REDRAW
            self._shown = True
            self._put(_ERASE + self._text)

    def _take_away(self) -> None:
        if self._shown:
            self._shown = False
            self._put(_ERASE)

    def _put(self, text: str) -> None:
        """Write to the terminal, as long as there is one."""
        if self._streams is None:
            return
        try:
            self._streams[1].write(text)
            self._streams[1].flush()
        except (OSError, ValueError):
            self._streams = None


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


def _forget_in_children(status: StatusLine) -> None:
    """A forked child shows no line, and may not wait for a lock of its parent's threads."""
    ref = weakref.ref(status)

    def forget() -> None:
        child = ref()
        if child is not None:
            child._lock = threading.RLock()
            child._streams = None

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def _takes_text(stream: Any) -> bool:
    """Whether the terminal would take text now: one that was stopped (Ctrl-S) does not."""
    try:
        return bool(select.select([], [stream.fileno()], [], 0)[1])
    except (OSError, ValueError):  # no file: a stream in memory; or one that is closed
        return True


class _Through(io.TextIOBase):
    """A stream of the program, with the status line out of its way."""

    def __init__(self, stream: Any, status: StatusLine) -> None:
        self.below = stream
        self.line_start = True
        self._status = status

    def write(self, text: str) -> int:
        return self._status.passing(self, text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._status.flushing(self)

    @property
    def buffer(self) -> Any:
        """The stream's bytes. What is written there is not seen here."""
        self._status.give_up()
        return self.below.buffer

    def fileno(self) -> int:
        return int(self.below.fileno())

    def isatty(self) -> bool:
        return bool(self.below.isatty())

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self.below.close()

    @property
    def closed(self) -> bool:
        return bool(self.below.closed)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self.below.encoding)

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        errors: str | None = self.below.errors
        return errors

    @property
    def newlines(self) -> Any:  # type: ignore[override]
        return self.below.newlines

    def detach(self) -> Any:
        self._status.give_up()
        return self.below.detach()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def __del__(self) -> None:
        """Not what io does: the stream below is not ours to close."""
