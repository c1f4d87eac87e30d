"""SARIF, JUnit and Markdown against what other programs read of them.

SARIF is checked with its JSON Schema (see ``README.md`` here), JUnit with what Jenkins' schema
allows (``junit-10.xsd`` of its xUnit plugin), Markdown with a parser of CommonMark and tables.
"""

from __future__ import annotations

import copy
import io
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from sarif_schema import SARIF

import gpuprobe.analysis.baseline.check  # noqa: F401 (it defines the rules)
from examples import examples
from gpuprobe.analysis.baseline.model import METRICS, CheckResult, MetricResult, Setting
from gpuprobe.analysis.compare.causes import Cause
from gpuprobe.analysis.compare.diff import DiffRow
from gpuprobe.model.findings import Finding, Fix, Level
from gpuprobe.model.place import Place
from gpuprobe.reporters import markdown
from gpuprobe.reporters.ci import junit, sarif
from gpuprobe.reporters.json import check as check_json
from gpuprobe.reporters.sections.check import run_sections

GITHUBS_SUMMARY = 1 << 20
"""Bytes of a step's job summary (docs.github.com, "Workflow commands", "Adding a job summary")."""

FILES = (
    "train.py",
    "a b/ü:ñ[1].py",
    "/elsewhere/x.py",
    "site-packages/peft/a.py",
    ".../deep/y.py",
    "<string>",
    "\udcff.py",
    "",
)
texts = st.text(min_size=1, max_size=40)
places = st.none() | st.builds(Place, st.sampled_from(FILES), st.integers(0, 9), texts)
diffs = st.sampled_from(("", "--- a/train.py\n+++ b/train.py\n@@ -1,2 +1,3 @@\n x\n+y\n z\n"))
found = st.builds(
    Finding,
    rule=st.sampled_from([f"GPM-{name}" for name in METRICS] + ["GPM-phase-forward", "GP201"]),
    kind=st.sampled_from(("memory-regression", "write-after-read")),
    level=st.sampled_from(Level),
    message=texts,
    location=places,
    related=st.lists(places.filter(bool), max_size=2).map(tuple),
    fix=st.none() | st.builds(Fix, texts, texts, diffs),
    subject=texts,
)


@given(st.lists(found, max_size=4), st.booleans(), texts)
@settings(deadline=None, max_examples=examples(60))
def test_sarif_is_valid(findings: list[Finding], known: bool, failed: str) -> None:
    document = sarif.document(
        findings,
        "/checkout/app",
        failed=failed if known else "",
        elsewhere="memory.json",
        repository="/checkout",
    )
    SARIF.validate(document)
    (run,) = document["runs"]
    for result in run["results"]:  # code scanning refuses the whole file otherwise
        (where,) = result["locations"]
        assert where["physicalLocation"]["artifactLocation"]["uri"]
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]


def test_the_schema_notices_what_is_wrong() -> None:
    finding = Finding("GP201", "race", Level.ERROR, "m", location=Place("a.py", 1))
    good = sarif.document([finding])
    SARIF.validate(good)
    for path, value in (
        (("runs", 0, "results", 0, "level"), "fatal"),
        (("runs", 0, "results", 0, "message"), "text"),
        (("runs", 0, "results", 0, "locations", 0, "physicalLocation", "region"), {"line": 1}),
        (("runs", 0, "tool", "driver", "name"), None),
        (("version",), "2.0.0"),
    ):
        bad: Any = copy.deepcopy(good)
        inner = bad
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            SARIF.validate(bad)


# -- JUnit. Of each element: its attributes, those that are required, and its children.
ELEMENTS: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": ({"name", "time", "tests", "failures", "errors"}, set(), {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors", "group", "time", "skipped", "timestamp"}
        | {"hostname", "id", "package", "file", "log", "url"},
        {"name", "tests", "failures", "errors"},
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
    ),
    "testcase": (
        {"name", "time", "classname", "group"},
        {"name"},
        {"skipped", "error", "failure", "system-out", "system-err"},
    ),
    **{name: ({"type", "message"}, set(), set()) for name in ("failure", "error", "skipped")},
}


def ensure_junit(element: ET.Element) -> None:
    known, required, children = ELEMENTS[element.tag]
    assert set(element.attrib) <= known, element.attrib
    assert required <= set(element.attrib), element.attrib
    for child in element:
        assert child.tag in children, (element.tag, child.tag)
        ensure_junit(child)


def written(findings: Sequence[Finding], **more: Any) -> ET.Element:
    stream = io.BytesIO()
    text = io.TextIOWrapper(stream, encoding="utf-8", write_through=True)
    junit.write(findings, text, suite="memory", **more)
    return ET.fromstring(stream.getvalue())


@given(st.lists(found, max_size=5), st.lists(texts, max_size=3), st.text(max_size=9))
@settings(deadline=None, max_examples=examples(60))
def test_junit_is_valid(findings: list[Finding], passed: list[str], failed: str) -> None:
    root = written(findings, passed=passed, failed=failed)
    assert root.tag == "testsuites"
    ensure_junit(root)
    (suite,) = root
    assert int(suite.attrib["tests"]) == len(suite)
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert int(suite.attrib[name]) == len(suite.findall(f"testcase/{tag}"))
    cases = [(case.get("classname"), case.get("name")) for case in suite]
    measured = cases[bool(failed) + len(passed) :]
    assert len(set(measured)) == len(measured)  # services tell cases apart by these


# -- Markdown


def result(names: Sequence[str], rows: int = 3, run: str = "") -> CheckResult:
    """A check of hostile names: of files, metrics, settings."""
    changed = tuple(
        DiffRow(f"{name}:{number} in f", 0, number, 0, 1, "added")
        for number in range(1, rows + 1)
        for name in names
    )
    metrics = tuple(
        MetricResult(name, "bytes", 1, 900, 2, "1%", "default", f"+899 B at {name}:1 in f",
                     f"{name}:1 in f", (Cause(f"+899 B at {name}:1 in f", f"{name}:1 in f"),),
                     changed)
        for name in ("peak_allocated", *names)
    )  # fmt: skip
    tables = {"line": changed, "category": changed, "module": changed}
    setting = (Setting("run", name, "default") for name in names)
    return CheckResult(
        metrics, metrics, tables, metrics[0].cause, tuple(names[:1]), tuple(names), tuple(setting),
        run,
    )  # fmt: skip


def drawn(*results: CheckResult) -> str:
    stream = io.StringIO()
    markdown.write(run_sections(*results, summary=True), stream)
    return stream.getvalue()


HOSTILE = (
    "a|b.py",
    "`x`.py",
    "<img src=x>.py",
    "[a](http://x).py",
    "# h.py",
    "a\nb.py",
    "*b*_c_.py",
)


@given(st.lists(st.sampled_from(HOSTILE) | texts, min_size=1, max_size=4))
@settings(deadline=None, max_examples=examples(40))
def test_markdown_has_the_tables_and_no_markup_of_others(names: list[str]) -> None:
    tokens = MarkdownIt("commonmark").enable("table").parse(drawn(result(names)))
    kinds = [token.type for token in tokens]
    inner = [child for token in tokens for child in token.children or ()]
    # An empty comment keeps names apart that would be links or mentions together.
    markup = [t.content for t in (*tokens, *inner) if t.type.startswith("html")]
    assert set(markup) <= {"<!-- -->"}
    assert not [token for token in inner if token.type in ("link_open", "image", "em_open")]
    assert kinds.count("heading_open") == 4  # the result, phases, lines, what to do
    # Metrics, phases, and what changed by lines; each row has as many cells as its head.
    assert kinds.count("table_open") == 3
    width, columns = 0, 0
    for token in tokens:
        if token.type == "table_open":
            columns = 0
        elif token.type == "tr_open":
            width = 0
        elif token.type in ("th_open", "td_open"):
            width += 1
        elif token.type == "tr_close":
            assert columns in (0, width)
            columns = width


def test_a_summary_is_bounded() -> None:
    names = [f"{'deep/' * 40}{number}.py" for number in range(20)]
    one = drawn(result(names, rows=2000))
    assert len(one) * 10 < GITHUBS_SUMMARY
    several = [replace(result(names, rows=200), run=f"run-{n}") for n in range(8)]
    assert len(drawn(*several)) < GITHUBS_SUMMARY


def test_several_runs_have_names_of_their_own_everywhere() -> None:
    one, two = (result(["a.py"], run=name) for name in ("train", "evaluate"))
    findings = check_json.findings(one, two)
    SARIF.validate(sarif.document(findings))
    root = written(findings, passed=check_json.passed(one, two))
    ensure_junit(root)
    names = [case.attrib["name"] for case in root[0]]
    assert "train: peak_allocated" in names
    assert "evaluate: peak_allocated" in names
    assert len(set(names)) == len(names)
