"""One line at the bottom of the terminal while a program runs, and never in its output.

The line is drawn only where the program's own output stands at the beginning of a line, and is
taken away before the program writes. For that, ``sys.stdout`` and ``sys.stderr`` are replaced by
streams that pass everything on, as progress bars do. What does not go through Python (a library
that writes to the terminal itself) may follow the line's text; nothing is lost.
"""

from __future__ import annotations

import io
import os
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
    from gpuprobe.model.session import Step

__all__ = ["INTERVAL", "StatusLine", "text_of"]

INTERVAL = 0.25
"""Seconds between two lines: four a second can be read, and cost nothing."""

_ERASE = "\r\x1b[K"


class StatusLine:
    """The line, for the time of a ``with`` block, where both streams are terminals."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, width: Callable[[], int] | None = None
    ) -> None:
        self._clock = clock
        self._width = width or (lambda: shutil.get_terminal_size().columns)
        self._lock = threading.RLock()  # of all that is written; a signal handler may print, too
        self._streams: tuple[Any, Any] | None = None
        self._terminals: tuple[Any, Any] = (None, None)
        self._replaced: tuple[Any, Any] | None = None
        self._text = ""
        self._shown = False  # the text is on the terminal now
        self._line_start = True
        self._next = 0.0

    def __enter__(self) -> StatusLine:
        streams = (sys.stdout, sys.stderr)
        if all(_is_terminal(stream) for stream in streams):
            self._streams = self._terminals = streams
            self._replaced = (_Through(streams[0], self), _Through(streams[1], self))
            sys.stdout, sys.stderr = self._replaced
            _forget_in_children(self)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._replaced is None:
            return
        with self._lock:
            if self._shown:
                self._put(_ERASE)
            self._streams = None
            # The program may have put something of its own there: then that stays.
            out, err = self._replaced
            if sys.stdout is out:
                sys.stdout = self._terminals[0]
            if sys.stderr is err:
                sys.stderr = self._terminals[1]

    def step(self, step: Step) -> None:
        """Show this step, if the last one was shown long enough. Never raises for a terminal
        that is gone.
        """
        now = self._clock()
        if self._streams is None or now < self._next:
            return
        self._next = now + INTERVAL
        with self._lock:
            self._text = text_of(step)[: max(0, self._width() - 1)]
            self._draw()

    def passing(self, stream: Any, text: str) -> int:
        """Let the program write ``text``."""
        with self._lock:
            if self._shown:
                self._shown = False
                self._put(_ERASE)
            written: int = stream.write(text)
            if text:
                self._line_start = text.endswith("\n")
                if self._text and self._line_start:
                    stream.flush()
                    self._draw()
            return written

    def _draw(self) -> None:
        if self._line_start and self._streams is not None:
            self._shown = True
            self._put(_ERASE + self._text)

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
    """``gpuprobe: step 12 · 31.9 ms · peak 14.1 MiB allocated, 20.0 MiB reserved``."""
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


class _Through(io.TextIOBase):
    """A stream of the program, with the status line out of its way."""

    def __init__(self, stream: Any, status: StatusLine) -> None:
        self.below = stream
        self._status = status

    def write(self, text: str) -> int:
        return self._status.passing(self.below, text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self.below.flush()

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
        return self.below.detach()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def __del__(self) -> None:
        """Not what io does: the stream below is not ours to close."""
