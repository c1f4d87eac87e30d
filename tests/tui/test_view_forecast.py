"""When memory will run out: right where it grows, silent where it does not."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from gpuprobe.analysis.growth import LEAST_STEPS, Forecast, forecast, forecast_of_steps
from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.run.session import DeviceWindow, Step
from gpuprobe.model.values import Peak, Unavailable

MIB = 1 << 20
GIB = 1 << 30


def found(levels: list[int], limit: int | Unavailable) -> Forecast:
    result = forecast(list(enumerate(levels)), limit)
    assert isinstance(result, Forecast), result.reason
    return result


def reason(levels: list[int]) -> str:
    result = forecast(list(enumerate(levels)), 1 << 40)
    assert isinstance(result, Unavailable)
    return result.reason


@given(st.integers(1, 64 * MIB), st.integers(0, 1 << 34), st.integers(LEAST_STEPS, 150))
@settings(max_examples=examples(40))
def test_steady_growth_is_told_exactly(slope: int, start: int, steps: int) -> None:
    levels = [start + slope * i for i in range(steps)]
    result = found(levels, levels[-1] + 40 * slope)
    assert (result.soonest, result.latest) == (40, 40)
    assert "in 40 steps" in result.in_words()


def test_the_interval_holds_what_comes() -> None:
    """Of 200 noisy leaks, the true number of steps lies in the interval nearly always."""
    rng = random.Random(7)
    inside = told = 0
    for _ in range(200):
        slope = rng.randint(MIB, 20 * MIB)
        noise = rng.uniform(0.5, 4) * slope
        levels = [round(i * slope + rng.gauss(0, noise)) + (1 << 30) for i in range(60)]
        result = forecast(list(enumerate(levels)), (1 << 30) + 160 * slope)
        if isinstance(result, Unavailable):
            continue
        told += 1
        assert isinstance(result.soonest, int)
        assert isinstance(result.latest, int)
        # The level it starts from is as noisy as the others: four noises of steps, at most.
        slack = 4 * noise / slope
        inside += result.soonest - slack <= 101 <= result.latest + slack
    assert told > 150
    assert inside > 0.95 * told


def test_noise_and_what_stops_are_no_leaks() -> None:
    rng = random.Random(3)
    false_alarms = 0
    for _ in range(200):
        levels = [round(rng.gauss(1 << 30, 5 * MIB)) for _ in range(60)]
        false_alarms += isinstance(forecast(list(enumerate(levels)), 1 << 40), Forecast)
    assert false_alarms < 10
    assert "no growth" in reason([5 * MIB] * 30)
    assert "no growth" in reason([100 * MIB - MIB * i for i in range(30)])
    # A cache fills during the first steps, and is full.
    assert "no growth" in reason([min(i, 12) * MIB for i in range(40)])
    # Memory that is higher in every tenth step (an evaluation) does not grow.
    reason([GIB if i % 10 == 9 else MIB for i in range(60)])


def test_few_steps_tell_nothing() -> None:
    assert reason([MIB * i for i in range(LEAST_STEPS - 1)]) == (
        f"not enough evidence: {LEAST_STEPS - 1} of {LEAST_STEPS} steps"
    )


def test_an_unknown_limit_leaves_the_growth() -> None:
    result = found([MIB * i for i in range(20)], Unavailable("no driver"))
    assert isinstance(result.soonest, Unavailable)
    assert result.in_words() == "grows by 1.0 MiB per step"
    assert found([MIB * i for i in range(20)], MIB).soonest == 0  # reached


def step(index: int, peak: int, ended_by: str = "optimizer") -> Step:
    window = DeviceWindow("cuda:0", AllocatorCounts(), AllocatorCounts(), Peak(peak, 2 * peak))
    return Step(index, 0, 1, (), (window,), ended_by=ended_by)


def test_warm_up_and_what_follows_the_last_step_do_not_count() -> None:
    steps = [step(0, GIB), step(1, 50 * GIB)]
    steps += [step(i, i * MIB) for i in range(2, 30)]
    steps.append(step(30, 70 * GIB, ended_by="end"))
    result = forecast_of_steps(steps, "cuda:0", 129 * MIB)
    assert isinstance(result, Forecast)
    assert (result.soonest, result.latest, result.last) == (100, 100, 29)
    assert isinstance(forecast_of_steps(steps, "", 1), Unavailable)  # no resident memory known
