"""What a simulated GPU reports to a recording that is made on it: assumptions, kernel launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from gpuprobe.model.run.launches import LaunchedKernel


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


_counter: LaunchCounter | None = None


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
