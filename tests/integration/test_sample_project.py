"""A project with a memory gate: its files are edited as people edit them.

Ten edits raise memory or add a synchronisation: the check must fail, and its first cause must be
the right line. Ten others, some of them together, do no harm, and must pass. The baseline is the
committed one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import warm_python

from gpuprobe.analysis.baseline.model import CheckResult
from gpuprobe.analysis.baseline.text import dumps
from gpuprobe.api.check import compare_as_planned, measure_as_planned
from gpuprobe.gate.files import read_baseline
from gpuprobe.gate.plan import plan
from gpuprobe.gate.project import read_project
from gpuprobe.reporters.json import check as check_json

SAMPLE = Path(__file__).parent / "sample_project"

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13"), reason="the committed baseline is of torch 2.13"
    ),
]


class Edit(NamedTuple):
    file: str
    old: str
    new: str


class Planted(NamedTuple):
    """``metric`` must be among the regressions; the first cause must be the line with ``blamed``
    in ``file``, as it is after the edits: one that they changed, or next to one that is gone."""

    edits: tuple[Edit, ...]
    metric: str
    file: str
    blamed: str


TRAIN, MODEL, DATA = "tagger/train.py", "tagger/model.py", "tagger/data.py"
EVALUATE = "tagger/evaluate.py"

_TEXT = (SAMPLE / MODEL).read_text(encoding="utf-8")
POSITIONS = _TEXT[_TEXT.index("    def positions(") : _TEXT.index("    def forward(self, tokens")]
LAST_LINE = "        return self.name(x.mean(dim=1))\n"

MAKE_OPTIMIZER = """\
def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
"""

PLANTED = {
    "loss tensors kept in a list": Planted(
        (
            Edit(TRAIN, "    total = torch.zeros((), device=device)\n", "    losses = []\n"),
            Edit(TRAIN, "total += loss.detach()", "losses.append(loss)"),
            Edit(TRAIN, "total.item() / len(loader)", "torch.stack(losses).mean().item()"),
        ),
        "growth_per_step",
        TRAIN,
        "losses.append(loss)",
    ),
    "a missing no_grad in evaluation": Planted(
        (Edit(EVALUATE, "    with torch.no_grad():\n", "    with torch.enable_grad():\n"),),
        "phase evaluation",
        EVALUATE,
        "with torch.enable_grad():",
    ),
    "retain_graph": Planted(
        (Edit(TRAIN, "loss.backward()", "loss.backward(retain_graph=True)"),),
        "peak_allocated",
        TRAIN,
        "loss.backward(retain_graph=True)",
    ),
    "a removed activation checkpoint": Planted(
        (Edit(MODEL, "x = checkpoint(block, x, use_reentrant=False)", "x = block(x)"),),
        "peak_allocated",
        MODEL,
        "x = block(x)",
    ),
    "an optimizer with more state": Planted(
        (
            Edit(
                TRAIN, "SGD(model.parameters(), lr=0.05, momentum=0.9)", "Adam(model.parameters())"
            ),
        ),
        "steady_allocated",
        TRAIN,
        "return torch.optim.Adam(model.parameters())",
    ),
    "fp32 in place of autocast": Planted(
        (
            Edit(
                TRAIN,
                "        with torch.autocast(device.type, dtype=torch.bfloat16):\n"
                "            scores = model(tokens)\n            loss = ",
                "        scores = model(tokens)\n        loss = ",
            ),
        ),
        "peak_allocated",
        TRAIN,
        "scores = model(tokens)",
    ),
    "a forgotten del": Planted(
        (Edit(TRAIN, "    del counts\n", ""),),
        "steady_allocated",
        TRAIN,
        "weights = 1.0 / counts.sum(",
    ),
    "a growing cache": Planted(
        (Edit(MODEL, "key = length\n", "key = (length, len(self._positions))\n"),),
        "growth_per_step",
        MODEL,
        "key = (length, len(self._positions))",
    ),
    "a larger batch": Planted(
        (Edit(DATA, "BATCH_SIZE = 16", "BATCH_SIZE = 24"),),
        "peak_allocated",
        DATA,
        "BATCH_SIZE = 24",
    ),
    "item() in the loop": Planted(
        (Edit(TRAIN, "total += loss.detach()", "total += loss.item()"),),
        "implicit_syncs_per_step",
        TRAIN,
        "total += loss.item()",
    ),
}

HARMLESS: dict[str, tuple[Edit, ...]] = {
    "comments, a docstring, what nobody uses, more words in the log, another seed": (
        Edit(
            TRAIN,
            "def make_optimizer",
            "# Optimizers differ in\n# their state.\ndef make_optimizer",
        ),
        Edit(
            MODEL,
            "class Attention(nn.Module):\n",
            'class Attention(nn.Module):\n    """Heads."""\n\n',
        ),
        Edit(MODEL, "class Tagger(", "class Gate(nn.Module):\n    size = 3\n\n\nclass Tagger("),
        Edit(DATA, "BATCH_SIZE = 16", "BATCH_SIZE = 16\nUNUSED = 99"),
        Edit(
            TRAIN,
            "    for epoch in range(",
            '    print("training on", device)\n    for epoch in range(',
        ),
        Edit(TRAIN, 'print(f"epoch {epoch}: loss', 'print(f"after epoch {epoch}: mean loss'),
        Edit(TRAIN, '"--seed", type=int, default=0', '"--seed", type=int, default=7'),
    ),
    "a renamed module": (
        Edit(MODEL, "self.attention", "self.mixer"),
        Edit(MODEL, "self.before_attention", "self.norm"),
    ),
    "a renamed class, function and variable": (
        Edit(MODEL, "Tagger", "Classifier"),
        Edit(TRAIN, "Tagger", "Classifier"),
        Edit(TRAIN, "train_epoch", "one_epoch"),
        Edit(EVALUATE, "accuracy", "share_right"),
        Edit(TRAIN, "accuracy", "share_right"),
        Edit(TRAIN, "optimizer", "opt"),
    ),
    "code moved to another file, and reordered methods": (
        Edit(TRAIN, MAKE_OPTIMIZER, ""),
        Edit(EVALUATE, "def accuracy", f"{MAKE_OPTIMIZER}\n\ndef accuracy"),
        Edit(TRAIN, "import accuracy", "import accuracy, make_optimizer"),
        Edit(MODEL, POSITIONS, ""),
        Edit(MODEL, LAST_LINE, f"{LAST_LINE}\n{POSITIONS.rstrip()}\n"),
    ),
}


def copied(folder: Path, edits: tuple[Edit, ...] = ()) -> Path:
    """The project in a folder of its own, edited."""
    project = folder / "project"
    shutil.copytree(SAMPLE, project, ignore=shutil.ignore_patterns("__pycache__"))
    for edit in edits:
        path = project / edit.file
        text = path.read_text(encoding="utf-8")
        assert edit.old in text, edit
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
    return project


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A function that edits the project and checks it as `gpuprobe check` does, in this process."""

    def check(edits: tuple[Edit, ...]) -> CheckResult:
        monkeypatch.chdir(copied(tmp_path, edits))
        settings = read_project()
        assert settings.baseline is not None
        before = read_baseline(settings.baseline)
        found = plan([], before=before, project=settings)
        result = compare_as_planned(before, measure_as_planned(found), found)
        assert result.mismatches == ()
        sums_to_the_change(result)
        return result

    return check


def sums_to_the_change(result: CheckResult) -> None:
    """Every table of the peak, and the lines of every regression of memory."""
    assert result.rows is not None
    for by, rows in result.rows.items():
        (peak,) = (metric for metric in result.metrics if metric.name == "peak_allocated")
        assert sum(row.delta for row in rows) == peak.delta, by
    for metric in result.regressions:
        assert metric.rows is not None, metric.name
        if metric.name not in ("growth_per_step", "implicit_syncs_per_step"):
            assert sum(row.delta for row in metric.rows) == metric.delta, metric.name


def first_cause(result: CheckResult) -> tuple[str, int]:
    """File and line that are blamed first."""
    place = result.regressions[0].place
    match = re.match(r"(.+):(\d+) in ", place)
    assert match is not None, result.cause
    assert f"at {place}" in result.cause
    return match[1], int(match[2])


@pytest.mark.simulated
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_regression_is_found_and_blamed_on_its_line(name: str, checked) -> None:  # type: ignore[no-untyped-def]
    planted = PLANTED[name]
    result = checked(planted.edits)
    assert not result.ok
    assert planted.metric in {metric.name for metric in result.regressions}
    file, line = first_cause(result)
    assert file == planted.file, result.cause
    source = Path(file).read_text(encoding="utf-8").splitlines()
    assert planted.blamed in source[line - 1], result.cause
    # And the reports point there.
    location = check_json.findings(result)[0].location
    assert location is not None
    assert (location.file, location.line) == (file, line)


@pytest.mark.simulated
@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change_passes(name: str, checked) -> None:  # type: ignore[no-untyped-def]
    result = checked(HARMLESS[name])
    assert result.regressions == ()
    assert result.cautions == ()
    assert result.ok
    # What only moved or has another name is not shown as gone and new.
    assert result.rows is not None
    for rows in result.rows.values():
        assert {row.status for row in rows} <= {"same", "moved"}


# -- by the command line


def gpuprobe(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python.shared().python, "-m", "gpuprobe", *arguments],
        cwd=project,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GITHUB_ACTIONS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="it was written with Python 3.11")
def test_the_committed_baseline_is_what_update_writes(tmp_path: Path) -> None:
    project = copied(tmp_path)
    (project / "memory.json").unlink()
    done = gpuprobe(project, "baseline", "update")
    assert done.returncode == 0, done.stderr
    text = (project / "memory.json").read_text(encoding="utf-8")
    assert text == (SAMPLE / "memory.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    assert dumps(read_baseline(SAMPLE / "memory.json")) == text
