"""What a simulated GPU reports to a recording that is made on it: assumptions, kernel launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from gpuprobe.model.run.launches import LaunchedKernel
from gpuprobe.model.run.work import Action


class LaunchCounter(Protocol):
    """Counts launches by kernel, configuration, place and phase. Places and phases are numbers of
    the caller; place 0 is for kernels that no operator launched.
    """

    def start(self, here: Callable[[], int]) -> bool:
        """Count from now on. ``here`` is called before each operator, in the thread that runs it,
        and returns the number of the place that called it. It must not raise. False if another
        recording's launches are being counted.
        """

    def stop(self) -> None:
        """Stop counting."""

    def phase(self, number: int) -> None:
        """Count further launches in this phase."""

    def take(self) -> Sequence[tuple[LaunchedKernel, int, int, int]]:
        """Kernel, place, phase and count of the launches since the last call."""


class GpuCall(NamedTuple):
    """A call to the GPU. ``operator``: the number that `CallLog.begin` got in that thread; 0: none.
    ``value``: bytes, or the number of an event. ``what``: of a copy its direction, followed by
    " sync" if the host waits; of a collective its name, and ``group`` the sizes of its `Work`.
    """

    action: Action
    device: int
    stream: int
    operator: int
    value: int
    what: str
    thread: int
    group: tuple[int, ...] = ()


class CallLog(Protocol):
    """Logs calls to the GPU, in order."""

    begin: Callable[[int], int]
    """An operator begins in this thread: gets its number, returns the one before, for `end`."""
    end: Callable[[int], None]
    note: Callable[[int], None]
    """An operator begins and ends that makes no calls."""

    def start(self) -> bool:
        """Log from now on; False if another recording's calls are being logged."""

    def stop(self) -> None:
        """Stop logging."""

    def take(self) -> tuple[list[GpuCall], bool]:
        """The calls since the last time, and whether these are all."""


_counter: LaunchCounter | None = None
_log: CallLog | None = None


def set_call_log(log: CallLog) -> Callable[[], None]:
    """Log the calls of recordings with ``log``. Returns a function that ends this."""
    global _log
    _log = log

    def end() -> None:
        global _log
        if _log is log:
            _log = None

    return end


def call_log() -> CallLog | None:
    """The log of this process; None if calls cannot be logged."""
    return _log


def set_launch_counter(counter: LaunchCounter) -> Callable[[], None]:
    """Count the launches of recordings with ``counter``. Returns a function that ends this."""
    global _counter
    _counter = counter

    def end() -> None:
        global _counter
        if _counter is counter:
            _counter = None

    return end


def launch_counter() -> LaunchCounter | None:
    """The counter of this process; None if launches cannot be counted."""
    return _counter


_sources: list[Callable[[], Iterable[str]]] = []


def add_assumptions(source: Callable[[], Iterable[str]]) -> Callable[[], None]:
    """Add a source of assumptions. Returns a function that removes it, once."""
    _sources.append(source)

    def end() -> None:
        if source in _sources:
            _sources.remove(source)

    return end


def assumptions() -> tuple[str, ...]:
    """All assumptions so far, each once."""
    return tuple(dict.fromkeys(text for source in _sources for text in source()))
