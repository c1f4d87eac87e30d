"""The registry of rules: every finding is of one, and each id means one thing."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from gpuprobe.analysis import placement
from gpuprobe.analysis.baseline import check as baseline
from gpuprobe.analysis.baseline.model import METRICS
from gpuprobe.analysis.evaluation import WITH_GRADIENTS
from gpuprobe.causes import advice
from gpuprobe.hazards.rules import RULES as HAZARDS
from gpuprobe.model.findings import Level
from gpuprobe.model.rules import define, registered, rule_of
from gpuprobe.probes.distributed.rules import RULES as RANKS
from gpuprobe.probes.health import CHECKS
from gpuprobe.probes.health import RULES as MACHINE
from gpuprobe.reporters.ci import sarif


def test_all_rules_are_registered_and_each_id_is_one_rule() -> None:
    rooms = (*MACHINE, *RANKS, *HAZARDS, *placement.RULES, *advice.RULES, WITH_GRADIENTS)
    ids = [rule.id for rule in rooms]
    assert len(set(ids)) == len(ids)
    assert set(rooms) <= set(registered())
    rest = {rule.id for rule in registered()} - set(ids)
    assert rest == {
        "GPM-environment",
        "GPM-incomplete",
        "GPM-*",
        *(f"GPM-{name}" for name in METRICS),
    }
    for rule in registered():
        assert rule.levels
        assert rule.title.strip() == rule.title != ""
        assert all(isinstance(level, Level) for level in rule.levels)


def test_an_id_cannot_be_taken_twice() -> None:
    before = registered()
    for rule in before:
        with pytest.raises(ValueError, match=re.escape(rule.id)):
            define(rule.id, "another", Level.NOTE, "Something else")
    assert registered() == before


def test_ids_are_in_the_range_of_their_room() -> None:
    for rules, pattern in (
        ((*MACHINE, *RANKS), r"GP1\d\d"),
        (HAZARDS, r"GP2\d\d"),
        (placement.RULES, r"GP3\d\d"),
        (advice.RULES, r"[a-z]+(-[a-z]+)*"),
    ):
        for rule in rules:
            assert re.fullmatch(pattern, rule.id)
    assert len({rule.kind for rule in (*MACHINE, *RANKS)}) == len(MACHINE) + len(RANKS)
    assert all(rule.description and all(rule.reads) for rule in (*MACHINE, *RANKS))
    assert all(rule.remedy for rule in HAZARDS)
    assert [check.rule for check in CHECKS] == sorted(MACHINE, key=lambda rule: rule.id)


def test_every_suggestion_is_of_a_rule() -> None:
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(advice)))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Suggestion"
    ]
    used = {node.args[0].value for node in calls if isinstance(node.args[0], ast.Constant)}
    assert used == {rule.id for rule in advice.RULES}


def test_a_phase_is_of_the_rule_for_parts() -> None:
    for name, id in (("phase evaluation", "GPM-phase-evaluation"), ("races", "GPM-races")):
        found, rule = baseline.regression(name)
        assert found == id
        assert rule_of(found) is rule
    assert rule_of("GP999") is None


def test_sarif_describes_a_rule_as_the_registry_does() -> None:
    stuck = next(rule for rule in MACHINE if rule.id == "GP121")
    race = HAZARDS[0]
    findings = [stuck.finding("slow", fix="Seat it.", level=Level.NOTE), race.finding("x", fix="y")]
    document = sarif.document(findings)
    slow, first = document["runs"][0]["tool"]["driver"]["rules"]
    assert slow["fullDescription"] == {"text": stuck.description}
    assert slow["shortDescription"] == {"text": stuck.title}
    assert slow["defaultConfiguration"] == {"level": "warning"}
    assert document["runs"][0]["results"][0]["level"] == "note"
    assert first["help"]["text"].endswith(race.remedy)
    assert race.title in first["help"]["markdown"]
