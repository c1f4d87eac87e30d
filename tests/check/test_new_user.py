"""What somebody meets who uses the gate for the first time: each mistake is said in one line, with
what to do about it, and before anything has run for nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import warm_python

from gpuprobe.cli import main

SCRIPT = """\
import pathlib
import torch

pathlib.Path("it-ran").touch()
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def gpuprobe(*argv: str) -> int:
    """The exit code of a command that runs a program: in a separate process, as a program has a
    simulated GPU and torch for itself. What it prints is printed here.
    """
    done = warm_python.gpuprobe(*argv)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


UPDATE = ["baseline", "update", "train.py", "--gpu", "t4"]
TO_FILE = ["--baseline", "memory.json"]


@pytest.mark.parametrize(
    ("command", "error", "hint"),
    [
        (["check"], "no baseline given", "--baseline FILE"),
        (["check", "train.py", *TO_FILE], "no baseline at memory.json", "baseline update"),
        (["baseline"], "missing subcommand: update", "gpuprobe baseline update"),
        (["baseline", "updte"], "invalid choice: 'updte'", "gpuprobe baseline --help"),
        (["baseline", "update", *TO_FILE], "nothing to check", "give a recording or script"),
        ([*UPDATE, "--baseline", "no/x.json"], "cannot write no/x.json", "does not exist"),
        ([*UPDATE[:3], *TO_FILE, "--gpu", "h1000"], "unknown GPU 'h1000'", "did you mean"),
        ([*UPDATE, *TO_FILE, "--tolerance", "peak_alocated=1%"], "unknown metric", "'peak_alloc"),
        ([*UPDATE, *TO_FILE, "--tolerance", "races=few"], "expected an amount", ""),
        (["baseline", "update", "nothing.py", *TO_FILE], "nothing.py", ""),
        ([*UPDATE, *TO_FILE, "--stop-after", "0"], "a whole number from 1", "--help"),
    ],
)
def test_a_mistake_is_said_before_anything_runs(
    command: list[str], error: str, hint: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(command)
    except SystemExit as exit_:  # argparse's own
        code = int(exit_.code or 0)
    out, err = capfd.readouterr()
    assert code == 2
    assert out == ""
    first, *rest = err.splitlines()
    assert first.startswith("gpuprobe: error: ")
    assert error in first
    assert hint in "".join(rest)
    assert len(rest) <= 1
    assert sorted(path.name for path in here.iterdir()) == ["train.py"]


def test_a_misspelt_setting_is_said_before_anything_runs(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "pyproject.toml").write_text("[tool.gpuprobe]\nbasline = 'memory.json'\n")
    assert main(["check", "train.py", *TO_FILE]) == 2
    err = capfd.readouterr().err
    assert "pyproject.toml: [tool.gpuprobe]: unknown key 'basline'" in err
    assert "did you mean 'baseline'?" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "locked").mkdir(mode=0o555)
    assert main([*UPDATE, "--baseline", "locked/memory.json"]) == 2
    assert "cannot write locked/memory.json: Permission denied" in capfd.readouterr().err
    assert not (here / "it-ran").exists()


def test_the_way_that_the_messages_lead(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Settings, a baseline, a check, and a report that cannot be written."""
    (here / "pyproject.toml").write_text(
        '[tool.gpuprobe]\nrun = "train.py"\ngpu = "t4"\nbaseline = "memory.json"\nsteps = 3\n'
    )
    assert gpuprobe("baseline", "update", "--tolerance", "peak_allocated=3%") == 0
    err = capfd.readouterr().err
    assert "gpuprobe: gpu: simulated t4 (pyproject.toml)" in err
    assert "gpuprobe: baseline written: memory.json" in err
    content = (here / "memory.json").read_bytes()
    assert gpuprobe("check", "-v") == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "run train.py (pyproject.toml)" in out
    assert "steps 3 (baseline)" in out
    assert "peak_allocated 3% (baseline); others: defaults" in out
    # From another folder of the project it is the same.
    (here / "docs").mkdir()
    os.chdir(here / "docs")
    assert gpuprobe("check", "-v") == 0
    assert Path.cwd() == here / "docs"
    os.chdir(here)
    assert "run train.py (pyproject.toml)" in capfd.readouterr().out
    # An update keeps the tolerances, and is the same where nothing changed.
    assert gpuprobe("baseline", "update") == 0
    assert (here / "memory.json").read_bytes() == content
    (here / "it-ran").unlink()
    for option in ("--sarif", "--junit"):
        assert main(["check", option, "no/report"]) == 2
        assert "cannot write no/report" in capfd.readouterr().err
    assert not (here / "it-ran").exists()


def test_programs_that_have_nothing_to_check(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "train.py").write_text("print('hello')", encoding="utf-8")
    assert gpuprobe(*UPDATE, *TO_FILE) == 4
    err = capfd.readouterr().err
    assert "no GPU memory was allocated" in err
    assert "\n  hint: " in err
    assert not (here / "memory.json").exists()


@pytest.mark.parametrize(("module", "options"), [(False, []), (True, ["--stop-after", "1"])])
def test_arguments_for_what_the_project_runs(
    module: bool, options: list[str], here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "train.py").write_text(f"import sys\nprint(sys.argv[1:])\n{SCRIPT}", encoding="utf-8")
    run = "-m train" if module else "train.py"
    (here / "pyproject.toml").write_text(
        f'[tool.gpuprobe]\nrun = "{run} --lr 1"\ngpu = "t4"\nbaseline = "memory.json"\n'
    )
    for command in (["baseline", "update"], ["check", "-v"]):
        assert gpuprobe(*command, *options, "--", "--epochs", "1", "--stop-after=9") == 0
        out, err = capfd.readouterr()
        assert "['--lr', '1', '--epochs', '1', '--stop-after=9']" in err
        assert f"{run} --lr 1 --epochs 1 --stop-after=9" in " ".join((out + err).split())
    # Where the project runs nothing, it is the script that follows, as with other commands.
    (here / "pyproject.toml").unlink()
    for command in (["baseline", "update"], ["check"]):
        line = [*command, *TO_FILE, *options, "--gpu", "t4", "--", "train.py", "--x"]
        assert gpuprobe(*line) == 0
        assert "['--x']" in capfd.readouterr().err


@pytest.mark.parametrize("command", [["check", "train.py"], ["baseline", "update", "stop.py"]])
def test_an_interrupted_program_has_not_failed(
    command: list[str], here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert gpuprobe(*UPDATE, *TO_FILE) == 0
    content = (here / "memory.json").read_bytes()
    capfd.readouterr()
    (here / command[-1]).write_text("import torch\nraise KeyboardInterrupt\n", encoding="utf-8")
    assert gpuprobe(*command, *TO_FILE) == 130
    assert capfd.readouterr() == ("", "gpuprobe: error: interrupted\n")
    assert (here / "memory.json").read_bytes() == content


def test_help_names_what_can_be_given(capfd: pytest.CaptureFixture[str]) -> None:
    for command in (["check", "--help"], ["baseline", "update", "--help"]):
        with pytest.raises(SystemExit) as exit_:
            main(command)
        assert exit_.value.code == 0
        out = capfd.readouterr().out
        for word in ("--baseline FILE", "--gpu GPU", "--stop-after N", "--tolerance", "[tool."):
            assert word in out, (command, word)


def test_a_baseline_of_another_script_is_refused(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert gpuprobe(*UPDATE, *TO_FILE) == 0
    (here / "other.py").write_text(SCRIPT, encoding="utf-8")
    (here / "it-ran").unlink()
    capfd.readouterr()
    assert main(["check", "other.py", *TO_FILE]) == 2
    err = capfd.readouterr().err
    assert "the baseline is of train.py, not of other.py" in err
    assert not (here / "it-ran").exists()
    # Without a script it is that of the baseline, with other arguments too.
    assert gpuprobe("check", "--verbose", *TO_FILE) == 0
    assert "run train.py (baseline)" in " ".join(capfd.readouterr().out.split())
    assert gpuprobe("check", "train.py", *TO_FILE, "--", "--fast") == 0


CONFLICT = """\
<<<<<<< HEAD
{ours}=======
{theirs}>>>>>>> branch
"""


def test_merge_conflicts_lose_no_tolerance(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = here / "memory.json"
    assert gpuprobe(*UPDATE, *TO_FILE, "--tolerance", "peak_allocated=3%") == 0
    ours = path.read_text(encoding="utf-8")
    path.unlink()
    assert gpuprobe(*UPDATE, *TO_FILE, "--tolerance", "peak_reserved=4MiB") == 0
    theirs = path.read_text(encoding="utf-8")
    path.write_text(CONFLICT.format(ours=ours, theirs=theirs), encoding="utf-8")
    capfd.readouterr()
    assert main(["check", "train.py", *TO_FILE]) == 4
    err = capfd.readouterr().err
    assert "memory.json has merge conflicts" in err
    assert "gpuprobe baseline update" in err
    assert gpuprobe(*UPDATE, *TO_FILE) == 0
    tolerance = json.loads(path.read_text(encoding="utf-8"))["tolerance"]
    assert tolerance == {
        "peak_allocated": {"absolute": 0, "relative": 0.03},
        "peak_reserved": {"absolute": 4 << 20, "relative": 0.0},
    }


def test_a_baseline_that_is_a_link_stays_one(here: Path) -> None:
    (here / "kept").mkdir()
    (here / "memory.json").symlink_to(here / "kept" / "m.json")
    assert gpuprobe(*UPDATE, *TO_FILE) == 0
    assert (here / "memory.json").is_symlink()
    assert (here / "kept" / "m.json").is_file()


INFERENCE = """\
import torch
model = torch.nn.Linear(256, 256).cuda()
with torch.inference_mode():
    for _ in range(5):
        x = model(torch.ones({rows}, 256, device="cuda"))
"""


def test_a_program_that_only_infers_is_gated(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By the peaks of the whole program, and by what each call of the model leaves behind."""
    (here / "train.py").write_text(INFERENCE.format(rows=512), encoding="utf-8")
    assert gpuprobe(*UPDATE, *TO_FILE) == 0
    assert gpuprobe("check", *TO_FILE) == 0
    (here / "train.py").write_text(INFERENCE.format(rows=1024), encoding="utf-8")
    capfd.readouterr()
    assert gpuprobe("check", *TO_FILE, "--repeat", "1", "--json") == 1
    result = json.loads(capfd.readouterr().out)
    assert next(m["name"] for m in result["metrics"] if m["regressed"]) == "peak_allocated"
    assert result["cause"].startswith("reverting train.py:5 in <module> (")
    leak = INFERENCE.format(rows=512) + "        torch.kept = getattr(torch, 'kept', []) + [x]\n"
    (here / "train.py").write_text(leak, encoding="utf-8")
    assert gpuprobe("check", *TO_FILE, "--repeat", "1", "--json") == 1
    metric = next(m for m in json.loads(capfd.readouterr().out)["metrics"] if m["regressed"])
    assert (metric["name"], metric["after"]) == ("growth_per_step", 512 * 256 * 4)
    assert metric["place"] == "train.py:6 in <module>"


@pytest.mark.parametrize("project", [True, False])
def test_a_check_that_fails_prints_what_to_do(
    here: Path, project: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its two commands are run as printed: one fails in the same way, the other accepts."""
    text = SCRIPT.replace("ones(8, 64", "ones(int(sys.argv[1]), 64").replace(
        "import pathlib", "import pathlib\nimport sys"
    )
    (here / "train.py").write_text(text, encoding="utf-8")
    given = ["--gpu", "t4", *TO_FILE, "train.py", "--", "8"]
    if project:
        (here / "pyproject.toml").write_text(
            '[tool.gpuprobe]\nrun = "train.py 8"\ngpu = "t4"\nbaseline = "memory.json"\n'
        )
        given = []
    assert gpuprobe("baseline", "update", *given) == 0
    capfd.readouterr()
    options = ["--blame-budget", "0", "--tolerance", "peak_reserved=1%,4096B"]
    if project:
        (here / "train.py").write_text(text.replace("int(sys.argv[1])", "80000"), encoding="utf-8")
        more = []
    else:
        given[-1] = "80000"
        more = ["train.py", "--", "80000"]
    once = ["--repeat", "1"]  # the comparison is exact
    assert gpuprobe("check", "-v", *once, *options, *given) == 1
    lines = capfd.readouterr().out.splitlines()
    shown = " ".join(" ".join(lines).split())
    assert re.search(
        r"tolerance: peak_reserved is [\d.]+ MiB, the limit is [\d.]+ MiB \(baseline [\d.]+ MiB; "
        r"tolerance: 1% or 4\.0 KiB, command line\)",
        shown,
    )
    again, accept = (line.strip()[2:] for line in lines[-3::2])
    file = [] if project else TO_FILE
    assert shlex.split(again) == ["gpuprobe", "check", *file, *options, *more]
    assert shlex.split(accept) == ["gpuprobe", "baseline", "update", *file, *more]
    assert gpuprobe("check", "-v", *once, *shlex.split(again)[2:]) == 1
    assert [line.strip()[2:] for line in capfd.readouterr().out.splitlines()[-3::2]] == [
        again,
        accept,
    ]
    assert gpuprobe("check", "--json", *once, *shlex.split(again)[2:]) == 1
    (commands,) = json.loads(capfd.readouterr().out)["commands"]
    assert commands == {"accept": accept, "reproduce": again}
    assert gpuprobe(*shlex.split(accept)[1:]) == 0
    capfd.readouterr()
    assert gpuprobe("check", *once, *shlex.split(again)[2:]) == 0
    assert "What to do" not in capfd.readouterr().out
