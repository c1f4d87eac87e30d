"""Clocks and waits of the host, which a recording on a GPU has: the real sampler on a simulated
GPU that is taken for one whose work takes time, over a simulated NVML.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

import gpuprobe
from gpuprobe.analysis.compare.diff import diff_recordings
from gpuprobe.analysis.compare.times import MeasuredClock, MeasuredStepTime
from gpuprobe.model.run.session import Step
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.sampler.sources import SmClocks
from gpuprobe.testing.fake_nvml import FakeNvml
from gpuprobe.testing.fleet import Fleet, load_fleet

GPU = "h100-80gb"


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    found = load_fleet("8xh100")
    monkeypatch.setattr(pynvml, "nvmlLib", FakeNvml(found))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    yield found
    pynvml._nvmlGetFunctionPointer_cache.clear()


def test_the_clock_of_a_gpu_with_the_reasons(fleet: Fleet) -> None:
    clocks = SmClocks(lambda index: str(fleet.devices[index]["uuid"]))
    assert clocks.read(0) == (1755, ())
    fleet.devices[0].update(clocks=[1200, 1200, 2619, 1545], throttle=0x4)
    assert clocks.read(0) == (1200, ("power cap",))


def test_a_gpu_that_is_lost_or_unknown_has_no_clock(fleet: Fleet) -> None:
    lost = SmClocks(lambda index: str(fleet.devices[index]["uuid"]))
    assert lost.read(1) == (1755, ())
    fleet.devices[1]["lost"] = True
    for clocks in (lost, SmClocks(lambda index: "GPU-of-nobody")):
        found = clocks.read(1)
        assert isinstance(found, Unavailable)
        assert found.status is ReadStatus.ERROR
        assert found.reason.startswith("NVML: ")


@pytest.mark.simulated
@pytest.mark.filterwarnings("ignore")
def test_a_recording_on_a_gpu_has_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fleet: Fleet
) -> None:
    uuid = str(fleet.devices[0]["uuid"])
    with gpuprobe.virtual_gpu(GPU):
        import torch

        layer = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        x = torch.randn(8, 64, device="cuda")

        def train(path: Path) -> list[Step]:
            with gpuprobe.record(path, level="trace"):
                for _ in range(3):
                    loss = layer(x).square().mean()
                    loss.backward()
                    optimizer.step()
                    loss.item()
                    torch.cuda.synchronize()
            return list(gpuprobe.load(path).ranks[0].steps)

        simulated = train(tmp_path / "simulated.gpuprobe")
        assert all(isinstance(step.host_waits, Unavailable) for step in simulated)
        monkeypatch.setattr("gpuprobe.sampler.gpu_clock.takes_time", lambda: True)
        monkeypatch.setattr(SmClocks, "of_torch", lambda: SmClocks(lambda index: uuid))
        before = torch.Tensor.item, torch.cuda.synchronize
        steps = train(tmp_path / "real.gpuprobe")
        assert (torch.Tensor.item, torch.cuda.synchronize) == before
    waits = steps[1].host_waits
    assert not isinstance(waits, Unavailable)
    calls = {wait.call: wait.count for wait in waits}
    assert calls == {"Tensor.item()": 1, "torch.cuda.synchronize()": 1}
    read = {window.sm_clock for step in steps for window in step.windows if window.device != "cpu"}
    assert 1755 in read
    one, two = (gpuprobe.load(tmp_path / name) for name in ("simulated.gpuprobe", "real.gpuprobe"))
    found = diff_recordings(one, two).step_time
    assert isinstance(found, MeasuredStepTime)
    assert found.predicted.host_waits == 2
    assert isinstance(found.clock, MeasuredClock)
    assert (found.clock.median, found.clock.sheet) == (1755, 1983)


def test_a_subclass_meets_its_own_calls_alone() -> None:
    import torch

    from gpuprobe.sampler.hooks.waits import TimedWaits

    calls: list[str] = []

    class Noted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    value = torch.ones(1).as_subclass(Noted)
    undo = TimedWaits().install()
    try:
        assert value.item() == 1
        with pytest.raises(TypeError):
            torch.Tensor.item()
    finally:
        for one in undo:
            one()
    assert calls == ["item"]
