"""``[tool.gpuprobe]`` in a project's pyproject.toml: what it may say, and who goes before it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.analysis.baseline.check import check_baseline
from gpuprobe.analysis.baseline.model import METRICS, Baseline, Tolerance
from gpuprobe.analysis.baseline.text import dumps, loads
from gpuprobe.errors import ConfigError, UsageError
from gpuprobe.gate.plan import baseline_path, plan, tolerances
from gpuprobe.gate.project import ProjectSettings, read_project, tolerance_of

ALL = """\
[project]
name = "shop"

[tool.gpuprobe]
gpu = "a100-40gb"
run = "-m shop.train --fast 'two words'"
steps = 6
baseline = "ci/memory.json"
hazards = true

[tool.gpuprobe.tolerance]
peak_allocated = "2%"
peak_reserved = "2%, 64 MiB"
implicit_syncs_per_step = 1
steady_allocated = { relative = 0.05, absolute = "1 KiB" }
"""


def project(folder: Path, text: str) -> ProjectSettings:
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return read_project(folder)


def test_everything_is_read(tmp_path: Path) -> None:
    found = project(tmp_path, ALL)
    assert found.path == tmp_path / "pyproject.toml"
    assert found.gpu == "a100-40gb"
    assert found.run == ("-m", "shop.train", "--fast", "two words")
    assert found.steps == 6
    assert found.baseline == tmp_path / "ci" / "memory.json"
    assert found.hazards is True
    assert found.tolerances == {
        "peak_allocated": Tolerance(0.02),
        "peak_reserved": Tolerance(0.02, 64 << 20),
        "implicit_syncs_per_step": Tolerance(0, 1),
        "steady_allocated": Tolerance(0.05, 1024),
    }


def test_the_nearest_file_counts_and_other_projects_say_nothing(tmp_path: Path) -> None:
    assert project(tmp_path, ALL).steps == 6
    below = tmp_path / "src" / "shop"
    below.mkdir(parents=True)
    assert read_project(below).root == str(tmp_path)
    (tmp_path / "src" / "pyproject.toml").write_text("[tool.other]\nname = 'gpuprobe'\n")
    assert read_project(below) == ProjectSettings()
    assert project(tmp_path, "") == ProjectSettings()


@pytest.mark.parametrize(
    ("text", "error", "hint"),
    [
        ("[tool.gpuprobe]\ngpus = 't4'", "unknown key 'gpus'", "did you mean 'gpu'?"),
        ("[tool.gpuprobe]\nzebra = 1", "unknown key 'zebra'", "known: baseline, compute, gpu"),
        (
            "[tool.gpuprobe.tolerance]\npeak_alocated = 1",
            "tolerance]: unknown key 'peak_alocated'",
            "did you mean 'peak_allocated'?",
        ),
        ("[tool.gpuprobe]\nsteps = 0", "steps: expected a whole number from 1, found 0", ""),
        ("[tool.gpuprobe]\nsteps = true", "steps: expected a whole number from 1, found True", ""),
        ("[tool.gpuprobe]\ngpu = 4", "gpu: expected text, found 4", ""),
        ("[tool.gpuprobe]\nhazards = 'yes'", "hazards: expected true or false, found 'yes'", ""),
        ("[tool.gpuprobe]\nrun = '-m'", "run: it contains nothing to run", "-m package.train"),
        ("[tool.gpuprobe]\nrun = 'train.py \"'", "No closing quotation", ""),
        ("[tool.gpuprobe]\nrun = [1]", "run[0]: expected text, found 1", ""),
        ("[tool.gpuprobe]\ntolerance = 1", "tolerance: expected an object, found 1", ""),
        ("[tool.gpuprobe.tolerance]\nraces = 'few'", "such as 2% or 64MiB for races", ""),
        ("[tool.gpuprobe.tolerance]\nraces = -1", "such as 2% or 64MiB for races", ""),
        ("[tool.gpuprobe.tolerance]\nraces = {relative = -1}", "for races", ""),
        ("[tool.gpuprobe.tolerance]\nraces = {absolut = 1}", "for races", ""),
        ("[tool]\ngpuprobe = 3", "[tool.gpuprobe]: expected an object, found 3", ""),
        ("[tool.gpuprobe", "not valid TOML", ""),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, text: str, error: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        project(tmp_path, text)
    assert error in str(caught.value)
    assert "pyproject.toml" in str(caught.value)
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)


@given(
    share=st.integers(0, 400),
    amount=st.integers(0, 1 << 40),
    unit=st.sampled_from(["", "B", "KiB"]),
)
def test_a_tolerance_means_the_same_wherever_it_is_written(
    share: int, amount: int, unit: str
) -> None:
    text = f"{share}%, {amount} {unit}"
    size = amount * (1024 if unit == "KiB" else 1)
    wanted = Tolerance(share / 100, size)
    assert tolerances([f"races={text}"]) == {"races": wanted}
    assert tolerance_of("races", text) == wanted
    assert tolerance_of("races", {"relative": f"{share}%", "absolute": f"{amount}{unit}"}) == wanted


def test_a_misspelt_metric_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match="unknown metric 'peak_alloc'") as caught:
        tolerances(["peak_alloc=1%"])
    assert caught.value.hint == "did you mean 'peak_allocated'?"
    with pytest.raises(ConfigError, match="expected an amount"):
        tolerances(["races"])


# -- who goes before whom


def known(**more: object) -> Baseline:
    values: dict[str, object] = {
        "environment": {"device": "simulated h100-80gb"},
        "steps": 4,
        "metrics": {"peak_allocated": 1000, "peak_reserved": 2 << 20, "races": 0},
        "phases": {},
        "stopped_after": 4,
        "tolerances": {"peak_allocated": Tolerance(0.03)},
    }
    return Baseline(**{**values, **more})  # type: ignore[arg-type]


def said(found: object) -> dict[str, tuple[str, str]]:
    return {item.name: (item.value, item.source) for item in found.settings}  # type: ignore[attr-defined]


def test_the_nearest_to_the_user_goes_first(tmp_path: Path) -> None:
    file = project(tmp_path, ALL)
    defaults = plan(["train.py"])
    assert said(defaults) == {
        "run": ("train.py", "command line"),
        "gpu": ("this machine's", "default"),
        "steps": ("all", "default"),
        "hazards": ("not counted", "default"),
    }
    by_file = plan([], project=file)
    assert said(by_file) == {
        "run": ("-m shop.train --fast two words", "pyproject.toml"),
        "gpu": ("simulated a100-40gb", "pyproject.toml"),
        "steps": ("6", "pyproject.toml"),
        "hazards": ("counted", "pyproject.toml"),
    }
    assert (by_file.target, by_file.module) == ("shop.train", True)
    assert by_file.arguments == ("--fast", "two words")
    by_baseline = plan([], project=file, before=known())
    assert said(by_baseline)["gpu"] == ("simulated h100-80gb", "baseline")
    assert said(by_baseline)["steps"] == ("4", "baseline")
    assert said(by_baseline)["hazards"] == ("counted", "baseline")
    by_call = plan(["x.py"], gpu="t4", steps=2, hazards=False, project=file, before=known())
    assert said(by_call) == {
        "run": ("x.py", "command line"),
        "gpu": ("simulated t4", "command line"),
        "steps": ("2", "command line"),
        "hazards": ("not counted", "command line"),
    }
    anew = plan([], project=file, before=known(), writing=True)
    assert said(anew)["gpu"] == ("simulated a100-40gb", "pyproject.toml")
    old = plan(["x.py"], before=known(), writing=True)
    assert said(old)["gpu"] == ("simulated h100-80gb", "baseline")


def test_tolerances_have_the_same_order(tmp_path: Path) -> None:
    file = project(tmp_path, ALL)
    found = plan(
        ["x.py"], project=file, before=known(), accepted={"races": Tolerance(absolute=2)}
    ).tolerances
    assert found["peak_allocated"] == (Tolerance(0.03), "baseline")
    assert found["peak_reserved"] == (Tolerance(0.02, 64 << 20), "pyproject.toml")
    assert found["races"] == (Tolerance(absolute=2), "command line")
    result = check_baseline(
        known(),
        known(),
        {name: tolerance for name, (tolerance, _) in found.items()},
        {name: source for name, (_, source) in found.items()},
    )
    told = {
        metric.name: (metric.accepted, metric.source, metric.limit) for metric in result.metrics
    }
    assert told == {
        "peak_allocated": ("3%", "baseline", 1030),
        "peak_reserved": ("2% or 64.0 MiB", "pyproject.toml", (2 << 20) + (64 << 20)),
        "races": ("2", "command line", 2),
    }


def test_a_baseline_keeps_what_was_chosen_and_no_defaults() -> None:
    again = loads(dumps(known()))
    assert again.tolerances == {"peak_allocated": Tolerance(0.03)}
    assert again.stopped_after == 4
    assert loads(dumps(known(tolerances=None, stopped_after=None))).tolerances == {}
    assert set(METRICS) >= set(again.metrics)


def test_nothing_to_do_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no baseline given") as caught:
        baseline_path(None, ProjectSettings())
    assert "--baseline FILE" in caught.value.hint
    assert baseline_path(Path("x.json"), project(tmp_path, ALL)) == Path("x.json")
    assert baseline_path(None, read_project(tmp_path)) == tmp_path / "ci" / "memory.json"
    with pytest.raises(UsageError, match="nothing to check"):
        plan([])
    with pytest.raises(UsageError, match="-m needs"):
        plan([], module=True)


def test_what_a_project_runs_is_run_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").mkdir()
    file = project(tmp_path, '[tool.gpuprobe]\nrun = "python train.py --lr 1"\n')
    monkeypatch.chdir(tmp_path / "docs")
    found = plan([], project=file)
    assert (found.target, found.arguments) == ("train.py", ("--lr", "1"))
    assert found.folder == str(tmp_path)
    assert plan(["../train.py"], project=file).folder == ""


def test_commands_that_repeat_a_comparison_name_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.gpuprobe").mkdir()
    found = plan(["run.gpuprobe"], before=known(command=()))
    assert found.commands("memory.json") == (
        "gpuprobe baseline update --baseline memory.json run.gpuprobe",
        "gpuprobe check --baseline memory.json --blame-budget 0 run.gpuprobe",
    )
