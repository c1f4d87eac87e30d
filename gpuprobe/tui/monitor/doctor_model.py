"""A diagnosis as lines of text in roles. Knows nothing of Textual."""

from __future__ import annotations

import time
from collections.abc import Iterator

from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.machine.diagnosis import Diagnosis, NotChecked
from gpuprobe.model.text import visible, wrapped
from gpuprobe.model.values import Unavailable
from gpuprobe.tui.widgets.paint import Line

__all__ = ["diagnosis_lines", "headline", "summary"]

_BADGES = {Level.ERROR: "badge-bad", Level.WARNING: "badge-warning", Level.NOTE: "badge"}


def summary(diagnosis: Diagnosis) -> Line:
    """How many findings of each level, and how much was looked at."""
    line: Line = ()
    for level in Level:
        count = sum(finding.level is level for finding in diagnosis.findings)
        if count:
            name = f" {count} {level.value}{'' if count == 1 else 's'} "
            line += ((name, _BADGES[level]), (" ", ""))
    if not line:
        line = (("Nothing found", "good"), ("  ", ""))
    at = time.strftime("%H:%M:%S", time.localtime(diagnosis.taken_at))
    rest = f"{len(diagnosis.passed)} passed · {len(diagnosis.not_checked)} not checked · at {at}"
    return (*line, (rest, "dim"))


def diagnosis_lines(diagnosis: Diagnosis, columns: int) -> list[Line]:
    """What is wrong first, then what is well, then what could not be checked; each line at
    most ``columns`` wide.
    """
    return list(_lines(diagnosis, max(20, columns)))


def _lines(diagnosis: Diagnosis, columns: int) -> Iterator[Line]:
    for finding in diagnosis.findings:
        yield from _finding(finding, columns)
        yield ()
    if diagnosis.passed:
        yield ((f"Passed ({len(diagnosis.passed)})", "title"),)
        for rule in diagnosis.passed:
            for at, text in enumerate(wrapped(rule.title, "", columns - 10)):
                yield (("✓ ", "good"), (f"{rule.id if at == 0 else '':6} ", "dim"), (text, ""))
        yield ()
    if diagnosis.not_checked:
        yield ((f"Not checked ({len(diagnosis.not_checked)})", "title"),)
        for reason, rules in _by_reason(diagnosis.not_checked).items():
            for text in wrapped(reason, "? ", columns):
                yield ((text, "warning"),)
            for text in wrapped(", ".join(rules), "  ", columns):
                yield ((text, "dim"),)


def _finding(finding: Finding, columns: int) -> Iterator[Line]:
    label = f" {finding.level.value} "
    indent = len(label) + 1
    rows = list(wrapped(f"{finding.message} ({finding.rule})", "", columns - indent))
    yield ((label, _BADGES[finding.level]), (" ", ""), (rows[0], "bold"))
    for row in rows[1:]:
        yield ((" " * indent, ""), (row, "bold"))
    for name, value in finding.evidence:
        for row in wrapped(f"{name}: {value}", " " * indent, columns):
            yield ((row, "dim"),)
    if finding.fix is not None:
        for row in wrapped(finding.fix.text, " " * (indent - 5) + "fix: ", columns):
            yield ((row, "accent"),)
        if finding.fix.code:
            yield ((" " * indent, ""), (visible(finding.fix.code), "key"))


def _by_reason(entries: tuple[NotChecked, ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entry in entries:
        found.setdefault(entry.reason, []).append(f"{entry.rule.id} {entry.rule.kind}")
    return found


def headline(diagnosis: Diagnosis) -> str:
    """What was looked at, in a few words."""
    parts = []
    if diagnosis.demo:
        parts.append(f"demo fleet {visible(diagnosis.demo)}")
    driver = diagnosis.driver
    parts.append("no driver" if isinstance(driver, Unavailable) else f"driver {visible(driver)}")
    if not diagnosis.demo:
        torch = diagnosis.torch
        parts.append("no torch" if isinstance(torch, Unavailable) else f"torch {visible(torch)}")
    count = diagnosis.devices
    if not isinstance(count, Unavailable):
        parts.append("1 GPU" if count == 1 else f"{count} GPUs")
    return " · ".join(parts)
