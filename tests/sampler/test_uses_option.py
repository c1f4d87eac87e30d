"""The uses of memory on a GPU that is not simulated: they are noted if a program asks for them."""

from __future__ import annotations

import sys
import threading
from typing import Any, cast

import pytest
import torch

from gpuprobe.sampler.failures import Failures
from gpuprobe.sampler.recorder import NO_USES, Recorder
from gpuprobe.sampler.tracing.traces import Traces


class Timeline:
    path = "forward"


class Sink:
    """Keeps blind spots; everything else that is recorded is dropped."""

    def __init__(self) -> None:
        self.spots: list[object] = []

    def blind_spot(self, spot: object) -> None:
        self.spots.append(spot)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def _refused(*args: object) -> Any:
    raise AssertionError(args)


@pytest.mark.parametrize(
    ("simulated", "asked"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_uses_are_noted_if_they_are_asked_for_and_always_on_a_simulated_gpu(
    *, simulated: bool, asked: bool
) -> None:
    traces = Traces(cast("Any", Sink()), Failures())
    traces.start_cuda(cast("Any", Timeline()), _refused, simulated=simulated, uses=asked)
    try:
        value = torch.zeros(3)
        for _ in range(300):
            value = value + 1
        assert (traces.uses is not None) is (simulated or asked)
    finally:
        traces.stop()
    cost = traces.uses_cost
    assert (cost is not None) is asked  # nothing is timed without being asked for
    if cost is not None:
        assert cost.operators > 300
        assert cost.each_ns > 0
    assert torch.equal(value, torch.full((3,), 300.0))


def test_operators_of_several_threads_are_each_noted_with_their_own_number() -> None:
    """As with a `DataLoader` that pins memory, whose thread runs operators."""
    faults: list[Exception] = []
    traces = Traces(cast("Any", Sink()), Failures())
    traces.start_cuda(cast("Any", Timeline()), faults.append, simulated=False, uses=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def add() -> None:
        value = torch.zeros(3)
        for _ in range(10_000):
            value.add_(1)

    threads = [threading.Thread(target=add) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        traces.stop()
    assert not faults
    assert traces.uses_cost is not None
    assert traces.uses_cost.operators >= 3 * 10_001


def test_without_a_gpu_the_recording_says_that_no_uses_are_noted() -> None:
    sink = Sink()
    with Recorder(cast("Any", sink), level="trace", uses=True):
        pass
    if torch.version.cuda is None or not torch.cuda.device_count():
        assert NO_USES in sink.spots
