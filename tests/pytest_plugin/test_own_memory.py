"""What a test takes itself: the same alone and in any order, shown, kept, saved and compared."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import warm_python

from gpuprobe.pytest_plugin.summary import dumps, lines

pytestmark = pytest.mark.xdist_group("own_memory")  # so that one process shares the fixtures

TESTS = """\
import pytest
import torch

SIZE = 1
kept = []


@pytest.fixture(scope="module")
def shared():
    return torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")


@pytest.fixture
def model():
    return torch.nn.Linear(256, 256).cuda()


def take(size):
    return torch.zeros(size, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu_memory(group="leaving")
def test_leaves_something():
    kept.append(take(4 << 20))


@pytest.mark.gpu_memory(max_peak="3 MiB", group="sharing")
def test_first(shared):
    take(2 << 20)


@pytest.mark.gpu_memory(max_peak="3 MiB", group="sharing")
def test_second(shared):
    take(SIZE << 20)


@pytest.mark.gpu_memory(leaks=False)
def test_gradients_of_a_fixture(model):
    model(torch.ones(8, 256, device="cuda")).sum().backward()


@pytest.fixture(scope="module")
def product():
    x = torch.ones(256, 256, device="cuda")
    return x @ x


@pytest.mark.gpu_memory
def test_multiplies(product):
    product @ product


@pytest.mark.gpu_memory
def test_multiplies_too(product):
    product @ product


@pytest.mark.gpu_memory
def test_fails():
    x = take(6 << 20)
    assert x is None
"""


def run(folder: Path, *options: str) -> str:
    done = subprocess.run(
        [
            warm_python.shared().python,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-q",
            "--rootdir",
            ".",
            *options,
        ],
        cwd=folder,
        env={**os.environ, **warm_python.NESTED, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr


def figures(path: Path) -> dict[str, dict[str, int]]:
    tests = json.loads(path.read_text(encoding="utf-8"))["tests"]
    return {nodeid.partition("::")[2]: row for nodeid, row in tests.items()}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "test_own.py").write_text(TESTS, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def whole(project: Path) -> str:
    return run(project, "--gpuprobe-save", "all.json", "--gpuprobe-keep", "kept")


def test_a_test_has_the_same_figures_in_any_company(project: Path, whole: str) -> None:
    """Allocated, reserved and left over: after other tests, before them, and on two workers."""
    together = figures(project / "all.json")
    peaks = {name: row["peak_allocated"] for name, row in together.items()}
    assert peaks["test_first"] == 2 << 20
    assert peaks["test_second"] == 1 << 20
    # A product of matrices has a workspace, which is its test's, whichever had the fixture first.
    assert peaks["test_multiplies"] == peaks["test_multiplies_too"] > 8 << 20
    names = [f"test_own.py::{name}" for name in reversed(list(together))]
    run(project, "--gpuprobe-save", "other.json", "-n2", *names)
    assert figures(project / "other.json") == together


def test_outcomes_and_groups(whole: str) -> None:
    assert "6 passed" in whole
    assert "1 failed" in whole
    section = whole[whole.rindex("= GPU memory =") :]
    assert section.index("\nleaving:\n") < section.index("\nsharing:\n")


def test_every_failure_has_its_top_allocators(whole: str) -> None:
    report = whole[whole.index("gpuprobe: largest allocations at the peak") :]
    # What another test has left on the device is of the same line, and not this test's.
    assert "   6.0 MiB  test_own.py:19 in take" in report


def test_recordings_are_kept(project: Path, whole: str) -> None:
    import gpuprobe

    kept = sorted(path.name for path in (project / "kept").iterdir())
    assert len(kept) == 7
    assert gpuprobe.load(project / "kept" / "test_own.py-test_first.gpuprobe").ranks


def test_the_highest_only_and_compared(project: Path, whole: str) -> None:
    text = (project / "test_own.py").read_text(encoding="utf-8")
    (project / "test_own.py").write_text(text.replace("SIZE = 1", "SIZE = 2"), encoding="utf-8")
    told = run(
        project, "--gpuprobe-most", "1", "--gpuprobe-compare", "all.json", "-k", "test_second"
    )
    section = told[told.rindex("= GPU memory =") :]
    assert "+1.0 MiB  peak    2.0 MiB" in section
    options = ["--gpuprobe-compare", "nothing.json", "--gpuprobe-save", "alone.json"]
    told = run(project, *options, "-k", "test_multiplies_too")
    assert "nothing.json cannot be compared with" in told
    assert (
        figures(project / "alone.json")["test_multiplies_too"]
        == (figures(project / "all.json")["test_multiplies_too"])
    )


WITHOUT_TORCH = """\
import sys

import pytest

sys.modules["torch"] = None  # as where it is not installed


@pytest.mark.gpu_memory(max_peak="1 MiB", leaks=False)
def test_marked():
    pass


def test_fixture(gpu_memory):
    pass


def test_other():
    pass
"""


def test_where_torch_is_missing_the_test_says_so(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(WITHOUT_TORCH, encoding="utf-8")
    told = run(tmp_path, "-rA")
    assert "1 passed, 2 errors" in told
    assert "KeyError" not in told
    assert "INTERNALERROR" not in told
    assert told.count("pip install") >= 2


ROW = {"peak_allocated": 5, "peak_reserved": 9, "left": 0, "group": ""}


def test_lines_of_a_summary() -> None:
    found = [("b", ROW), ("a", {**ROW, "peak_allocated": 7})]
    assert [line.split()[-1] for line in lines(found)] == ["a", "b"]
    assert [line.split()[-1] for line in lines(found, 1)] == ["a"]
    first, second = lines(found, None, {"a": ROW})
    assert first.split()[0] == "+2"
    assert second.split()[0] == "new"
    assert json.loads(dumps(found))["tests"]["b"] == ROW


ROWS = {
    "measures": "test_what_holds_passes",
    "without a GPU": "test_what_holds_passes",
    "limit of a test": "test_what_does_not_hold_is_told",
    "leaks of a test": "test_what_does_not_hold_is_told",
    "top allocators with their lines": "test_every_failure_has_its_top_allocators",
    "against an earlier run": "test_a_regression_is_told_with_its_line",
    "the N highest only": "test_the_highest_only_and_compared",
    "recordings kept": "test_recordings_are_kept",
    "results saved": "test_a_test_has_the_same_figures_in_any_company",
    "groups": "test_outcomes_and_groups",
    "the same alone, in any order and on workers": (
        "test_a_test_has_the_same_figures_in_any_company"
    ),
    "races and synchronisations": "test_what_does_not_hold_is_told",
}
"""Of each row of the comparison with other plugins: the test of what gpuprobe does."""


def test_every_row_of_the_comparison_is_tested() -> None:
    """And names options and limits that the plugin has."""
    from gpuprobe.pytest_plugin import _MARKER
    from gpuprobe.pytest_plugin import __file__ as plugin

    page = Path(__file__).parents[2] / "docs/how-to/limit-memory-in-tests.md"
    table = page.read_text(encoding="utf-8").partition("## Comparison with other plugins")[2]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")][2:]
    assert [cells[1].strip() for cells in rows] == list(ROWS)
    here = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py"))
    assert [test for test in ROWS.values() if f"def {test}(" not in here] == []
    ours = re.findall(r"`([\w-]+)", "".join(cells[2] for cells in rows))
    assert len(ours) >= 9
    known = _MARKER + Path(plugin).read_text(encoding="utf-8")
    assert [word for word in ours if word not in known] == []
