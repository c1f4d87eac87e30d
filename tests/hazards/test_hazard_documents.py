"""Findings as JSON, SARIF and JUnit: each against its schema, of a run that found something."""

from __future__ import annotations

import io
import json
import linecache
import xml.etree.ElementTree as ET
from pathlib import Path
from urllib.parse import unquote, urlsplit

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sarif_schema import SARIF

import gpuprobe
from gpuprobe.hazards.findings.results import Hazards
from gpuprobe.hazards.rules import RULES
from gpuprobe.model.findings import Finding, Fix, Level
from gpuprobe.model.place import Place
from gpuprobe.reporters.ci import annotations, junit, sarif
from gpuprobe.reporters.html import draw as html
from gpuprobe.reporters.json import hazards as hazards_json
from gpuprobe.reporters.json.schemas import schema
from gpuprobe.reporters.sections.hazards import hazard_sections
from gpuprobe.reporters.text import draw

pytestmark = pytest.mark.simulated

PROGRAM = """\
side = torch.cuda.Stream()
x = torch.ones(64, device="cuda")
with torch.cuda.stream(side):
    side.wait_stream(torch.cuda.current_stream())
    y = x * 2
x.add_(1)
torch.cuda.current_stream().wait_stream(side)
torch.cuda.current_stream().wait_stream(side)
x.sum().item()
with gpuprobe.allow_sync("logging"):
    x.max().item()
torch.nonzero(x)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Hazards:
    path = tmp_path_factory.mktemp("my project") / "train ü.py"
    path.write_text(PROGRAM)
    linecache.clearcache()
    with gpuprobe.detect_hazards() as found:
        exec(compile(PROGRAM, str(path), "exec"), {"torch": torch, "gpuprobe": gpuprobe})
    assert {finding.rule for finding in found.findings} == {"GP201", "GP202", "GP220"}
    assert found.redundant
    assert found.self_waits
    return found


def test_sarif_of_a_run(found: Hazards) -> None:
    assert found.races[0].location is not None
    root = str(Path(found.races[0].location.file).parent)
    stream = io.StringIO()
    sarif.write(found.findings, stream, root)
    document = json.loads(stream.getvalue())
    SARIF.validate(document)
    (run,) = document["runs"]
    assert len(run["results"]) == len(found.findings)
    for result, finding in zip(run["results"], found.findings, strict=True):
        rule = run["tool"]["driver"]["rules"][result["ruleIndex"]]
        assert rule["id"] == result["ruleId"] == finding.rule
        where = result["locations"][0]["physicalLocation"]
        assert unquote(where["artifactLocation"]["uri"]) == "train ü.py"
        assert finding.location is not None
        assert where["region"]["startLine"] == finding.location.line
        assert result["partialFingerprints"] == {"gpuprobe/v1": finding.fingerprint}
    titles = {rule.id: rule.title for rule in RULES}
    rules = run["tool"]["driver"]["rules"]
    assert all(rule["shortDescription"]["text"] == titles[rule["id"]] for rule in rules)


@pytest.mark.parametrize("launches", [0, 1])
def test_a_failure_is_reported_in_every_format(launches: int) -> None:
    def program() -> None:
        for _ in range(launches):
            torch.ones(3, device="cuda")
        raise RuntimeError("no such column\nin the table")

    with (
        gpuprobe.virtual_gpu("h100-80gb"),
        pytest.raises(RuntimeError),
        gpuprobe.detect_hazards() as found,
    ):
        program()
    assert found.failed == "RuntimeError: no such column"
    text = io.StringIO()
    draw.write(hazard_sections(found), text)
    assert text.getvalue().startswith("The program failed; ")
    assert "RuntimeError: no such column" in text.getvalue()
    assert "No stream hazards" not in text.getvalue()
    document = hazards_json.document(found)
    jsonschema.Draft202012Validator(schema("hazards-2")).validate(document)
    assert document["failed"] == found.failed
    again = hazard_sections(hazards_json.from_document(document, "x"), full=True)
    assert "RuntimeError: no such column" in "".join(
        str(html.Drawing().section(one)) for one in again
    )
    log = sarif.document(found.findings, failed=found.failed)
    SARIF.validate(log)
    assert log["runs"][0]["invocations"][0]["executionSuccessful"] is False
    here = annotations.Places("/work", "/work")
    stream = io.StringIO()
    annotations.write_github([], stream, here, failed=found.failed)
    expected = "the program failed: RuntimeError: no such column"
    assert stream.getvalue() == f"::error title=gpuprobe program-failed::{expected}\n"
    stream = io.StringIO()
    annotations.write_gitlab([], stream, here, "train.py", failed=found.failed)
    (entry,) = json.loads(stream.getvalue())
    assert (entry["description"], entry["location"]["path"]) == (expected, "train.py")
    stream = io.StringIO()
    junit.write([], stream, suite="hazards", failed=found.failed)
    (suite,) = ET.fromstring(stream.getvalue())
    assert (suite.attrib["tests"], suite.attrib["errors"]) == ("1", "1")
    assert found.failed in suite[0][0].attrib["message"]


places = st.builds(
    Place,
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
    st.integers(-1, 10**6),
    st.text(),
)
any_findings = st.builds(
    Finding,
    rule=st.sampled_from(["GP201", "GP001"]),
    kind=st.sampled_from(["read-after-write", "throttling"]),
    level=st.sampled_from(list(Level)),
    message=st.text(min_size=1),
    location=st.none() | places,
    related=st.lists(places, max_size=2).map(tuple),
    fix=st.none() | st.builds(Fix, st.text(), st.text()),
    subject=st.text(),
)


@given(st.lists(any_findings, max_size=4))
def test_any_findings_make_valid_sarif(findings: list[Finding]) -> None:
    document = sarif.document(findings, "/a")
    SARIF.validate(document)
    assert json.loads(json.dumps(document)) == document
    for result, finding in zip(document["runs"][0]["results"], findings, strict=True):
        for shown in result["locations"]:
            uri = shown["physicalLocation"]["artifactLocation"]["uri"]
            assert urlsplit(uri).scheme in ("", "file")
            if finding.location is None:  # code scanning refuses a file with a result without one
                assert (uri, shown["physicalLocation"]["region"]["startLine"]) == (".", 1)


def test_json_of_a_run(found: Hazards) -> None:
    validator = jsonschema.Draft202012Validator(schema("hazards-2"))
    document = json.loads(json.dumps(hazards_json.document(found)))
    validator.validate(document)
    assert document["version"] == list(hazards_json.DOCUMENT.version)
    assert [row["fingerprint"] for row in document["findings"]] == [
        finding.fingerprint for finding in found.findings
    ]
    assert document["self_waits"][0]["line"] == 4
    assert document["redundant_waits"] == [
        {"location": {**document["self_waits"][0], "line": 8}, "count": 1}
    ]
    validator.validate(hazards_json.document(Hazards()))
    document["findings"][0]["kind"] = "something"
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(document)


def test_junit_of_a_run(found: Hazards) -> None:
    stream = io.StringIO()
    junit.write(found.races[1:], stream, suite="hazards", passed=["\x1b"])
    (suite,) = ET.fromstring(stream.getvalue())
    assert suite.attrib["tests"] == str(len(found.races)) == str(len(suite))
    assert suite.attrib["failures"] == str(len(suite.findall("testcase/failure")))
