"""Findings as JUnit XML: one test case per rule and place, which fails if it has a finding."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TextIO

from gpuprobe.model.findings import Finding
from gpuprobe.model.text import visible

_CHECKS: Final = "GPM-"
"""The prefix of the rules of a check against a baseline: their findings belong to a metric."""


def write(
    findings: Sequence[Finding],
    stream: TextIO,
    *,
    suite: str,
    passed: Sequence[str] = (),
    failed: str = "",
) -> None:
    """Write one suite. ``passed`` names the checks that found nothing. ``failed``: how the program
    ended, where it failed: an error.
    """
    suite = visible(suite)
    names: Counter[str] = Counter()
    cases = len(findings) + len(passed) + bool(failed)
    root = ET.Element("testsuites")
    element = ET.SubElement(
        root,
        "testsuite",
        name=suite,
        tests=str(cases),
        failures=str(len(findings)),
        errors=str(int(bool(failed))),
        skipped="0",
    )
    if failed:
        case = ET.SubElement(element, "testcase", classname=suite, name="the program")
        message = visible(f"the program failed: {failed}")
        ET.SubElement(case, "error", message=message, type="program-failed")
    for name in passed:
        ET.SubElement(element, "testcase", classname=suite, name=visible(name))
    for finding in findings:
        case = _case(element, suite, finding, names)
        failure = ET.SubElement(
            case, "failure", message=visible(finding.message), type=finding.kind
        )
        fix = finding.fix
        failure.text = "" if finding.location is None else f"{visible(str(finding.location))}\n"
        failure.text += (
            ""
            if fix is None
            else visible(f"{fix.text}")
            + (
                "\n" + "\n".join(visible(line) for line in fix.code.splitlines())
                if fix.code
                else ""
            )
        )
    stream.write('<?xml version="1.0" encoding="utf-8"?>\n')
    stream.write(ET.tostring(root, encoding="unicode"))
    stream.write("\n")


def _case(element: ET.Element, suite: str, finding: Finding, names: Counter[str]) -> ET.Element:
    """A test case whose name is the same in every run, so that services can show its history: the
    metric's name, which a passing case has as well; else the kind and the function, without the
    line number."""
    place = finding.location
    name = finding.subject
    if not finding.rule.startswith(_CHECKS) or not name:
        where = str(replace(place, line=0)).replace(":0", "", 1) if place is not None else ""
        name = f"{finding.kind} {where}".strip()
    names[name] += 1
    if names[name] > 1:
        name = f"{name} ({names[name]})"
    classname = suite if finding.rule.startswith(_CHECKS) else f"{suite}.{finding.rule}"
    return ET.SubElement(element, "testcase", classname=classname, name=visible(name))
