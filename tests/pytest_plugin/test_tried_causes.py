"""The cause of a test's regression, in real pytest processes: the test is run with parts of the
change reverted."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from test_gpu_memory_marker import Done, run_pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gpu_memory")]

MODEL = """\
import torch
from torch import nn


def make(width):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).cuda()


@torch.no_grad()
def evaluate(model, x):
    for _ in range(4):
        x = model(x).relu()
    return x.sum()


def count(x):
    return len(x)
"""
TESTS = """\
import pytest

from net.model import count, evaluate, make


@pytest.fixture
def model():
    return make(256)


@pytest.fixture
def x(model):
    return next(model.parameters()).new_ones(1024, 256)


@pytest.mark.gpu_memory(regression="1%")
def test_evaluate(model, x):
    assert count(x) == 1024
    assert evaluate(model, x).isfinite()
"""
CHANGE = (
    ("@torch.no_grad()\n", ""),
    # Without this line, the test fails: it must not be taken for less memory.
    (
        "    return len(x)\n",
        '    assert "no" + "_grad" not in open(__file__).read()\n    return len(x)\n',
    ),
)
CAUSE = "reverting net/model.py:9 in evaluate (removed `@torch.no_grad()`)"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the baseline of its test, committed, and then changed."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("net", "tests"):
        (folder / name).mkdir()
    (folder / "net" / "__init__.py").write_text("")
    (folder / "net" / "model.py").write_text(MODEL)
    (folder / "tests" / "test_net.py").write_text(TESTS)
    (folder / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = "--strict-markers"\n'
        'asyncio_default_fixture_loop_scope = "function"\n'
    )
    done = run_pytest(folder, "--gpuprobe-update-baseline")
    assert done.code == 0, done.text
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "baselines"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    text = MODEL.replace(*CHANGE[0])
    (folder / "net" / "model.py").write_text(text)
    return folder


def why(project: Path, *options: str) -> str:
    done: Done = run_pytest(project, *options)
    assert done.code == 1, done.text
    return done.why("test_evaluate")


@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_the_first_cause_was_measured(project: Path, options: tuple[str, ...]) -> None:
    text = why(project, *options)
    assert f"first cause: {CAUSE} saves " in text
    assert "1 run of the test with parts of its 1 change reverted" in text
    assert "not tried" not in text


def test_switched_off_the_same_line_is_named_by_rules(project: Path) -> None:
    text = why(project, "--gpuprobe-blame", "0")
    assert "net/model.py:9 in evaluate" in text.partition("first cause: ")[2].splitlines()[0]
    assert "changes were not tried: switched off" in text
    assert "saves" not in text


def test_a_test_that_fails_does_not_need_less(project: Path) -> None:
    """With the decorator reverted, this test fails before it has taken any memory."""
    path = project / "net" / "model.py"
    before = path.read_text()
    path.write_text(before.replace(*CHANGE[1]))
    try:
        text = why(project)
    finally:
        path.write_text(before)
    assert "1 of them failed" in text or "2 of them failed" in text
    cause = text.partition("first cause: ")[2].splitlines()[0]
    assert "net/model.py:9 in evaluate" in cause


def test_without_a_repository_the_line_is_named_by_rules_and_nothing_is_tried(
    project: Path,
) -> None:
    (project / ".git").rename(project / "git")
    try:
        text = why(project)
    finally:
        (project / "git").rename(project / ".git")
    assert "net/model.py:9 in evaluate" in text.partition("first cause: ")[2].splitlines()[0]
    assert "changes were not tried: the baselines of tests have no sources" in text
    assert "in no commit of git" in text
    assert "baseline update" not in text


@pytest.mark.parametrize("value", ["soon", "-3", "nan"])
def test_a_wrong_time_is_an_error_of_one_line(tmp_path: Path, value: str) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    done = run_pytest(tmp_path, f"--gpuprobe-blame={value}")
    assert done.code == pytest.ExitCode.USAGE_ERROR
    expected = f"--gpuprobe-blame: expected a number of seconds from 0, found {value!r}"
    assert expected in done.text
    assert "Traceback" not in done.text
