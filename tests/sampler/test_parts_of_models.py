"""Phases of programs that call parts of a model, not the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import Checkpointed, Mlp, seeded
from sinks import KeepingSink
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpuprobe.sampler.recorder import Recorder

LEVELS = pytest.mark.parametrize("level", ["counters", "trace"])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class TwoTowers(nn.Module):
    """Has no forward of its own, as a module that a trainer calls by ``training_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.item = Encoder(), Encoder()

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return (self.query(x) * self.item(x)).mean()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "s")))
    yield
    dist.destroy_process_group()


def phases(sink: KeepingSink) -> list[list[str]]:
    """Of each step, the phases but those of the first one and of the time between them."""
    return [
        [phase.path for phase in step.phases if phase.path not in ("setup", "other")]
        for step in sink.steps
    ]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 16)).mean().backward()
    optimizer.step()


@LEVELS
@pytest.mark.usefixtures("alone")
def test_the_module_of_a_wrapper_in_an_evaluation(level: str) -> None:
    sink = KeepingSink()
    model = DistributedDataParallel(seeded(Mlp))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(sink, level=level):
        for _ in range(2):
            _step(model, optimizer)
            own = model.module.eval()
            with torch.no_grad():
                own(torch.randn(8, 16)).argmax(1).sum()
            own.train()
        _step(model, optimizer)
    first, *others = phases(sink)
    assert "evaluation" not in first
    assert len(others) >= 2
    for found in others[:2]:
        assert "evaluation" in found
        assert "forward" in found
    assert "forward/forward" not in {path for step in sink.steps for path in phases(sink)[0]}


@LEVELS
def test_parts_that_a_method_of_the_model_calls(level: str) -> None:
    sink = KeepingSink()
    model = TwoTowers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    other = Mlp()  # is called first, so that the model is known when its parts are called
    with Recorder(sink, level=level):
        other(torch.randn(8, 16))
        for _ in range(3):
            optimizer.zero_grad()
            model.training_step(torch.randn(8, 16)).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model.item(torch.randn(8, 16))
    for found in phases(sink)[:3]:
        assert {"forward", "backward", "optimizer"} <= set(found)
        assert "evaluation" not in found
    assert "evaluation" in phases(sink)[-1]


@LEVELS
def test_a_frozen_part_of_a_model_that_trains_is_no_evaluation(level: str) -> None:
    sink = KeepingSink()
    model = TwoTowers()
    model.item.eval().requires_grad_(False)
    optimizer = torch.optim.SGD(model.query.parameters(), 0.1)
    with Recorder(sink, level=level):
        for _ in range(3):
            optimizer.zero_grad()
            with torch.no_grad():
                items = model.item(torch.randn(8, 16))
            (model.query(torch.randn(8, 16)) * items).mean().backward()
            optimizer.step()
    for found in phases(sink)[1:3]:
        assert "forward" in found
        assert "evaluation" not in found


def test_parts_inside_of_a_call_or_of_a_recomputation_are_not_reported() -> None:
    begun: list[str] = []

    class Noting(Recorder):
        def begin(self, phase: str, *, evaluation: bool = False) -> None:
            begun.append(phase)
            super().begin(phase, evaluation=evaluation)

    model = seeded(Checkpointed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Noting(KeepingSink()):
        for _ in range(3):
            _step(model, optimizer)
    assert begun.count("forward") == 3
    assert begun.count("recompute") == 3
