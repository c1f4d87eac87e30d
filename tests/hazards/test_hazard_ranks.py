"""`gpuprobe run --hazards-json FILE` of several ranks: a file each, and one of them all."""

from __future__ import annotations

import json
import os
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import warm_python

from gpuprobe.gate import files
from gpuprobe.hazards.findings.results import Hazards, SyncRow, merge
from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.place import Place
from gpuprobe.reporters.json.schemas import schema

_PROGRAM = """\
import os, sys
import torch
side = torch.cuda.Stream()
x = torch.ones(64, device="cuda")
with torch.cuda.stream(side):
    y = x * 2
if os.environ["RANK"] == "1":
    with torch.cuda.stream(side):
        z = torch.ones(64, device="cuda")
    z.add_(1)
    sys.exit(3)
"""


def _start(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    command = [warm_python.shared().python, "-m", "gpuprobe", "run", "--gpu", "h100-80gb", "-q"]
    files = ["--hazards-json", "h.json", "--hazards-sarif", "h.sarif", "--hazards-junit", "h.xml"]
    names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *files, "-o", "r.gpuprobe", "train.py"],
        cwd=folder,
        env={**os.environ, **names},
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_no_rank_overwrites_another(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PROGRAM)
    ranks = [_start(tmp_path, rank) for rank in (0, 1)]
    assert [rank.wait(120) for rank in ranks] == [1, 3]
    document = json.loads((tmp_path / "h.json").read_text())
    jsonschema.Draft202012Validator(schema("hazards-2")).validate(document)
    assert document["ranks"] == [0, 1]
    assert document["failed"] == "rank 1: exit code 3"
    found = {
        row["location"]["line"]: {pair["name"]: pair["value"] for pair in row["evidence"]}
        for row in document["findings"]
    }
    assert {line: evidence["ranks"] for line, evidence in found.items()} == {6: "0, 1", 10: "1"}
    own = [json.loads((tmp_path / f"h.rank-0000{rank}.json").read_text()) for rank in (0, 1)]
    assert [len(one["findings"]) for one in own] == [1, 2]
    (run,) = json.loads((tmp_path / "h.sarif").read_text())["runs"]
    assert len(run["results"]) == 2
    assert run["invocations"][0]["executionSuccessful"] is False
    (suite,) = ET.fromstring((tmp_path / "h.xml").read_text())
    assert (suite.attrib["failures"], suite.attrib["errors"]) == ("2", "1")


def _finding(mark: str, line: int = 1) -> Finding:
    place = Place("a.py", line)
    return Finding("GP201", "read-after-write", Level.ERROR, "m", location=place, fingerprint=mark)


def _row(count: int, seconds: float | None) -> SyncRow:
    return SyncRow("item", Place("a.py", 3), count, seconds, False, "")


def test_what_ranks_share_is_one_finding() -> None:
    one = Hazards(findings=[_finding("a" * 16), _finding("a" * 16, 2)], operations=3)
    other = Hazards(findings=[_finding("b" * 16), _finding("a" * 16)], operations=4)
    one.syncs, other.syncs = [_row(2, None)], [_row(3, 0.5)]
    one.redundant = [(Place("a.py", 7), 2), (Place("a.py", 8), 1)]
    other.redundant = [(Place("a.py", 8), 4)]
    one.coverage, other.coverage = ["x", "y"], ["y"]
    other.failed = "exit code 3"
    whole = merge({2: other, 0: one}, 4)
    shown = [(item.fingerprint[0], dict(item.evidence)["ranks"]) for item in whole.findings]
    assert shown == [("a", "0, 2"), ("a", "0"), ("b", "2")]
    assert whole.operations == 7
    assert [(row.count, row.seconds) for row in whole.syncs] == [(5, 0.5)]
    assert whole.redundant == [(Place("a.py", 8), 5)]
    assert whole.coverage == ["x", "y", "ranks without a result: 1, 3 of 4"]
    assert whole.failed == "rank 2: exit code 3"
    assert whole.ranks == (0, 2)


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    def become(rank: int) -> None:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2)):
            monkeypatch.setenv(name, str(value))

    return become


def test_a_rank_that_ends_meanwhile_is_written_too(tmp_path: Path, as_rank: Any) -> None:
    path = tmp_path / "h.json"
    as_rank(0)
    first = files.merged_hazards(Hazards(findings=[_finding("a" * 16)]), path)
    assert [item.fingerprint for item in next(first).findings] == ["a" * 16]
    as_rank(1)  # ends, and writes, before rank 0 has written what it was given
    (second,) = files.merged_hazards(Hazards(findings=[_finding("b" * 16)]), path)
    assert second.ranks == (0, 1)
    (again,) = first
    assert [item.fingerprint[0] for item in again.findings] == ["a", "b"]


def test_an_earlier_run_leaves_nothing(tmp_path: Path, as_rank: Any) -> None:
    path = tmp_path / "h.json"
    as_rank(1)
    list(files.merged_hazards(Hazards(), path))
    assert files.rank_file(path, 1).exists()
    files.clear_rank_file(path)
    assert not files.rank_file(path, 1).exists()


def test_one_rank_writes_no_file_of_its_own(tmp_path: Path) -> None:
    found = Hazards()
    assert list(files.merged_hazards(found, tmp_path / "h.json")) == [found]
    assert list(tmp_path.iterdir()) == []
