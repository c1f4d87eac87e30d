"""A recording in which something is missing passes no check, and makes no baseline."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

import gpuprobe
from gpuprobe.api.check import recorded
from gpuprobe.cli import main
from gpuprobe.errors import DataError
from gpuprobe.gate.files import read_baseline, write_baseline

GOOD = Path(__file__).parent.parent / "recorded" / "v2" / "virtual.gpuprobe"


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    path = tmp_path / "baseline.json"
    write_baseline(recorded(GOOD), path)
    return path


@pytest.fixture
def part(tmp_path: Path) -> Path:
    """The recording without its end."""
    path = tmp_path / "part.gpuprobe"
    shutil.copytree(GOOD, path)
    stream = path / "rank-00000.jsonl"
    lines = stream.read_bytes().splitlines(keepends=True)
    assert b'"type":"end"' in lines[-1]
    stream.write_bytes(b"".join(lines[:-1]))
    return path


def test_it_fails_with_its_own_code_in_all_formats(
    part: Path, baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(GOOD), "--baseline", str(baseline)]) == 0
    capsys.readouterr()
    junit, sarif = (tmp_path / name for name in ("j.xml", "s.sarif"))
    argv = ["check", str(part), "--baseline", str(baseline)]
    files = ["--junit", str(junit), "--sarif", str(sarif)]
    assert main([*argv, *files]) == 4
    out, err = capsys.readouterr()
    assert out.startswith("not checked: the recording is incomplete\n")
    assert "within the baseline" not in out
    assert "gpuprobe: error: the recording is incomplete: the recording has no end" in err
    (case,) = ElementTree.parse(junit).iter("testcase")
    failure = case.find("failure")
    assert failure is not None
    assert failure.attrib["type"] == "incomplete-recording"
    (result,) = json.loads(sarif.read_text())["runs"][0]["results"]
    assert result["ruleId"] == "GPM-incomplete"
    assert main([*argv, "--json"]) == 4
    document = json.loads(capsys.readouterr().out)
    assert not document["ok"]
    assert document["incomplete"][0].startswith("the recording has no end")
    assert document["metrics"] == document["phases"] == []
    assert main([*argv, "--markdown"]) == 4
    assert "❌" in capsys.readouterr().out


def test_the_function_does_not_pass_it_either(part: Path, baseline: Path) -> None:
    result = gpuprobe.check(part, baseline)
    assert not result.ok
    assert result.incomplete
    assert "no end" in repr(result)


def test_it_makes_no_baseline(
    part: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = baseline.read_bytes()
    assert main(["baseline", "update", str(part), "--baseline", str(baseline)]) == 4
    assert "the recording is incomplete: the recording has no end" in capsys.readouterr().err
    with pytest.raises(DataError, match="incomplete"):
        write_baseline(recorded(part), baseline)
    assert baseline.read_bytes() == before
    assert read_baseline(baseline)


def test_a_recording_without_a_step_is_incomplete_before_it_is_empty(
    part: Path, baseline: Path
) -> None:
    stream = part / "rank-00000.jsonl"
    lines = stream.read_bytes().splitlines(keepends=True)
    stream.write_bytes(b"".join(line for line in lines if b'"type":"step"' not in line))
    assert main(["check", str(part), "--baseline", str(baseline)]) == 4
