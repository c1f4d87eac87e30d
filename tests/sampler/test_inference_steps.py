"""Programs that only infer have steps, too: each outermost call of a model in inference_mode."""

from __future__ import annotations

from pathlib import Path

import torch

import gpuprobe
from gpuprobe.analysis.trace.parts import full_steps
from gpuprobe.model.run.session import Step


def steps(path: Path) -> list[Step]:
    return list(gpuprobe.load(path).ranks[0].steps)


def ends(path: Path) -> list[str]:
    return [step.ended_by for step in steps(path)]


class Pair(torch.nn.Module):
    """A model that calls another one, which is no part of it."""

    def __init__(self, other: torch.nn.Module) -> None:
        super().__init__()
        self.own = torch.nn.Linear(4, 4)
        self._other = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self._other[0](x))


def test_each_outermost_call_is_a_step(tmp_path: Path) -> None:
    model = Pair(torch.nn.Linear(4, 4))
    with gpuprobe.record(tmp_path / "a.gpuprobe"), torch.inference_mode():
        for _ in range(3):
            model(torch.ones(2, 4))
    assert ends(tmp_path / "a.gpuprobe") == ["inference"] * 3


def test_other_calls_are_none(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with gpuprobe.record(tmp_path / "a.gpuprobe"):
        model(torch.ones(2, 4))
        with torch.no_grad():
            model(torch.ones(2, 4))
    assert ends(tmp_path / "a.gpuprobe") == ["end"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gpuprobe.record(tmp_path / "b.gpuprobe"), torch.inference_mode():
        model(torch.ones(2, 4))
    assert ends(tmp_path / "b.gpuprobe") == ["end"]
    del optimizer


def test_marked_steps_are_the_programs_own(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with gpuprobe.record(tmp_path / "a.gpuprobe") as rec, torch.inference_mode():
        for _ in range(2):
            with rec.step():
                model(torch.ones(2, 4))
                model(torch.ones(2, 4))
    assert ends(tmp_path / "a.gpuprobe") == ["user"] * 2


def test_training_after_an_inference_has_its_own_steps_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with gpuprobe.record(tmp_path / "a.gpuprobe"):
        with torch.inference_mode():
            model(torch.ones(2, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            with torch.inference_mode():
                model(torch.ones(2, 4))
    assert ends(tmp_path / "a.gpuprobe") == ["inference", "optimizer", "optimizer", "end"]
    assert [step.index for step in full_steps(steps(tmp_path / "a.gpuprobe"))] == [1, 2]
