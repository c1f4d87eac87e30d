"""Work that nobody waits for: a step's record is put together and written by a thread of its own.

The training thread hands over what it has read and goes on. A slow disk then slows down nobody,
and the bookkeeping runs while operators do, which hold no interpreter lock.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["LIMIT", "Background"]

LIMIT = 10_000
"""Pieces of work that may wait. A disk that takes nothing at all must not fill the memory."""

FORK_TIMEOUT = 5.0
"""Seconds that a fork waits for the thread to end. Forking beside it is a lesser evil."""


class Background:
    """Does what it is given, in order. The thread starts with the first piece, is a daemon, and
    ends before a fork: a child has no second thread, and Python warns of forking with one.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        """``on_error`` gets what a piece of work raises, in the thread."""
        self._on_error = on_error
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.refused = 0
        """Pieces that were not taken, because `LIMIT` were waiting."""
        _end_before_fork(self)

    def submit(self, work: Callable[[], object]) -> None:
        """Have it done soon."""
        if self._queue.qsize() >= LIMIT:
            self.refused += 1
            return
        self._queue.put(work)
        self._started()

    def drain(self, timeout: float) -> bool:
        """Wait until all is done, and end the thread. Seconds; False where it took longer."""
        if self._thread is threading.current_thread():  # a piece of work ends the recording
            return False
        until = time.monotonic() + timeout
        # More than once where an earlier drain gave up: the thread may have ended at the mark that
        # was left for it, just before something was handed over.
        while self._thread is not None and (self._thread.is_alive() or not self._queue.empty()):
            thread = self._started()
            self._queue.put(None)
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                return False
        self._thread = None
        return True

    def _started(self) -> threading.Thread:
        """The thread, running: after a `drain` that took too long it may have ended since."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="gpuprobe", daemon=True)
            self._thread.start()
        return self._thread

    def _run(self) -> None:
        while True:
            work = self._queue.get()
            if work is None:
                if self._queue.empty():
                    return
                continue
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whoever made the work decides
                self._on_error(error)


def _end_before_fork(background: Background) -> None:
    ref = weakref.ref(background)

    def end() -> None:
        living = ref()
        if living is not None:
            living.drain(FORK_TIMEOUT)

    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=end)
