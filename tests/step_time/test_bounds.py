"""What bounds a step: the GPU, or the launches that it waits for."""

import pytest

from gpuprobe.model.plans.step_time import HOST, MEMORY
from gpuprobe.step_time.predict import _limits, _Part


def sums(parts: list[_Part]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        found[part.bound] = found.get(part.bound, 0.0) + part.end - part.start
    return found


KERNELS_AND_GAPS = [
    _Part(0.0, 2.0, MEMORY, 0),
    _Part(2.0, 6.0, HOST, 1),
    _Part(6.0, 8.0, MEMORY, 1),
    _Part(8.0, 9.0, HOST, 2),
    _Part(9.0, 10.0, MEMORY, 2),
]


def test_kernels_that_end_before_the_next_launch_are_bound_by_launches() -> None:
    """Only the last one, which no wait for a launch follows, is bound by itself."""
    assert sums(_limits(KERNELS_AND_GAPS, [])) == {HOST: 9.0, MEMORY: 1.0}


def test_what_the_host_waits_for_is_bound_by_the_gpu() -> None:
    waits = [(1.0, 2.0), (6.5, 7.0)]  # for the first kernel, and for half of the second
    assert sums(_limits(KERNELS_AND_GAPS, waits)) == {MEMORY: 4.0, HOST: 6.0}


def test_without_gaps_nothing_is_bound_by_launches() -> None:
    busy = [part for part in KERNELS_AND_GAPS if part.bound != HOST]
    assert _limits(busy, []) == busy


@pytest.mark.parametrize("waits", [[], [(1.0, 2.0)], [(6.5, 7.0)], [(8.0, 8.5)]])
def test_the_time_stays_the_same(waits: list[tuple[float, float]]) -> None:
    assert sum(sums(_limits(KERNELS_AND_GAPS, waits)).values()) == pytest.approx(10.0)
