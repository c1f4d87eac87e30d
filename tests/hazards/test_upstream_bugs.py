"""Bugs of public projects are found, with both lines; their mended versions are left alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hazard_case import Case
from judging import judge
from upstream_case import Bug
from upstream_corpus import BUGS, CORRECT

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def _named() -> Iterator[str]:
    yield from (bug.name for bug in BUGS)
    yield from (case.name for case in CORRECT)


def test_the_corpus_is_large_enough() -> None:
    assert len(BUGS) >= 60
    assert len(CORRECT) >= 60
    assert len(set(_named())) == len(BUGS) + len(CORRECT)
    assert all(bug.url.startswith("https://github.com/") for bug in BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_found(bug: Bug) -> None:
    races = judge(Case(bug.name, bug.url, (bug.kind,), bug.buggy), bug.buggy).races
    found = {
        (race.kind, race.related[0].line, race.location.line)
        for race in races
        if race.related and race.location is not None
    }
    assert (bug.kind, *bug.lines) in found, [race.message for race in races]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_its_mended_version_is_left_alone(bug: Bug) -> None:
    races = judge(Case(bug.name, bug.url, (), bug.mended), bug.mended).races
    assert [race.message for race in races] == []


@pytest.mark.parametrize("case", CORRECT, ids=lambda case: case.name)
def test_a_correct_program_is_left_alone(case: Case) -> None:
    races = judge(case, case.text).races
    assert [race.message for race in races] == []
