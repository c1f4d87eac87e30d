"""The frozen set of the memory gate: every change applies, and ``truth.json`` is about it."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from benchmarks.gate_cases.frozen.case import changed, files_of, lines_of
from benchmarks.gate_cases.frozen.cases import COSTLY, HARMLESS

CASES = {**COSTLY, **HARMLESS}
TRUTH = json.loads(
    Path("benchmarks/gate_cases/frozen/truth.json").read_text(encoding="utf-8"),
)


@pytest.mark.parametrize("name", CASES)
def test_the_change_applies_in_whole_and_in_part(name: str) -> None:
    case = CASES[name]
    whole = changed(case)
    before = files_of(case.program)
    assert whole != before
    for files in (whole, *(changed(case, (cause,)) for cause in case.causes)):
        for file, text in files.items():
            if file.endswith(".py"):
                ast.parse(text, file)
            if file.endswith(".json"):
                json.loads(text)
    for cause in case.causes:
        assert changed(case, (cause,)) != whole


@pytest.mark.parametrize("name", CASES)
def test_the_truth_has_the_lines_of_the_change(name: str) -> None:
    case, row = CASES[name], TRUTH[name]
    found = [[part._asdict() for part in lines_of(case, cause)] for cause in case.causes]
    assert [part["lines"] for part in row.get("causes", [])] == found
    files = changed(case)
    for lines in found:
        assert lines
        for part in lines:
            assert 1 <= part["first"] <= part["last"] <= len(files[part["file"]].splitlines())


def test_costly_and_harmless_changes_are_apart() -> None:
    assert list(TRUTH) == list(CASES)
    for name, row in TRUTH.items():
        least = max(2**20, row["before"]["allocated"] // 1000)
        assert (row["growth"] > least) == (name in COSTLY), name
        assert all(part["saves"] > least for part in row.get("causes", [])), name
