"""Several runs in one project and in one baseline file."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from recipe_project import copied, made

from gpuprobe.analysis.baseline.model import Tolerance
from gpuprobe.analysis.baseline.text import loads_runs
from gpuprobe.cli import main
from gpuprobe.errors import ConfigError
from gpuprobe.gate.project import read_project
from gpuprobe.reporters.json.schemas import schema

pytestmark = pytest.mark.xdist_group("recipes")

SETTINGS = """\
[tool.gpuprobe]
gpu = "t4"
baseline = "memory.json"
tolerance.peak_allocated = "2%"

[tool.gpuprobe.runs.train]
run = "run.gpuprobe"

[tool.gpuprobe.runs.evaluate]
run = "other.gpuprobe"
steps = 3
tolerance.peak_reserved = "3%"
"""


@pytest.fixture
def project(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Two runs, of which each is the recording of a small model."""
    copied(made(tmp_path_factory), tmp_path)
    (tmp_path / "memory.json").unlink()
    (tmp_path / "pyproject.toml").write_text(SETTINGS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for run in ("run", "other"):
        (tmp_path / f"{run}.gpuprobe").symlink_to("small.gpuprobe")
    return tmp_path


def test_what_a_run_does_not_set_is_the_projects(project: Path) -> None:
    train, evaluate = read_project().runs.values()
    assert (train.run, train.steps, train.gpu) == (("run.gpuprobe",), None, "t4")
    assert (evaluate.steps, evaluate.gpu, evaluate.baseline) == (3, "t4", project / "memory.json")
    assert train.tolerances == {"peak_allocated": Tolerance(0.02)}
    assert evaluate.tolerances == {**train.tolerances, "peak_reserved": Tolerance(0.03)}


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ("[tool.gpuprobe.runs.a]\nsteps = 3", r"runs\.a\]: run is missing"),
        ("[tool.gpuprobe.runs.'a b']\nrun = 'x.py'", "'a b' is no name of a run"),
        ("[tool.gpuprobe.runs.a]\nrun = 'x.py'\nstep = 3", "unknown key 'step'"),
        ("[tool.gpuprobe]\nrun = 'x.py'\n[tool.gpuprobe.runs.a]\nrun = 'y.py'", "exclude each"),
        (
            "[tool.gpuprobe.runs.a]\nrun = 'x.py'\ntolerance.peak = 1",
            r"runs\.a\.tolerance\]: unknown key 'peak'",
        ),
    ],
)
def test_what_is_wrong_in_a_run_is_said(more: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(more, encoding="utf-8")
    with pytest.raises(ConfigError, match=error):
        read_project(tmp_path)


def test_all_runs_are_written_and_checked(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["baseline", "update"]) == 0
    assert "gpuprobe: evaluate: run: other.gpuprobe (pyproject.toml)" in capfd.readouterr().err
    assert list(loads_runs((project / "memory.json").read_text())) == ["evaluate", "train"]
    assert main(["check"]) == 0
    assert capfd.readouterr().out.startswith("memory is within the baseline in 2 runs\n")

    (project / "other.gpuprobe").unlink()
    (project / "other.gpuprobe").symlink_to("large.gpuprobe")
    reports = ["--junit", "j.xml", "--sarif", "s.json"]
    assert main(["check", "--json", *reports]) == 1
    document = json.loads(capfd.readouterr().out)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(schema("check-2")).validate(document)
    regressed = {metric["run"] for metric in document["metrics"] if metric["regressed"]}
    assert (document["ok"], regressed) == (False, {"evaluate"})
    assert document["cause"].startswith("evaluate: ")
    peaks = [m for m in document["metrics"] if m["name"] == "peak_allocated"]
    for peak in peaks:
        rows = [row for row in document["rows"]["line"] if row["run"] == peak["run"]]
        assert sum(row["delta"] for row in rows) == peak["delta"]
    cases = {case.attrib["name"]: case for case in ET.parse(project / "j.xml").iter("testcase")}
    assert cases["evaluate: peak_allocated"].find("failure") is not None
    assert cases["train: peak_allocated"].find("failure") is None
    assert len(json.loads((project / "s.json").read_text())["runs"][0]["results"]) > 1

    assert main(["check", "--run", "train"]) == 0
    assert capfd.readouterr().out.startswith("memory is within the baseline")
    assert main(["check", "--markdown", "--run", "evaluate", "--run", "train"]) == 1
    out = capfd.readouterr().out
    assert out.startswith("### ❌ gpuprobe: 1 of 2 runs above the baseline")
    assert out.index("evaluate: ") < out.index("train: memory is within the baseline")


def test_runs_of_a_file_without_settings(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "pyproject.toml").unlink()
    file = ["--baseline", "memory.json"]
    for name in ("small", "large"):
        accepted = ["--tolerance", "peak_allocated=5%"] if name == "small" else []
        update = ["baseline", "update", f"{name}.gpuprobe", *file, *accepted]
        assert main([*update, "--run", name]) == 0
    small, large = (
        loads_runs((project / "memory.json").read_text())[n] for n in ("small", "large")
    )
    assert small.metrics["peak_allocated"] < large.metrics["peak_allocated"]
    # What the others are is kept, and so are their tolerances.
    assert small.tolerances == {"peak_allocated": Tolerance(0.05)}
    assert main(["check", "large.gpuprobe", *file, "--run", "large"]) == 0
    capfd.readouterr()
    for wanted, told, hint in (
        ([], "has baselines of several runs: large, small", "--run NAME"),
        (["--run", "medium"], "has no baseline of the run 'medium'", "--run medium adds it"),
        (["--run", "a b"], "'a b' is no name of a run", "use letters"),
        (["--run", "small", "--run", "large"], "one script is one run", "name one with --run"),
    ):
        assert main(["check", "large.gpuprobe", *file, *wanted]) == 2
        err = capfd.readouterr().err
        assert told in err
        assert hint in err


def test_a_file_without_names_and_merge_conflicts_keep_tolerances(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = project / "memory.json"
    update = ["baseline", "update", "--tolerance"]
    path.write_bytes((project / "small.json").read_bytes())
    assert main([*update, "peak_reserved=4MiB", "--run", "train"]) == 0
    assert main([*update, "peak_allocated=7%", "--run", "evaluate"]) == 0
    ours = path.read_text(encoding="utf-8")
    theirs = ours.replace('"relative": 0.07', '"relative": 0.04')
    path.write_text(f"<<<<<<< HEAD\n{ours}=======\n{theirs}>>>>>>> branch\n", encoding="utf-8")
    capfd.readouterr()
    assert main(["check"]) == 4
    assert "merge conflicts" in capfd.readouterr().err
    # One of them alone would be the end of the other.
    assert main(["baseline", "update", "--run", "train"]) == 2
    assert "baselines of other runs: evaluate" in capfd.readouterr().err
    assert main(["baseline", "update"]) == 0
    found = loads_runs(path.read_text(encoding="utf-8"))
    assert found["train"].tolerances == {"peak_reserved": Tolerance(0, 4 << 20)}
    assert found["evaluate"].tolerances == {"peak_allocated": Tolerance(0.04)}
