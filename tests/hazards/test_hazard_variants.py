"""Variants of reported bugs, written before the engine was changed for the reports: those that
race are found, latent ones included, and those in order are left alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import variants_indices
import variants_streams
from hazard_case import Case
from judging import judge
from upstream_case import Bug

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

_FAMILIES = (variants_indices, variants_streams)
BUGS: tuple[Bug, ...] = tuple(bug for family in _FAMILIES for bug in family.BUGS)
CORRECT: tuple[Case, ...] = tuple(case for family in _FAMILIES for case in family.CASES)


def _found(name: str, text: str) -> list[Any]:
    found = judge(Case(name, "", (), text), text)
    return [*found.races, *found.latent]


def test_names_are_unique() -> None:
    assert len({one.name for one in (*BUGS, *CORRECT)}) == len(BUGS) + len(CORRECT)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_variant_that_races_is_found(bug: Bug) -> None:
    races = _found(bug.name, bug.buggy)
    found = {
        (race.kind, race.related[0].line)
        for race in races
        if race.related and race.location is not None
    }
    assert (bug.kind, bug.lines[0]) in found, [race.message for race in races]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_its_correct_twin_is_left_alone(bug: Bug) -> None:
    assert [race.message for race in _found(bug.name, bug.mended)] == []


@pytest.mark.parametrize("case", CORRECT, ids=lambda case: case.name)
def test_a_correct_variant_is_left_alone(case: Case) -> None:
    assert [race.message for race in _found(case.name, case.text)] == []
