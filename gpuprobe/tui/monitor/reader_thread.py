"""A thread that reads the machine repeatedly and posts immutable messages.

Independent of Textual: the caller passes the function that posts a message.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol, runtime_checkable

from gpuprobe.errors import GpuprobeError
from gpuprobe.model.machine.monitor import Moment
from gpuprobe.model.record import record


class MachineReader(Protocol):
    """The source of readings: `gpuprobe.probes.monitor.Monitor`, or a log."""

    def read(self) -> Moment | None:
        """The next reading, or None after the last one."""


@runtime_checkable
class Seekable(Protocol):
    """A reader that can seek."""

    def step(self, by: int) -> None:
        """Make the next ``read`` return the reading ``by`` after the last one."""


@record(frozen=True, slots=True)
class Taken:
    """A successful reading."""

    moment: Moment


@record(frozen=True, slots=True)
class Failed:
    """A failed reading. The thread tries again."""

    text: str


@record(frozen=True, slots=True)
class Ended:
    """The source has no more readings."""


@record(frozen=True, slots=True)
class Done:
    """A job has ended. ``result``: what it returned or the error it raised, for ``then``."""

    then: Callable[[object], None]
    result: object


@record(frozen=True, slots=True)
class Crashed:
    """An internal error ended the thread."""

    error: Exception


class ReaderThread:
    """Reads every ``interval`` seconds, until `stop`. A message is posted only after the last one
    was `taken`: a slow screen gets fewer readings, not a queue of them.
    """

    def __init__(
        self,
        source: Callable[[], AbstractContextManager[MachineReader]],
        post: Callable[[object], object],
        interval: float = 1.0,
    ) -> None:
        self._source = source
        self._post = post
        self._interval = interval
        self._state = threading.Condition()
        self._stopping = False
        self._paused = False
        self._hurried = False
        self._step = 0
        self._waiting = False  # until the last message is taken
        self._jobs: deque[tuple[Callable[[], object], Callable[[object], None]]] = deque()
        self._thread = threading.Thread(target=self._run, name="gpuprobe-reader", daemon=True)

    # -- from the screen's thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End the thread. If the driver hangs, it is left running after ``timeout`` seconds."""
        with self._state:
            self._stopping = True
            self._state.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def pause(self, paused: bool) -> None:
        with self._state:
            self._paused = paused
            self._state.notify_all()

    def hurry(self) -> None:
        """Read now, even while paused."""
        with self._state:
            self._hurried = True
            self._state.notify_all()

    def step(self, by: int) -> None:
        """Read the reading ``by`` after the last one now, if the source can seek."""
        with self._state:
            self._step += by
            self._hurried = True
            self._state.notify_all()

    def taken(self) -> None:
        """Allow the next message: the last one has been shown."""
        with self._state:
            self._waiting = False
            self._state.notify_all()

    def run_job(self, job: Callable[[], object], then: Callable[[object], None]) -> None:
        """Run ``job`` in this thread, between two readings. `Done` brings its result to the thread
        of the screen, for ``then``.
        """
        with self._state:
            self._jobs.append((job, then))
            self._state.notify_all()

    @property
    def interval(self) -> float:
        return self._interval

    @interval.setter
    def interval(self, seconds: float) -> None:
        with self._state:
            self._interval = seconds
            self._state.notify_all()

    # -- in the thread

    def _run(self) -> None:
        try:
            self._read_until_stopped()
        except Exception as error:  # noqa: BLE001 (raised again in the screen's thread)
            self._send(Crashed(error))

    def _read_until_stopped(self) -> None:
        while not self._stopping:
            try:
                with ExitStack() as stack:
                    self._read(stack.enter_context(self._source()))
            except (GpuprobeError, OSError) as error:
                self._send(Failed(str(error)))
            if not self._stopping:
                self._wait_for_turn()

    def _read(self, reader: MachineReader) -> None:
        while not self._stopping:
            with self._state:
                by, self._step = self._step, 0
            if by and isinstance(reader, Seekable):
                reader.step(by)
            moment = reader.read()
            self._send(Ended() if moment is None else Taken(moment))
            self._wait_for_turn()

    def _send(self, message: object) -> None:
        with self._state:
            self._state.wait_for(lambda: not self._waiting or self._stopping)
            if self._stopping:
                return
            self._waiting = True
        self._post(message)

    def _wait_for_turn(self) -> None:
        """Run jobs until the next reading is due."""
        began = time.monotonic()
        while True:
            with self._state:
                if self._stopping:
                    return
                if not self._jobs:
                    left = began + self._interval - time.monotonic()
                    if self._hurried or (left <= 0 and not self._paused):
                        self._hurried = False
                        return
                    self._state.wait(None if self._paused else left)
                    continue
                job, then = self._jobs.popleft()
            try:
                result = job()
            except (GpuprobeError, OSError) as error:
                result = error
            self._send(Done(then, result))
