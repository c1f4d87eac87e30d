"""Work that nobody waits for: a step's record is put together and written by a thread of its own.

The training thread hands over what it has read and goes on. A slow disk then slows down nobody,
and the bookkeeping runs while operators do, which hold no interpreter lock.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

LIMIT = 10_000
"""Pieces of work that may wait. A disk that takes nothing at all must not fill the memory."""

PAUSE = 0.25
"""Seconds between two rounds of work. The program's operators empty the processor's caches: what
short steps leave is done together, at a third of the time. A step longer than this is written at
once; of shorter ones, a program that is killed loses this much.
"""

FORK_TIMEOUT = 5.0
"""Seconds that a fork, and the interpreter's end, wait for the thread. Going on without it is a
lesser evil."""


class Background:
    """Does what it is given, in order. The thread starts with the first piece, is a daemon, and
    ends when there was none for `PAUSE` (a program may wait for all threads that there are) and
    before a fork: a child has no second thread, and Python warns of forking with one. Where no
    thread can be started, the work is done at once.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        """``on_error`` gets what a piece of work raises, in the thread."""
        self._on_error = on_error
        self._forget()
        self.refused = 0
        """Pieces that were not taken, because `LIMIT` were waiting."""
        _watch_process(self)

    def _forget(self) -> None:
        """Nothing waits, and nobody works: as at first, and in a forked child."""
        # Reentrant: a signal handler that ends the recording may come in the middle of `submit`.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None
        self._ending = False
        self._abandoned = False
        self._pausing = False
        """The thread will look by itself: no need to wake it."""

    def submit(self, work: Callable[[], object]) -> None:
        """Have it done soon. Never raises."""
        with self._changed:
            if self._abandoned or len(self._waiting) >= LIMIT:
                self.refused += 1
                return
            self._waiting.append(work)
            if not self._pausing:
                self._changed.notify_all()
            working = self._working()
        if not working:
            self._work_here()

    def drain(self, timeout: float) -> bool:
        """Wait until all is done, and end the thread. Seconds; False where it took longer, or
        where a piece of work asks: it cannot wait for itself. Never raises.
        """
        with self._changed:
            thread = self._thread
            if thread is threading.current_thread():
                return False
            self._ending = True
            self._changed.notify_all()
        if thread is not None:
            thread.join(timeout)
        with self._changed:
            self._ending = False
            return self._thread is None

    def abandon(self) -> int:
        """Do nothing more but finish the piece at hand; how many pieces are never done."""
        with self._changed:
            self._abandoned = True
            left = len(self._waiting) + (self._thread is not None)
            self._waiting.clear()
            return left

    def _working(self) -> bool:
        """Have a thread. False where the system, or an interpreter at its end, gives none."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="gpuprobe", daemon=True)
            self._thread = thread
            try:
                thread.start()
            except RuntimeError:
                self._thread = None
                return False
        return True

    def _run(self) -> None:
        done = -PAUSE
        while True:
            with self._changed:
                self._pause(done + PAUSE)
                if not self._waiting:
                    self._thread = None
                    return
            self._work_here()
            done = time.monotonic()

    def _pause(self, until: float) -> None:
        """Wait until then, on the monotonic clock, or the end. Holds ``_changed``."""
        self._pausing = True
        while not self._ending and (left := until - time.monotonic()) > 0:
            self._changed.wait(left)
        self._pausing = False

    def _work_here(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    return
                work = self._waiting.popleft()
            self._do(work)

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whoever made the work decides
            if not self._abandoned:  # then the recording is closed, and this is no news
                self._on_error(error)


def _watch_process(background: Background) -> None:
    """End the thread before a fork and at the interpreter's end; begin anew in a child."""
    ref = weakref.ref(background)

    def end() -> None:
        living = ref()
        if living is not None:
            living.drain(FORK_TIMEOUT)

    def forget() -> None:
        living = ref()
        if living is not None:
            living._forget()

    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=end, after_in_child=forget)
    atexit.register(end)
    # Not at exit itself: there the work is still to be done.
    weakref.finalize(background, atexit.unregister, end).atexit = False
