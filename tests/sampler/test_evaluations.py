"""Evaluations, what is kept from step to step, and pinned memory, as a report tells them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpuprobe

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.simulated]
MIB = 1 << 20


def _network() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda()
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: int = 64) -> torch.Tensor:
    loss = net(torch.randn(batch, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _evaluates(*, grad: bool) -> None:
    net, optimizer = _network()
    for _ in range(2):
        net.train()
        _step(net, optimizer)
        net.eval()
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                out = net(torch.randn(8192, 512, device="cuda"))
                out.square().mean().item()
    net.train()
    _step(net, optimizer)


def _trains_in_eval_mode() -> None:
    net, optimizer = _network()
    net.eval()
    for _ in range(3):
        _step(net, optimizer, 4096)


def _keeps() -> None:
    net, optimizer = _network()
    losses, window = [], []
    hosts = [torch.empty(n * MIB, dtype=torch.uint8, pin_memory=True) for n in (3, 5)]
    for _ in range(20):
        loss = _step(net, optimizer)
        losses.append(loss)
        window.append(loss.clone())
        del window[:-3]
    del hosts


def _recorded(tmp_path: Path, program: Any, **options: Any) -> dict[str, Any]:
    path = tmp_path / "run.gpuprobe"
    with gpuprobe.virtual_gpu("a100-40gb", "shapes"):
        recorder = gpuprobe.record(path, level="trace")
        with recorder:
            program(**options)
    return gpuprobe.report(gpuprobe.load(path))


def _phases(report: Any) -> set[str]:
    return {phase["path"] for row in report["steps"]["rows"] for phase in row["phases"]}


def test_an_evaluation_with_gradients_is_named(tmp_path: Path) -> None:
    report = _recorded(tmp_path, _evaluates, grad=True)
    assert report["peak"]["phase"] == "evaluation"
    assert {"forward", "backward", "evaluation"} <= _phases(report)
    (finding,) = [row for row in report["findings"] if row["rule"] == "GP306"]
    assert finding["location"]["function"] == "_evaluates"
    assert report["causes"][0]["rule"] == "evaluation"
    assert "no_grad" in report["head"]["fix"]
    # What waits for a backward pass that does not come is an activation, not temporary.
    rows = {row["key"]: row["bytes"] for row in report["categories"]["rows"]}
    assert rows["activation"] >= 3 * 8192 * 512 * 4
    assert rows.get("temporary", 0) <= 8192 * 512 * 4


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


def _trains_by_parts() -> None:
    net = _Parts().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net.train()
        net.second(net.first(torch.randn(64, 512, device="cuda"))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        net.eval()
        net(torch.randn(8192, 512, device="cuda")).mean().item()


def test_an_evaluation_is_where_the_whole_model_is_called(tmp_path: Path) -> None:
    """Training runs the line in its forward, too."""
    report = _recorded(tmp_path, _trains_by_parts)
    (finding,) = [row for row in report["findings"] if row["rule"] == "GP306"]
    assert finding["location"]["function"] == "_trains_by_parts"


def test_one_without_gradients_is_a_phase_and_no_finding(tmp_path: Path) -> None:
    report = _recorded(tmp_path, _evaluates, grad=False)
    assert "evaluation" in _phases(report)
    assert report["findings"] == []
    assert "no_grad" not in str(report["head"])
    assert "activation" not in {row["key"] for row in report["categories"]["rows"]}


def test_a_model_that_is_trained_in_eval_mode_evaluates_nothing(tmp_path: Path) -> None:
    report = _recorded(tmp_path, _trains_in_eval_mode)
    assert "evaluation" not in _phases(report)
    assert report["findings"] == []


def test_a_number_kept_in_each_step_is_named_and_a_window_is_not(tmp_path: Path) -> None:
    report = _recorded(tmp_path, _keeps)
    kept = [cause for cause in report["causes"] if cause["rule"] == "growth"]
    assert ["losses" in cause["sentence"] for cause in kept] == [True]
    assert re.search(r"\(a list of 1\d in _keeps\) grows", kept[0]["sentence"])
    assert kept[0]["bytes"] < MIB
    assert "losses" not in report["head"]["cause"]  # the peak has another cause
    pinned = report["non_tensor_memory"]["pinned"]
    assert pinned["in_use"] == 12 * MIB  # 4 and 8
    (line,) = pinned["lines"]
    assert (line["bytes"], line["tensors"]) == (8 * MIB, 2)
    assert line["place"].endswith("in <listcomp>") or line["place"].endswith("in _keeps")
