"""Who counts the kernels that this process launches, for a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def counted_by(counter: LaunchCounter) -> Callable[[], None]:
    """Have ``counter`` count the launches of recordings. Returns what ends that."""
    global _counter
    _counter = counter

    def end() -> None:
        global _counter
        if _counter is counter:
            _counter = None

    return end


def counter() -> LaunchCounter | None:
    """The counter of this process, None where launches cannot be counted."""
    return _counter
