"""The parts of ``docs/reference/rules.md``, made from the registry of rules."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpuprobe.analysis import evaluation, placement
from gpuprobe.analysis.baseline import check as baseline
from gpuprobe.causes import advice
from gpuprobe.hazards import rules as hazards
from gpuprobe.model.rules import Rule, registered
from gpuprobe.probes.distributed.rules import RULES as RANK_RULES
from gpuprobe.probes.health import RULES, xid

ROOMS = (advice, evaluation, placement, baseline, hazards)
"""Imported for the rules that they register."""


def machine() -> str:
    """The rules about one machine."""
    return _sections(RULES)


def ranks() -> str:
    """The rules about the ranks of a job."""
    return _sections(RANK_RULES)


def others() -> str:
    """All other rules, but those that have a table on the page of their command, and those of a
    metric of `gpuprobe check`, which the page of its settings describes.
    """
    known = {*RULES, *RANK_RULES, *hazards.RULES, *placement.RULES}
    rows = [
        f"| {rule.id} | {rule.kind} | {_levels(rule)} | {_text(rule)} |"
        for rule in registered()
        if rule not in known and rule.remedy != baseline.INTENDED
    ]
    return "\n".join(
        ("| id | kind | level | what it reports |", "| --- | --- | --- | --- |", *rows)
    )


def _levels(rule: Rule) -> str:
    return ", ".join(level.value for level in rule.levels)


def _text(rule: Rule) -> str:
    """What it reports, and the advice."""
    text = " ".join((rule.description or rule.title).split())
    advice = f" What to do: {' '.join(rule.remedy.split())}." if rule.remedy else ""
    return f"{text[0].upper()}{text[1:].rstrip('.')}.{advice}"


def _sections(rules: Iterable[Rule]) -> str:
    return "\n\n".join(
        f"### {rule.id} {rule.kind}\n\n{rule.description} ({_levels(rule)})" for rule in rules
    )


def xids() -> str:
    """The text of GP124 for each number. What many have in common is named by a letter."""
    common = {xid.PROGRAM: "**P**", xid.RESET: "**R**", xid.REPLACE: "**V**"}
    lines = [f"* {letter}: {text}." for text, letter in common.items()]
    lines.append("")
    for code, entry in sorted(xid.XIDS.items()):
        action = entry.action
        for text, letter in common.items():
            action = action.replace(text, letter)
        lines.append(f"* **{code}** ({entry.level.value}): {entry.meaning}. {action}")
    return "\n".join(lines)
