"""Several simulated GPUs in one process: DataParallel, a split model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conservation import check_steps
from programs import Net, batches, no_hooks_left
from sinks import KeepingSink
from torch import nn

import gpuprobe
from gpuprobe.model.values import Unavailable
from gpuprobe.sampler.recorder import Recorder

# torch warns that replicas on one device are slow, and the like.
pytestmark = [pytest.mark.simulated, pytest.mark.filterwarnings("ignore")]


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Linear(16, 64).to("cuda:0")
        self.upper = nn.Linear(64, 4).to("cuda:1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.upper(torch.relu(self.lower(x.to("cuda:0"))).to("cuda:1"))


def data_parallel() -> nn.Module:
    return nn.DataParallel(Net().cuda())


def split() -> nn.Module:
    return Split()


def trained(build: Callable[[], nn.Module]) -> list[float]:
    torch.manual_seed(3)
    net = build()
    optimizer = torch.optim.AdamW(net.parameters())
    losses = []
    for x in batches():
        optimizer.zero_grad()
        loss = net(x.cuda()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def recorded(build: Callable[[], nn.Module], level: str) -> tuple[KeepingSink, list[float]]:
    sink = KeepingSink()
    with (
        gpuprobe.virtual_gpu("2xa100-40gb"),
        no_hooks_left(),
        Recorder(sink, level=level),
    ):
        losses = trained(build)
    return sink, losses


@pytest.mark.parametrize("build", [data_parallel, split])
def test_both_devices_add_up(build: Callable[[], nn.Module]) -> None:
    with gpuprobe.virtual_gpu("2xa100-40gb"):
        expected = trained(build)
    for level in ("counters", "trace"):
        sink, losses = recorded(build, level)
        assert losses == expected
        assert sink.ends[0].gpuprobe_faults == ()
        assert len(sink.steps) == 4
        check_steps(sink.steps, sink.traces)
        for step in sink.steps:
            assert [window.device for window in step.windows] == ["cuda:0", "cuda:1"]
            for window in step.windows:
                assert not isinstance(window.end.allocated, Unavailable)
        if level == "trace":
            devices = [sink.traces[name].device for name in sink.steps[1].traces]
            assert devices == ["cuda:0", "cuda:1"]
