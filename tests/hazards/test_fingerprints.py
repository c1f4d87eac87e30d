"""Fingerprints of findings: what is the same finding, what is another one."""

from __future__ import annotations

import json
import linecache
from pathlib import Path

import pytest
import torch

import gpuprobe
from gpuprobe.cli import main
from gpuprobe.hazards.findings.fingerprint import fingerprint, normalized
from gpuprobe.hazards.findings.results import Hazards

pytestmark = pytest.mark.simulated

PROGRAM = """\
import torch
side = torch.cuda.Stream()
def step():
    x = torch.ones(64, device="cuda")
    with torch.cuda.stream(side):
        y = x * 2
    return x.sum().item()
step()
"""


def findings(path: Path, text: str) -> Hazards:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    linecache.clearcache()
    with gpuprobe.detect_hazards() as found:
        exec(compile(text, str(path), "exec"), {"torch": torch})
    return found


def prints(found: Hazards) -> list[str]:
    return sorted(finding.fingerprint for finding in found.findings)


def test_a_finding_stays_the_same_when_the_code_moves(tmp_path: Path) -> None:
    before = prints(findings(tmp_path / "one" / "train.py", PROGRAM))
    assert len(set(before)) == 2
    shifted = "# a comment\n\n\n" + PROGRAM.replace("y = x * 2", "y = x*2  # doubled")
    assert prints(findings(tmp_path / "two" / "train.py", shifted)) == before
    indented = PROGRAM.replace("    x = ", "    if True:\n        x = ")
    assert prints(findings(tmp_path / "train.py", indented)) == before


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("x * 2", "x + 2", 1),  # another operator: another race; the sync is the same
        ("def step", "def other", 0),  # another function
        ("x.sum().item()", "x.max().item()", 1),  # another sync; the race is the same
    ],
)
def test_changed_code_is_another_finding(tmp_path: Path, old: str, new: str, same: int) -> None:
    before = prints(findings(tmp_path / "train.py", PROGRAM))
    text = PROGRAM.replace(old, new).replace(
        "\nstep()", "\nother()" if "other" in new else "\nstep()"
    )
    after = prints(findings(tmp_path / "train.py", text))
    assert len(set(before) & set(after)) == same
    assert len(after) == 2


def test_what_a_line_says_without_comments_and_space() -> None:
    assert normalized('  y = f( "a # b" ,x )  # why\n') == 'y=f("a # b",x)'
    assert normalized("y=f('#')#") == "y=f('#')"
    assert normalized("y = 'a  b'") != normalized("y = 'a b'")
    assert fingerprint("r", "k", "s", [("/a/f.py", "g", "x")]) == fingerprint(
        "r", "k", "s", [("/b/f.py", "g", " x # z")]
    )
    assert fingerprint("r", "k", "s", []) != fingerprint("r", "k", "t", [])


def test_a_program_that_goes_elsewhere_leaves_its_findings_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train.py").write_text("import os, torch\nos.chdir('elsewhere')\n")
    assert main(["run", "-q", "--hazards-json", "h.json", "train.py"]) == 0
    assert json.loads((tmp_path / "h.json").read_text())
    assert not list((tmp_path / "elsewhere").iterdir())
