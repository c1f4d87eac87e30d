"""Findings as JUnit XML: one test case per rule and place, failed where something was found."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import TextIO

from gpuprobe.model.findings import Finding
from gpuprobe.model.text import visible


def write(
    findings: Sequence[Finding],
    stream: TextIO,
    *,
    suite: str,
    passed: Sequence[str] = (),
    known: Sequence[Finding] = (),
    failed: str = "",
) -> None:
    """Write one suite. ``passed`` names the checks that found nothing; ``known`` are findings of
    a baseline, written as skipped. ``failed``: how the program ended, where it failed: an error.
    """
    cases = len(findings) + len(passed) + len(known) + bool(failed)
    root = ET.Element("testsuites")
    element = ET.SubElement(
        root,
        "testsuite",
        name=suite,
        tests=str(cases),
        failures=str(len(findings)),
        errors=str(int(bool(failed))),
        skipped=str(len(known)),
    )
    if failed:
        case = ET.SubElement(element, "testcase", classname=suite, name="the program")
        message = visible(f"the program failed: {failed}")
        ET.SubElement(case, "error", message=message, type="program-failed")
    for name in passed:
        ET.SubElement(element, "testcase", classname=suite, name=visible(name))
    for finding in known:
        case = _case(element, suite, finding)
        ET.SubElement(case, "skipped", message=visible(f"in the baseline: {finding.message}"))
    for finding in findings:
        case = _case(element, suite, finding)
        failure = ET.SubElement(
            case, "failure", message=visible(finding.message), type=finding.kind
        )
        fix = finding.fix
        failure.text = (
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


def _case(element: ET.Element, suite: str, finding: Finding) -> ET.Element:
    where = "" if finding.location is None else visible(str(finding.location))
    return ET.SubElement(
        element,
        "testcase",
        classname=f"{suite}.{finding.rule}",
        name=f"{finding.kind} {where}".strip(),
    )
