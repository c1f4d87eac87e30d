"""The baseline of known hazards: what is the same finding, what is a new one."""

from __future__ import annotations

import json
import linecache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpuprobe
from gpuprobe.api.recordings import load
from gpuprobe.cli import main
from gpuprobe.errors import DataError, UnsupportedSchema, UsageError
from gpuprobe.gate.files import read_known, write_known
from gpuprobe.hazards.findings.known import (
    KnownFinding,
    compare,
    dumps,
    fingerprint,
    known,
    loads,
    normalized,
)
from gpuprobe.hazards.findings.results import Hazards
from gpuprobe.model.findings import Finding, Level

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


def finding(number: int) -> Finding:
    return Finding("GP201", "read-after-write", Level.ERROR, "m", fingerprint=f"{number:016x}")


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)))
def test_every_finding_is_new_or_known_and_counts_matter(one: list[int], two: list[int]) -> None:
    rows = known([finding(number) for number in one])
    result = compare(rows, now := [finding(number) for number in two])
    assert sorted(map(id, result.new + result.known)) == sorted(map(id, now))
    for number in range(6):
        count = sum(1 for item in result.new if item.fingerprint == f"{number:016x}")
        assert count == max(0, two.count(number) - one.count(number))
    assert {int(row.fingerprint, 16) for row in result.gone} == set(one) - set(two)


rows = st.builds(
    KnownFinding,
    fingerprint=st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
    rule=st.text(),
    kind=st.text(),
    where=st.text(),
    about=st.text(),
    count=st.integers(1, 10**6),
)


@given(st.lists(rows, max_size=4))
def test_a_baseline_reads_back(some: list[KnownFinding]) -> None:
    assert loads(dumps(some)) == tuple(sorted(some))


GOOD = json.loads(dumps([KnownFinding("0" * 16, "GP201", "read-after-write", "a", "b")]))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "damaged"),
        ("[]", "not a baseline of hazards"),
        (json.dumps({"schema": "gpuprobe.baseline", "version": [1, 0]}), "not a baseline"),
        (json.dumps({**GOOD, "findings": 3}), "damaged"),
        (json.dumps({**GOOD, "findings": [{}]}), "damaged"),
        (json.dumps({**GOOD, "version": []}), "damaged"),
        (json.dumps({**GOOD, "version": ["1"]}), "damaged"),
        (json.dumps({**GOOD, "findings": [{**GOOD["findings"][0], "count": 0}]}), "damaged"),
        (
            json.dumps({**GOOD, "findings": [{**GOOD["findings"][0], "fingerprint": "x"}]}),
            "damaged",
        ),
        ("[" * 100_000, "not a baseline"),
        (dumps([])[:40], "damaged"),
        ("import torch\n", "not a baseline"),
    ],
)
def test_what_is_no_baseline_is_refused_in_one_line(text: str, error: str) -> None:
    with pytest.raises(DataError, match=error) as raised:
        loads(text, "known.json")
    assert str(raised.value).startswith("known.json")
    assert raised.value.hint


def test_a_newer_baseline_is_refused() -> None:
    with pytest.raises(UnsupportedSchema, match="newer than this gpuprobe"):
        loads(json.dumps({**GOOD, "version": [3, 0]}))
    assert loads(json.dumps({**GOOD, "version": [2, 9], "extra": 1}))


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no baseline"):
        read_known(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot read"):
        read_known(tmp_path / "binary.json")
    with pytest.raises(UsageError, match="cannot write"):
        write_known([], tmp_path / "nowhere" / "known.json")
    write_known([finding(1)], tmp_path / "known.json")
    assert [row.fingerprint for row in read_known(tmp_path / "known.json")] == [f"{1:016x}"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary.json", "known.json"]


def test_the_command_fails_on_new_ones_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"

    def gpuprobe_run(*options: str) -> int:
        linecache.clearcache()
        arguments = ["run", "-q", "--force", "-o", "run.gpuprobe", *options, "train.py"]
        return main(arguments)

    def text() -> str:
        return capsys.readouterr().err

    script.write_text(PROGRAM)
    assert gpuprobe_run("--hazards-baseline", "known.json") == 2  # before anything is run
    assert "--hazards-baseline-update" in text()
    assert not (tmp_path / "run.gpuprobe").exists()
    assert gpuprobe_run("--hazards-baseline-update") == 2
    assert gpuprobe_run("--hazards") == 1
    recording = load("run.gpuprobe").ranks[0]  # as it has them: reports and exports show them, too
    assert [finding.kind for finding in recording.findings] == ["read-after-write", "implicit-sync"]
    assert recording.end is not None
    text()
    update = ("--hazards-baseline", "known.json", "--hazards-baseline-update")
    assert gpuprobe_run(*update) == 0
    assert "2 findings are known now" in text()

    script.write_text("# moved\n" + PROGRAM)
    outputs = ("--hazards-json", "h.json", "--hazards-sarif", "h.sarif", "--hazards-junit", "h.xml")
    assert gpuprobe_run("--hazards-baseline", "known.json", *outputs) == 0
    assert "0 new, 1 in the baseline" in text()
    assert json.loads(Path("h.json").read_text())["baseline"]["new"] == []
    results = json.loads(Path("h.sarif").read_text())["runs"][0]["results"]
    assert {result["baselineState"] for result in results} == {"unchanged"}
    assert 'failures="0"' in Path("h.xml").read_text()
    assert 'skipped="2"' in Path("h.xml").read_text()

    script.write_text(PROGRAM.replace("return x", "x.add_(1)\n    return x"))
    assert gpuprobe_run("--hazards-baseline", "known.json", *outputs) == 1
    said = text()
    assert "1 new, 1 in the baseline" in said
    assert "write-after-read" in said
    assert len(json.loads(Path("h.json").read_text())["baseline"]["new"]) == 1

    script.write_text(
        PROGRAM.replace(
            "x = torch.ones", "x = torch.nonzero(torch.ones(3, device='cuda')); x = torch.ones"
        )
    )
    assert gpuprobe_run("--hazards-baseline", "known.json") == 1  # a new wait of the host, too
    assert "nonzero  (new)" in text()

    script.write_text("import torch\n")
    assert gpuprobe_run("--hazards-baseline", "known.json") == 0
    assert "not found this time" in text()

    before = Path("known.json").read_text()
    script.write_text(PROGRAM + "raise SystemExit(3)\n")
    assert gpuprobe_run(*update) == 3
    assert "was not modified" in text()
    assert Path("known.json").read_text() == before


def test_a_program_that_goes_elsewhere_leaves_its_findings_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train.py").write_text("import os, torch\nos.chdir('elsewhere')\n")
    assert main(["run", "-q", "--hazards-json", "h.json", "train.py"]) == 0
    assert json.loads((tmp_path / "h.json").read_text())
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_update_replaces_nothing_but_a_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\n")
    options = ["--hazards-baseline", "known.json", "--hazards-baseline-update"]
    update = ["run", "-q", "--force", *options, "train.py"]
    for text, code in (
        ("import os\n", 4),
        ("{}\n", 4),
        (dumps([])[:50], 0),
        (dumps([]), 0),
        ("", 0),
    ):
        Path("known.json").write_text(text)
        assert main(update) == code
        said = capsys.readouterr().err
        assert ("not a baseline of hazards" in said) == (code == 4)
        assert Path("known.json").read_text() == (text if code else dumps([]))
