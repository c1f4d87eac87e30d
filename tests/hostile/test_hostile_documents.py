"""Documents that come from elsewhere, changed at random; and what such changes have found."""

from __future__ import annotations

import json
from pathlib import Path

import hostile_commands as commands
import pytest
from fuzz_mutations import uses_of
from hostile_documents import TESTS
from hostile_mutations import numbered
from hostile_recordings import CRAFTED

from gpuprobe.analysis.inspection.steps import insight
from gpuprobe.cli import main, stderr
from gpuprobe.errors import ConfigError
from gpuprobe.gate.project import read_project
from gpuprobe.model.findings import Finding, Fix, Level
from gpuprobe.model.io.files import open_regular
from gpuprobe.model.values import Unavailable
from gpuprobe.pytest_plugin import summary
from gpuprobe.recording.load import load
from gpuprobe.reporters.ci import annotations


@pytest.mark.parametrize("kind", ["details", "catalogue", "tests", "settings"])
def test_mutations_of_documents(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first uses: the others start a program or a screen. benchmarks/fuzz_inputs.py has all."""
    monkeypatch.setattr("sys.executable", "")  # snapshots are read in this process
    monkeypatch.setenv("GPUPROBE_GPUS", "")
    (tmp_path / "o").mkdir()
    uses, make = uses_of(kind, tmp_path), numbered(kind)
    ended = set()
    for number in range(100):
        target = commands.written(kind, make(1, number), tmp_path)
        _, use = uses.turns[number % min(2, len(uses.turns))]
        found = use(target)
        assert found == "" or found.startswith("="), f"{kind} {number}: {found}"
        ended.add(found)
    assert kind == "settings" or len(ended) > 1, "some are read, and some are refused or noted"


def test_a_catalogue_that_cannot_be_read_is_one_line_of_gpu_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpus.json"
    path.write_text('{"schema_version": 9}')
    monkeypatch.setenv("GPUPROBE_GPUS", str(path))
    assert main(["estimate", "--gpu", "list"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f'gpuprobe: error: {path}: expected an object with "schema_version": 1'
    ]


def test_titles_of_a_catalogue_are_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpus.json"
    entry = {"name": "mine", "like": "h100-80gb", "title": "\x1b]0;t\x07\nx"}
    path.write_text(json.dumps({"schema_version": 1, "gpus": [entry]}))
    monkeypatch.setenv("GPUPROBE_GPUS", str(path))
    with pytest.raises(SystemExit):
        main(["estimate", "--gpu", "list"])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.split() == ["mine", "79.2", "GiB", r"\x1b]0;t\x07\x0ax"]


def test_an_annotation_ends(tmp_path: Path) -> None:
    finding = Finding("GP201", "x", Level.ERROR, "m" * 5000, fix=Fix("f" * 5000))
    places = annotations.Places.of({}, str(tmp_path))
    (command,) = annotations.commands([finding], places)
    assert len(command) < 2500


def test_an_error_is_one_line_that_ends(capsys: pytest.CaptureFixture[str]) -> None:
    stderr.error("\x1b" * 3000, "y" * 3000)
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("gpuprobe: error: \\x1b\\x1b")
    assert len(error) < 4 * stderr.MOST_COLUMNS + 20
    assert hint == "  hint: " + "y" * (stderr.MOST_COLUMNS - 1) + "…"


class _Terminal:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def write_line(self, text: str, *, red: bool) -> None:
        assert red
        self.lines.append(text)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": []}, "it is damaged: it has no valid version"),
        ({"version": [2, 0]}, "it: version 2.0 is newer"),
        ({"schema": "x"}, "it is no file of --gpuprobe-save"),
        ({"tests": {"a": {"peak_allocated": "\x1b"}}}, "it is damaged: tests.a.peak_allocated"),
        ({"tests": {"a": {"peak_allocated": float("nan")}}}, "it is damaged: tests.a.peak"),
        ({"tests": {"a": {"peak_allocated": 1 << 60}}}, "it is damaged: tests.a.peak_allocated"),
    ],
)
def test_saved_results_that_are_none_are_not_compared_with(
    change: dict[str, object], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "saved.json"
    path.write_text(json.dumps({**TESTS, **change}))
    terminal = _Terminal()
    assert summary.saved(terminal, str(path)) is None
    (line,) = terminal.lines
    assert told in line
    assert line.isprintable()


def test_saved_results_are_compared_with(tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(TESTS))
    terminal = _Terminal()
    before = summary.saved(terminal, str(path))
    assert before is not None
    peaks = {name: row["peak_allocated"] for name, row in before.items()}
    assert peaks == {"test_a.py::test_one": 512, "test_a.py::test_two[x]": 1 << 30}
    figures = {"group": "\x1b[2J", "peak_allocated": 1536, "peak_reserved": 0, "left": 0}
    lines = summary.lines([("test_a.py::test_one", figures)], None, before)
    assert lines[0] == "\\x1b[2J:"
    assert lines[1].split()[:2] == ["+1.0", "KiB"]
    assert terminal.lines == []


def test_keys_that_come_faster_than_what_they_open(tmp_path: Path) -> None:
    """Enter on a row of the trace while the list is another one by now."""
    assert commands.show(commands.GOOD) == ""


def test_traces_of_impossible_sizes_are_told_on_the_screen(tmp_path: Path) -> None:
    """Their files are whole: it is found when their sizes are added up."""
    folder = tmp_path / "x.gpuprobe"
    folder.mkdir()
    CRAFTED["chunks: sizes of 2**63"](folder)
    (rank,) = load(folder).ranks
    found = insight(rank, "cuda:0")
    assert isinstance(found.leaks, Unavailable)
    assert "its sizes exceed the memory of any device" in found.leaks.reason


@pytest.mark.parametrize(
    "setting", ['baseline = "a\\u0000"', 'run = "a\\u0000"', 'gpu = "\\u0000"']
)
def test_a_setting_with_a_null_byte(setting: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.gpuprobe]\n{setting}\n")
    with pytest.raises(ConfigError, match="without null bytes"):
        read_project(tmp_path)


def test_no_file_has_a_null_byte_in_its_name() -> None:
    with pytest.raises(OSError, match="no file's name has a null byte"):
        open_regular("a\0b")
