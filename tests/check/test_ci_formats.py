"""What services read of a check: places in the checkout, names that stay, files they accept."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

import gpuprobe.analysis.baseline.check  # noqa: F401 (it defines the rules)
from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.place import Place
from gpuprobe.reporters.ci import junit, sarif


def finding(place: Place | None, rule: str = "GPM-peak_allocated") -> Finding:
    name = rule.removeprefix("GPM-")
    return Finding(rule, "memory-regression", Level.ERROR, "grew", location=place, subject=name)


def location(found: Finding, **more: str) -> dict[str, object]:
    document = sarif.document([found], "/checkout/app", **more)
    (result,) = document["runs"][0]["results"]
    (where,) = result["locations"]
    return dict(where["physicalLocation"])


@pytest.mark.parametrize(
    ("file", "artifact"),
    [
        ("pkg/train.py", {"uri": "app/pkg/train.py"}),
        ("/checkout/app/pkg/a b.py", {"uri": "app/pkg/a%20b.py"}),
        ("../shared/x.py", {"uri": "shared/x.py"}),
        ("/elsewhere/x.py", {"uri": "file:///elsewhere/x.py"}),
        (
            "site-packages/transformers/models/llama.py",
            {"uri": "transformers/models/llama.py", "uriBaseId": "SITE-PACKAGES"},
        ),
        (
            "/checkout/app/.venv/lib/python3.12/site-packages/peft/a.py",
            {"uri": "peft/a.py", "uriBaseId": "SITE-PACKAGES"},
        ),
    ],
)
def test_addresses_are_relative_to_the_checkout(file: str, artifact: dict[str, str]) -> None:
    found = location(finding(Place(file, 3)), repository="/checkout")
    assert found == {"artifactLocation": artifact, "region": {"startLine": 3}}


def test_a_base_that_is_used_is_declared() -> None:
    used, unused = (
        sarif.document([finding(Place(file, 3))])["runs"][0]
        for file in ("site-packages/a/b.py", "b.py")
    )
    assert list(used["originalUriBaseIds"]) == ["SITE-PACKAGES"]
    assert "originalUriBaseIds" not in unused


@pytest.mark.parametrize("place", [None, Place("", 0, "native")])
def test_every_result_has_a_location(place: Place | None) -> None:
    found = location(finding(place), elsewhere="memory.json", repository="/checkout")
    assert found["artifactLocation"] == {"uri": "app/memory.json"}
    assert found["region"] == {"startLine": 1}


def test_rules_have_their_help() -> None:
    (rule,) = sarif.document([finding(None)])["runs"][0]["tool"]["driver"]["rules"]
    assert rule["fullDescription"]["text"] in rule["help"]["text"]
    assert "gpuprobe baseline update" in rule["help"]["markdown"]
    assert rule["help"]["markdown"].startswith("**")


def names(findings: list[Finding], passed: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    stream = io.StringIO()
    junit.write(findings, stream, suite="memory", passed=passed)
    (suite,) = ET.fromstring(stream.getvalue())
    return [(case.attrib["classname"], case.attrib["name"]) for case in suite]


def test_a_check_has_one_name_in_junit_whether_it_passes_or_not() -> None:
    assert names([finding(Place("a.py", 3, "f"))]) == names([], ("peak_allocated",))
    assert names([finding(Place("b.py", 9, "g"))]) == [("memory", "peak_allocated")]


def test_a_hazard_keeps_its_name_when_lines_shift() -> None:
    race = Finding("GP201", "write-after-read", Level.ERROR, "m", location=Place("a.py", 3, "f"))
    shifted = replace(race, location=Place("a.py", 7, "f"))
    assert names([race]) == names([shifted]) == [("memory.GP201", "write-after-read a.py in f")]
    # Two of one function are two cases.
    assert len(set(names([race, shifted]))) == 2
