"""The parts of ``docs/reference/rules.md``, made from the registry of rules."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpuprobe.analysis import evaluation, placement
from gpuprobe.analysis.baseline import check as baseline
from gpuprobe.causes import advice
from gpuprobe.hazards import rules as hazards
from gpuprobe.model.rules import Rule, registered
from gpuprobe.probes.distributed.rules import RULES as RANK_RULES
from gpuprobe.probes.health import RULES
from gpuprobe.probes.health.xid import XIDS

ROOMS = (advice, evaluation, placement, baseline, hazards)
"""Imported for the rules that they register."""


def index() -> str:
    """Every rule: its id, what it is called, its levels and its title."""
    return "\n".join(
        (
            "| id | kind | levels | title |",
            "| --- | --- | --- | --- |",
            *(_row(rule) for rule in registered()),
        )
    )


def _row(rule: Rule) -> str:
    described = bool(rule.description or rule.remedy)
    name = f"[{rule.id}](#{rule.anchor})" if described else rule.id
    levels = ", ".join(level.value for level in rule.levels)
    return f"| {name} | {rule.kind} | {levels} | {rule.title} |"


def machine() -> str:
    """The rules about one machine."""
    return _sections(RULES)


def ranks() -> str:
    """The rules about the ranks of a job."""
    return _sections(RANK_RULES)


def others() -> str:
    """All other rules that there is more to say of."""
    known = {*RULES, *RANK_RULES}
    return _sections(
        rule for rule in registered() if rule not in known and (rule.description or rule.remedy)
    )


def _sections(rules: Iterable[Rule]) -> str:
    return "\n".join(line for rule in rules for line in _section(rule)).strip("\n")


def _section(rule: Rule) -> Iterator[str]:
    yield from ("", f"### {rule.id} {rule.kind}", "")
    yield rule.description or f"{rule.title[0].upper()}{rule.title[1:]}."
    if rule.remedy:
        yield from ("", f"What to do: {rule.remedy}.")
    if rule.reads:
        yield from ("", f"Reads: {', '.join(rule.reads)}.")


def xids() -> str:
    """The text of GP124 for each number."""
    rows = (
        f"| {code} | {found.level.value} | {found.meaning} | {found.action} |"
        for code, found in sorted(XIDS.items())
    )
    return "\n".join(
        ("| Xid | level | meaning | what to do |", "| ---: | --- | --- | --- |", *rows)
    )
