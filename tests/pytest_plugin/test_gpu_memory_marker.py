"""The pytest plugin, in real pytest processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

MARKED = """\
import pytest
import torch

kept = []


@pytest.fixture
def model():
    return torch.nn.Linear(256, 256).cuda()


def step(model, batch=64):
    loss = model(torch.randn(batch, 256, device="cuda")).square().mean()
    loss.backward()
    return loss


@pytest.mark.gpu_memory(max_peak="1 GiB", leaks=False)
def test_within(model, gpu_memory):
    step(model)
    model.zero_grad()
    assert gpu_memory.allocated > 0
    assert torch.cuda.is_available()


@pytest.mark.gpu_memory(max_peak="10 MiB")
def test_above(model):
    torch.zeros(20 << 20, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu_memory(leaks=False)
def test_leaks():
    kept.append(torch.zeros(1 << 20, dtype=torch.uint8, device="cuda"))


@pytest.mark.gpu_memory(max_syncs=0)
def test_waits(model):
    step(model).item()


@pytest.mark.gpu_memory(no_hazards=True)
def test_races():
    x = torch.ones(100, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x.sum()


@pytest.mark.gpu_memory(no_hazards=True, max_syncs=0)
def test_clean(model):
    step(model)


@pytest.mark.gpu_memory(regression="1%")
def test_against_the_baseline(model):
    step(model, BATCH)


def test_not_marked():
    assert not torch.cuda.is_available()
"""


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "test_memory.py").write_text(MARKED.replace("BATCH", "64"), encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    return tmp_path


def test_limits(project: Path) -> None:
    done = run_pytest(project, "--gpuprobe-update-baseline")
    assert "4 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    assert "peak allocated 20.3 MiB is +10.3 MiB above max_peak=10.0 MiB" in done.stdout
    assert "1.0 MiB are still allocated after the test (leaks=False)" in done.stdout
    assert "1 implicit synchronisations, at most 0 allowed: item at" in done.stdout
    assert "GP201 read-after-write at" in done.stdout
    assert "GPU memory" in done.stdout
    assert "peak" in done.stdout.partition("GPU memory")[2]


def test_a_regression_fails_and_names_its_line(project: Path) -> None:
    missing = run_pytest(project, "-k", "baseline")
    assert "no baseline yet: run pytest --gpuprobe-update-baseline" in missing.stdout
    written = run_pytest(project, "-k", "baseline", "--gpuprobe-update-baseline")
    assert "1 passed" in written.stdout
    (file,) = (project / "gpuprobe-baselines").iterdir()
    text = file.read_text(encoding="utf-8")
    assert str(project) not in text
    assert "1 passed" in run_pytest(project, "-k", "baseline").stdout
    assert file.read_text(encoding="utf-8") == text
    source = project / "test_memory.py"
    source.write_text(MARKED.replace("BATCH", "6400"), encoding="utf-8")
    grown = run_pytest(project, "-k", "baseline")
    assert "1 failed" in grown.stdout
    assert "above the baseline (1% accepted)" in grown.stdout
    assert re.search(r"test_memory\.py:1[34] in step", grown.stdout), grown.stdout


def test_workers_of_xdist(project: Path) -> None:
    done = run_pytest(project, "--gpuprobe-update-baseline", "-n", "2")
    assert "4 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.partition("GPU memory")[2].count("peak ") >= 3


def test_an_unknown_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\n@pytest.mark.gpu_memory(max_peek=1)\ndef test_it(): pass\n"
    )
    done = run_pytest(tmp_path)
    assert "unknown limit max_peek" in done.stdout + done.stderr
    assert done.returncode != 0


def test_unused_it_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import sys\n"
        "def test_it():\n"
        "    ours = {name for name in sys.modules if name.startswith('gpuprobe')}\n"
        "    assert ours <= {'gpuprobe', 'gpuprobe._version', 'gpuprobe.pytest_plugin'}, ours\n"
        "    assert 'torch' not in sys.modules\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
