"""Planted regressions are found and blamed on their line; harmless changes pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuprobe.analysis.baseline import Baseline, CheckResult, dumps, loads
from gpuprobe.api.check import compare, measure

pytestmark = pytest.mark.filterwarnings("ignore")

PROGRAM = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH = 1024


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width=256, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def evaluate(model):
    model.eval()
    with torch.no_grad():
        x = torch.randn(BATCH, 256, device="cuda")
        for block in model.blocks:
            x = block(x)
        score = x.mean()
    model.train()
    return score


def main():
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    history = []
    for step in range(6):
        x = torch.randn(BATCH, 256, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(0.0)
        large = torch.zeros(256, 1024, device="cuda")
        del large
        if step % 2:
            evaluate(model)


main()
"""

# name -> (what is replaced, by what, the metric that has to show it, a part of the blamed line)
PLANTED = {
    "loss tensors kept": (
        "history.append(0.0)",
        "history.append(x * 1.0)",
        "growth_per_step",
        "history.append(x * 1.0)",
    ),
    "retain_graph": (
        "loss.backward()",
        "loss.backward(retain_graph=True); history.append(loss)",
        "growth_per_step",
        None,
    ),
    "checkpoint removed": (
        "x = checkpoint(block, x, use_reentrant=False)",
        "x = block(x)",
        "peak_allocated",
        "return x + self.down(F.gelu(self.up(x)))",
    ),
    "optimizer with more state": (
        "torch.optim.SGD(model.parameters(), lr=0.01)",
        "torch.optim.AdamW(model.parameters(), lr=0.01)",
        "steady_allocated",
        "optimizer.step()",
    ),
    "fp32 in place of autocast": (
        'torch.autocast("cuda", dtype=torch.bfloat16)',
        'torch.autocast("cuda", dtype=torch.bfloat16, enabled=False)',
        "peak_allocated",
        None,
    ),
    "forgotten del": (
        "        del large\n",
        "        history.append(large)\n",
        "growth_per_step",
        "large = torch.zeros",
    ),
    "growing cache": (
        "history.append(0.0)",
        "history.append(torch.zeros(128, 1024, device='cuda'))",
        "growth_per_step",
        "history.append(torch.zeros",
    ),
    "larger batch": ("BATCH = 1024", "BATCH = 2048", "peak_allocated", None),
    "missing no_grad": (
        "    with torch.no_grad():\n        x =",
        "    if True:\n        x =",
        "peak_allocated",
        None,
    ),
}

HARMLESS = {
    "comments": ("def main():\n", "def main():\n    # a comment\n    # and another one\n"),
    "renamed function": ("evaluate(", "run_evaluation("),
    "renamed module": ("self.up", "self.expand"),
    "another seed": ("manual_seed(0)", "manual_seed(7)"),
    "an unused module": (
        "\n\ndef evaluate",
        "\n\nclass Unused(nn.Module):\n    pass\n\n\ndef evaluate",
    ),
    "reordered methods": (
        "def main():\n",
        "def helper():\n    return None\n\n\ndef main():\n    helper()\n",
    ),
    "a value on the host": ("history.append(0.0)", "history.append(float(step))"),
    "a longer name": ("optimizer", "the_optimizer"),
    "a local alias": (
        "        loss.backward()",
        "        total = loss\n        total.backward()\n        del total",
    ),
    "a docstring": ("class Net(nn.Module):\n", 'class Net(nn.Module):\n    """A net."""\n\n'),
}


def _measured(text: str, folder: Path, monkeypatch: Any) -> Baseline:
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    return measure("train.py", virtual="a100-40gb")


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    with pytest.MonkeyPatch.context() as patch:
        return _measured(PROGRAM, tmp_path_factory.mktemp("base"), patch)


def _check(old: str, new: str, baseline: Baseline, folder: Path, patch: Any) -> CheckResult:
    assert old in PROGRAM
    return compare(baseline, _measured(PROGRAM.replace(old, new), folder, patch))


def _conserves(result: CheckResult) -> None:
    assert result.rows is not None
    (peak,) = (metric for metric in result.metrics if metric.name == "peak_allocated")
    for rows in result.rows.values():
        assert sum(row.delta for row in rows) == peak.delta


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_regression_is_found(
    name: str, baseline: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, metric, blamed = PLANTED[name]
    result = _check(old, new, baseline, tmp_path, monkeypatch)
    assert metric in {found.name for found in result.regressions}
    assert not result.ok
    assert result.cause
    _conserves(result)
    if blamed is not None:
        assert result.rows is not None
        first = next(row for row in result.rows["line"] if row.delta > 0)
        number = int(first.key.partition(":")[2].partition(" ")[0])
        line = PROGRAM.replace(old, new).splitlines()[number - 1]
        assert blamed in line, (first.key, line)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change_passes(
    name: str, baseline: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = HARMLESS[name]
    result = _check(old, new, baseline, tmp_path, monkeypatch)
    assert result.regressions == ()
    assert result.mismatches == ()
    _conserves(result)
    assert result.rows is not None
    # What only moved is not shown as gone and new.
    assert {row.status for row in result.rows["line"]} <= {"same", "moved"}


def test_a_hidden_synchronisation_is_a_regression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, text in (
        ("before", PROGRAM),
        ("after", PROGRAM.replace("history.append(0.0)", "history.append(loss.item())")),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(text, encoding="utf-8")
        monkeypatch.chdir(folder)
        found.append(measure("train.py", virtual="a100-40gb", hazards=True))
    result = compare(*found)
    assert [metric.name for metric in result.regressions] == ["implicit_syncs_per_step"]
    assert found[0].metrics["races"] == 0


def test_the_text_is_stable_and_reads_back(
    baseline: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = dumps(baseline)
    assert dumps(_measured(PROGRAM, tmp_path, monkeypatch)) == text
    again = loads(text)
    assert dumps(again) == text
    assert str(tmp_path) not in text
    assert json.loads(text)["metrics"]["peak_allocated"]["text"].endswith("MiB")


def test_another_environment_is_never_silent(baseline: Baseline) -> None:
    import dataclasses

    other = dataclasses.replace(
        baseline, environment={**baseline.environment, "device": "virtual t4"}
    )
    result = compare(baseline, other)
    assert not result.ok
    assert any("virtual t4" in text for text in result.mismatches)
