"""What a simulated GPU reports to a recording that is made on it: assumptions, kernel launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from gpuprobe.model.run.launches import LaunchedKernel


class LaunchCounter(Protocol):
    """Counts launches by kernel, configuration, place and phase. Places and phases are numbers of
    the caller's; 0 is the place of what no operator launched.
    """

    def start(self, here: Callable[[], int]) -> bool:
        """Count from now on. ``here`` is called before each operator, in the thread that runs it,
        and returns the number of the place that called it. It must not raise. False if another
        recording's launches are counted.
        """

    def stop(self) -> None:
        """Count no more."""

    def phase(self, number: int) -> None:
        """What is launched from now on is launched in this phase."""

    def take(self) -> Sequence[tuple[LaunchedKernel, int, int, int]]:
        """Kernel, place, phase and count of what was launched since the last time."""


_counter: LaunchCounter | None = None


def set_launch_counter(counter: LaunchCounter) -> Callable[[], None]:
    """Have ``counter`` count the launches of recordings. Returns what ends that."""
    global _counter
    _counter = counter

    def end() -> None:
        global _counter
        if _counter is counter:
            _counter = None

    return end


def launch_counter() -> LaunchCounter | None:
    """The counter of this process, None where launches cannot be counted."""
    return _counter


_sources: list[Callable[[], Iterable[str]]] = []


def add_assumptions(source: Callable[[], Iterable[str]]) -> Callable[[], None]:
    """Have ``source`` asked for its assumptions. Returns what ends that."""
    _sources.append(source)
    return lambda: _sources.remove(source)


def assumptions() -> tuple[str, ...]:
    """All that were made so far, each once."""
    return tuple(dict.fromkeys(text for source in _sources for text in source()))
