"""The thread that reads, so that nobody else waits for a driver that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuprobe.exporter.readings import MachineMetrics, Measured, families_of

if TYPE_CHECKING:
    from gpuprobe.reporters.metrics.metrics import Family

READ_TIMEOUT = 8.0
"""Seconds that a scrape waits for a reading at most: less than the 10 s after which Prometheus
gives a scrape up by default."""

STALE = 60.0
"""Seconds (and the interval) after which a reading is exported no longer, where none follows
because the driver hangs: a frozen value would look like a quiet GPU."""


@dataclass(slots=True)
class _State:
    """What the reading thread and those who ask share, under ``ReadingThread._changed``."""

    measured: Measured | None = None
    begun: int = 0  # readings
    done: int = 0
    begun_at: float = 0.0  # when the newest reading that was begun, was
    measured_at: float = 0.0  # when ``measured`` was begun
    wanted: bool = False
    closed: bool = False


class ReadingThread:
    """Reads in a thread of its own, when somebody asks.

    ``interval``: for that many seconds, a reading serves whoever asks. ``report`` is called in the
    thread, with each message of a reading, and with the exception that ended the thread, if one
    did.
    """

    def __init__(
        self,
        meter: MachineMetrics,
        *,
        interval: float,
        report: Callable[[str | BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meter = meter
        self._interval = interval
        self._report = report
        self._clock = clock
        self._state = _State()
        self._changed = threading.Condition()
        # A daemon: a thread that hangs in the driver must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="gpuprobe-reader", daemon=True)
        self._thread.start()

    def families(self, timeout: float = READ_TIMEOUT) -> list[Family]:
        """What is to be exported now, after ``timeout`` seconds at most."""
        measured = self.measured(timeout)
        with self._changed:
            age = self._clock() - self._state.measured_at
        return families_of(measured, stale=measured is not None and age > STALE + self._interval)

    def measured(self, timeout: float = READ_TIMEOUT) -> Measured | None:
        """The newest reading: one that is young enough, else a new one, if it comes in time."""
        state = self._state
        with self._changed:
            age = self._clock() - state.measured_at
            if (state.measured is None or age >= self._interval) and not state.closed:
                busy = state.begun > state.done
                if busy and self._clock() - state.begun_at > timeout:
                    return state.measured  # it hangs: others have waited for it in vain
                # A reading under way is as good as one that begins now.
                awaited = state.begun if busy else state.begun + 1
                state.wanted = not busy
                self._changed.notify_all()
                self._changed.wait_for(lambda: state.done >= awaited or state.closed, timeout)
            return state.measured

    def close(self) -> None:
        """End the thread. One that hangs in the driver is left behind."""
        with self._changed:
            self._state.closed = True
            self._changed.notify_all()
        self._thread.join(1.0)

    def _work(self) -> None:
        state = self._state
        try:
            with self._meter:
                while True:
                    with self._changed:
                        self._changed.wait_for(lambda: state.wanted or state.closed)
                        if state.closed:
                            return
                        state.wanted = False
                        state.begun += 1
                        state.begun_at = self._clock()
                    measured = self._meter.read()
                    with self._changed:
                        state.measured, state.measured_at = measured, state.begun_at
                        state.done += 1
                        self._changed.notify_all()
                    for message in measured.messages:
                        self._report(message)
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            with self._changed:
                state.closed = True
                self._changed.notify_all()
            self._report(error)
