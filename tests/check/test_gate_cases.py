"""Edits that the memory gate is measured on: patches apply, the lines to name exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.gate_cases import Case, cases


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_edit_applies_and_its_lines_are_there(case: Case, tmp_path: Path) -> None:
    project = tmp_path / case.program
    case.write(project)
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    case.apply(project)
    after = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    assert after != before
    for path, text in after.items():
        if path.suffix == ".py":
            ast.parse(text, str(path))
    for line in frozenset().union(*case.lines):
        file, _, number = line.rpartition(":")
        assert after[project / file].splitlines()[int(number) - 1].strip()
    least = max(2**20, case.before // 1000)
    assert (case.after - case.before > least) == bool(case.lines)
