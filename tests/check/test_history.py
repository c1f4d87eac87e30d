"""What a repository adds to a baseline: the text of the source that it was made of."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprobe.analysis.baseline.check import check_baseline
from gpuprobe.analysis.baseline.model import Baseline, CheckResult
from gpuprobe.analysis.baseline.text import dumps, loads
from gpuprobe.analysis.blame.source import source_of
from gpuprobe.analysis.compare.accounts import Account, LineShare
from gpuprobe.analysis.peak.peaks import Share
from gpuprobe.api.check import compare
from gpuprobe.gate.files import read_baseline
from gpuprobe.gate.history import history

SOURCE = "import torch\nrate = 1\noptimizer = torch.optim.SGD([], lr=rate)\n"
CHANGED = SOURCE.replace("lr=rate", "lr=rate, momentum=0.9")
MIB = 1 << 20


def baseline(text: str | None, size: int = 8 * MIB) -> Baseline:
    line = LineShare("train.py:3 in <module>", size, 1, (("optimizer_state", size),))
    peak = Account(size, (line,), (Share("optimizer_state", size, 1),), (Share("Net", size, 1),))
    return Baseline(
        environment={"device": "simulated t4", "torch": "2.13", "allocator": ""},
        steps=4,
        metrics={"peak_allocated": size},
        phases={},
        accounts={"peak": peak},
        sources={} if text is None else {"train.py": source_of(text)},
    )


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project in a folder of a repository, with a baseline that was committed."""
    folder = tmp_path / "repository" / "pack age"
    (folder / "conf").mkdir(parents=True)
    (folder / "train.py").write_text(SOURCE, encoding="utf-8")
    (folder / "conf" / "model.yaml").write_text("depth: 2\n", encoding="utf-8")
    (folder / "README.md").write_text("About.\n", encoding="utf-8")
    (folder / "memory.json").write_text(dumps(baseline(SOURCE)), encoding="utf-8")
    git(folder.parent, "init", "-q")
    git(folder.parent, "add", ".")
    git(folder.parent, "commit", "-q", "-m", "baseline")
    return folder


def text_of(folder: Path, before: Baseline) -> str | None:
    found = history(before, folder / "memory.json", str(folder))
    source = None if found is None else found.baseline.sources.get("train.py")
    return None if source is None else source.text


def test_what_was_there_is_quoted(project: Path) -> None:
    (project / "train.py").write_text(CHANGED, encoding="utf-8")
    (project / "conf" / "model.yaml").write_text("depth: 3\n", encoding="utf-8")
    (project / "README.md").write_text("More.\n", encoding="utf-8")
    path = project / "memory.json"
    now = baseline(CHANGED, 9 * MIB)
    alone = compare(read_baseline(path), now)
    assert alone.cause.startswith("+1.0 MiB at train.py:3 in <module>: this line was changed;")
    assert alone.cautions == ()
    found = compare(read_baseline(path), now, path=path, root=str(project))
    told = "this line was changed, from 'optimizer = torch.optim.SGD([], lr=rate)'"
    assert told in found.cause
    assert found.cautions == (
        "not Python, and changed since the baseline was committed: conf/model.yaml",
    )
    # Within the baseline nobody is asked.
    assert compare(read_baseline(path), baseline(CHANGED), path=path).cautions == ()


def test_the_commit_has_to_be_what_was_measured(project: Path) -> None:
    path = project / "memory.json"
    assert text_of(project, read_baseline(path)) == SOURCE
    measured = loads(dumps(baseline(SOURCE.replace("rate = 1", "rate = 2"))))
    assert text_of(project, measured) is None


def test_a_shallow_clone_does_not_know_the_baselines_commit(project: Path, tmp_path: Path) -> None:
    (project / "train.py").write_text(CHANGED, encoding="utf-8")
    git(project, "commit", "-q", "-a", "-m", "momentum")
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{project.parent}", "clone")
    clone = tmp_path / "clone" / project.name
    stored = read_baseline(clone / "memory.json")
    # The digests tell that the source is another one.
    assert text_of(clone, stored) is None
    result = compare(stored, baseline(CHANGED, 9 * MIB), path=clone / "memory.json")
    assert "train.py:3 in <module>: this line was changed;" in result.cause


def test_without_a_repository_nothing_is_added(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project / "memory.json"
    before = read_baseline(path)
    outside = tmp_path / "memory.json"
    outside.write_bytes(path.read_bytes())
    assert history(before, outside, str(project)) is None
    assert history(before, outside, str(tmp_path)) is None
    monkeypatch.setenv("PATH", "")
    assert history(before, path, str(project)) is None


def test_a_hook_of_another_repository_does_not_mislead(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git names its own repository to what its hooks start."""
    monkeypatch.setenv("GIT_DIR", ".git")
    monkeypatch.setenv("GIT_INDEX_FILE", "nowhere")
    assert text_of(project, read_baseline(project / "memory.json")) == SOURCE


LIBRARY = "site-packages/nets/layer.py"


def of_library(text: str | None, train: str, size: int = 8 * MIB) -> Baseline:
    """A program whose memory is taken by a line of an installed package, with the source of that
    package where it is known."""
    line = LineShare(
        f"{LIBRARY}:3 in forward",
        size,
        1,
        (("activation", size),),
        call_paths=(((f"{LIBRARY}:3 in forward", "train.py:3 in <module>"), size),),
    )
    peak = Account(size, (line,), (Share("activation", size, 1),), (Share("Net", size, 1),))
    found = baseline(train, size)
    sources = {**found.sources, **({} if text is None else {LIBRARY: source_of(text)})}
    return replace(found, accounts={"peak": peak}, sources=sources)


LAYER = "def forward(x):\n    y = x.half()\n    return y * 2\n"


def test_installed_files_without_a_source_of_before_are_not_called_changed() -> None:
    """The package took memory at no peak before, so the baseline does not have its file."""
    changed = CHANGED.replace("rate = 1", "rate = 2")
    result = check(of_library(None, SOURCE), of_library(LAYER, changed, 9 * MIB))
    (metric,) = result.regressions
    assert metric.causes
    assert all("changed" not in cause.text for cause in metric.causes if LIBRARY in cause.place)
    assert any(cause.place.startswith("train.py:3") for cause in metric.causes)
    # The same without any other change.
    result = check(of_library(None, SOURCE), of_library(LAYER, SOURCE, 9 * MIB))
    assert "changed" not in " ".join(cause.text for cause in result.regressions[0].causes)


def test_installed_files_that_changed_are_named() -> None:
    old = LAYER.replace("x.half()", "x")
    result = check(of_library(old, SOURCE), of_library(LAYER, SOURCE, 9 * MIB))
    assert result.cause.startswith("+1.0 MiB at site-packages/nets/layer.py:2 in forward")
    assert "this line was changed" in result.cause


def check(before: Baseline, after: Baseline) -> CheckResult:
    """Against a baseline as it is read back: with digests alone."""
    return check_baseline(loads(dumps(before)), after)
