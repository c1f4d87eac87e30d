"""Recordings of format 2.0 open, and their reports still have the same figures.

``v2`` has what gpuprobe 0.1.0 recorded of small programs, and next to each the document
``gpuprobe.report`` that it made then: training on the CPU with a list that grows, training
that was killed, training on two ranks (gloo), a simulated GPU with hazards, and one that ran out of
memory. The recordings were written in format 1.0 and converted. Names of the machine were replaced.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import gpuprobe
from gpuprobe.recording.summary import summarize
from gpuprobe.reporters.json.schemas import schema
from gpuprobe.reporters.sections.report import report_sections
from gpuprobe.reporters.terminal import Style
from gpuprobe.reporters.text import draw

FOLDER = Path(__file__).parent / "v2"
NAMES = ("cpu", "killed", "oom", "ranks", "virtual")

PROSE = {
    *("text", "evidence", "message", "what", "consequence", "sentences", "why_it_stays"),
    "unavailable",
}
"""Keys whose values are sentences: their wording may change."""


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where ``new`` does not hold what ``old`` does; keys may be added."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = [f"{path}.{key}: gone" for key in old if key not in new]
        for key, value in old.items():
            if key in new and key not in PROSE:
                found += differences(value, new[key], f"{path}.{key}")
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [text for i, (a, b) in pairs for text in differences(a, b, f"{path}[{i}]")]
    return [] if old == new else [f"{path}: {old!r}, now {new!r}"]


@pytest.mark.parametrize("name", NAMES)
def test_the_figures_are_those_of_then(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    old = json.loads(Path(f"{name}.report.json").read_text("utf-8"))
    recording = gpuprobe.load(f"{name}.gpuprobe")
    new = json.loads(json.dumps(gpuprobe.report(recording)))
    jsonschema.validate(new, schema("report-2"))
    growth = []
    if isinstance(old["advice"], list):  # it is not available of a run that was killed
        growth = [advice for advice in old["advice"] if advice["id"] == "growth"]
        old["advice"] = [advice for advice in old["advice"] if advice not in growth]
    assert differences(old, new) == []
    # What was an advice then is a cause now, with the bytes that grew instead of the whole peak's.
    causes = new["causes"] if isinstance(new["causes"], list) else []
    assert [cause["rule"] for cause in causes].count("growth") == len(growth)
    assert list(draw.lines(report_sections(summarize(recording)), Style()))


def test_a_figure_that_changed_is_noticed() -> None:
    old = {"rows": [{"bytes": 1, "text": "a"}], "total": 3}
    assert differences(old, {"rows": [{"bytes": 1, "text": "b", "more": 2}], "total": 3}) == []
    assert differences(old, {"rows": [{"bytes": 2, "text": "a"}], "total": 3}) == [
        ".rows[0].bytes: 1, now 2"
    ]
    assert differences(old, {"rows": [], "total": 3})
    assert differences(old, {"rows": [{"bytes": 1}]}) == [".total: gone", ".rows[0].text: gone"]
