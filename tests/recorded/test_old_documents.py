"""Files of version 2.0 are still read, and pre-release ones of version 1 are refused.

Next to the recordings of `test_old_recordings`, ``v2`` has what gpuprobe 0.1.0 wrote for two small
scripts on a simulated GPU and for a fake fleet: findings, baselines, a hazards document, readings
of ``top``. They were written as version 1 and converted. Names of the machine were replaced.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gpuprobe.analysis.baseline.text import loads as load_baseline
from gpuprobe.errors import DataError, UnsupportedSchema
from gpuprobe.hazards.findings.results import Hazards
from gpuprobe.model.findings import Finding, Fix, Level
from gpuprobe.model.io.codec import from_plain, to_plain
from gpuprobe.model.place import Place
from gpuprobe.recording.monitor_log import read_moments
from gpuprobe.recording.reader import read_recording
from gpuprobe.reporters.json.hazards import from_document

FILES = Path(__file__).parent / "v2"


def hazards_of(path: Path) -> Hazards:
    return from_document(json.loads(path.read_text(encoding="utf-8")), str(path))


def test_a_recording_with_findings() -> None:
    recording = read_recording(FILES / "race.gpuprobe")
    assert recording.schema_version == (2, 0)
    (rank,) = recording.ranks
    assert (len(rank.steps), rank.truncated, rank.end is not None) == (2, False, True)
    assert rank.blind_spots == ()
    assert [finding.rule for finding in rank.findings] == ["GP201"] * 3 + ["GP204"]
    first = rank.findings[0]
    assert first == Finding(
        "GP201",
        "read-after-write",
        Level.ERROR,
        first.message,
        (
            ("first", "write by ones of [2, 4] on the default stream at /home/user/race.py:6"),
            ("second", "read by mul of [2, 4] on stream 1 at /home/user/race.py:8"),
            ("fix verified", "yes: the log with this edge has no such race"),
        ),
        Place("/home/user/race.py", 8, "<module>"),
        (Place("/home/user/race.py", 6, "<module>"),),
        Fix(
            "make the reading stream wait for the writing one before it reads.",
            "side.wait_stream(torch.cuda.default_stream())  # side: stream 1",
        ),
        subject="ones -> mul",
        fingerprint="198ed35791bdb53a",
    )


def test_findings_survive_the_way_through_a_document() -> None:
    (rank,) = read_recording(FILES / "race.gpuprobe").ranks
    for finding in rank.findings:
        plain = to_plain(finding)
        assert all(set(item) == {"name", "value"} for item in plain["evidence"])
        assert from_plain(Finding, plain) == finding
        pairs = {**plain, "evidence": [[item["name"], item["value"]] for item in plain["evidence"]]}
        with pytest.raises(DataError):  # as version 1 had them
            from_plain(Finding, pairs)


def test_version_1_of_a_document_is_refused(tmp_path: Path) -> None:
    def older(name: str) -> Path:
        text = (FILES / name).read_text(encoding="utf-8")
        path = tmp_path / Path(name).name
        path.write_text(re.sub(r"(\"version\": ?\[\s*)2", r"\g<1>1", text, count=1), "utf-8")
        return path

    refused = pytest.raises(UnsupportedSchema, match=r"version 1\.0 was written by a pre-release")
    with refused:
        load_baseline(older("baseline.json").read_text())
    with refused:
        list(read_moments(older("readings.jsonl")))
    with refused:
        hazards_of(older("hazards.json"))
    older("race.gpuprobe/rank-00000.jsonl")
    with refused:
        read_recording(tmp_path)


def test_baselines() -> None:
    baseline = load_baseline((FILES / "baseline.json").read_text())
    assert baseline.metrics["peak_allocated"] == 67112448
    assert baseline.phases["phase backward"] == 67112448
    assert set(baseline.tolerances or {}) == {"peak_allocated"}
    assert baseline.accounts["reserved"].total == 69206016


def test_a_log_of_readings() -> None:
    moments = list(read_moments(FILES / "readings.jsonl"))
    assert [len(moment.inventory.devices) for moment in moments] == [4, 4]
    assert moments[0].inventory.driver.version.value == "535.161.08"


def test_a_hazards_document() -> None:
    found = hazards_of(FILES / "hazards.json")
    (rank,) = read_recording(FILES / "race.gpuprobe").ranks
    assert [finding.fingerprint for finding in found.findings] == [
        row["fingerprint"] for row in json.loads((FILES / "hazards.json").read_text())["findings"]
    ]
    assert {finding.message for finding in found.findings} == {
        finding.message for finding in rank.findings
    }


def test_a_hazards_document_of_a_newer_major_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hazards.json"
    document = json.loads((FILES / "hazards.json").read_text())
    path.write_text(json.dumps({**document, "version": [3, 0]}))
    with pytest.raises(UnsupportedSchema, match=r"hazards\.json: version 3\.0 is newer"):
        hazards_of(path)
    path.write_text(json.dumps({**document, "operations": "many"}))
    with pytest.raises(DataError, match=r"hazards\.json: operations: expected an integer"):
        hazards_of(path)
