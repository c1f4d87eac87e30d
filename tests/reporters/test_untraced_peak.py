"""A peak in a step without a trace: what compares and draws has the highest step that has one."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import jsonschema
from report_builders import by_names, recording, step, trace

from gpuprobe import report
from gpuprobe.analysis.compare.diff import diff_recordings
from gpuprobe.errors import DataError
from gpuprobe.model.memory import Category
from gpuprobe.model.plans.estimate import Estimate, EstimateShare
from gpuprobe.model.run.recording import Recording
from gpuprobe.model.run.session import KnownTensors
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Bytes, Unavailable
from gpuprobe.recording.chunks import RankTraces
from gpuprobe.recording.summary import summarize
from gpuprobe.reporters.html import report as html_compare
from gpuprobe.reporters.json import diff as diff_json
from gpuprobe.reporters.json.schemas import schema
from gpuprobe.reporters.sections.diff import diff_sections
from gpuprobe.reporters.sections.plans import estimate_sections
from gpuprobe.reporters.sections.report import report_sections
from gpuprobe.reporters.terminal import Style
from gpuprobe.reporters.text import draw


def run(sizes: tuple[int, ...], *traced: int) -> Recording:
    steps = [step(index, {"forward": size}) for index, size in enumerate(sizes)]
    made = [
        trace([("/home/u/project/a.py:7", sizes[i], Category.ACTIVATION)], step=i) for i in traced
    ]
    return recording(steps, made)


def test_the_rows_of_a_diff_say_which_moments_they_compare() -> None:
    found = diff_recordings(run((60, 100, 102), 0, 1), run((70, 170), 0, 1))
    (peak,) = found.peaks
    assert peak.delta == 68  # of the peaks themselves
    rows = peak.rows["line"]
    assert not isinstance(rows, Unavailable)
    assert sum(row.delta for row in rows) == 70  # of the moments
    text = io.StringIO()
    draw.write(diff_sections(found), text)
    words = " ".join(text.getvalue().split())
    assert "step 1 (100 B, 2 B below its peak) with step 1 (170 B, its peak)" in words
    assert "add up to +70 B" in words
    document = json.loads(json.dumps(diff_json.document(found)))
    jsonschema.validate(document, schema("diff-2"))
    (compared,) = [one["compared"] for one in document["peaks"]]
    assert compared["before"] == {"step": 1, "allocated": 100, "below_peak": 2}
    assert compared["after"] == {"step": 1, "allocated": 170, "below_peak": 0}
    page = io.StringIO()
    html_compare.write_diff(found, page)
    assert "the rows compare step 1 (100 B, 2 B below its peak)" in page.getvalue()


def test_a_diff_of_traced_peaks_needs_no_such_words() -> None:
    found = diff_recordings(run((60, 100), 1), run((70, 170), 1))
    assert found.peaks[0].compared is None
    document = json.loads(json.dumps(diff_json.document(found)))
    jsonschema.validate(document, schema("diff-2"))
    assert document["peaks"][0]["compared"] is None


def test_a_diff_without_a_trace_on_one_side_has_no_rows() -> None:
    found = diff_recordings(run((60, 100), 1), run((70, 170)))
    assert found.peaks[0].compared is None
    assert isinstance(found.peaks[0].rows["line"], Unavailable)


def test_a_trace_of_a_part_of_the_step_is_not_the_peak() -> None:
    """Two trainings in one script: the second's first step is found to belong to the first's
    last one, whose trace was made before.
    """
    made = run((60, 500), 0, 1)
    half = trace([("/home/u/project/a.py:7", 50, Category.ACTIVATION)], step=1)
    found = recording([step(0, {"forward": 60}), step(1, {"forward": 500})], [half])
    assert report(made)["peak"]["traced"] == 500
    document = report(found)
    assert "does not include the peak" in document["peak"]["traced"]["unavailable"]
    assert document["peak"]["nearest_trace"] == {"step": 1, "below_peak": 450}
    assert document["categories"]["at"] == "nearest_trace"
    shown = " ".join(draw.lines(report_sections(summarize(found)), Style()))
    assert "at the peak" not in shown.split("Categories")[1].split("Steps")[0]
    # Another step's trace may hold more than what there is of the peak's.
    higher = trace([("/home/u/project/a.py:7", 60, Category.ACTIVATION)], step=0)
    found = recording([step(0, {"forward": 60}), step(1, {"forward": 500})], [higher, half])
    assert report(found)["peak"]["nearest_trace"] == {"step": 0, "below_peak": 440}


def test_what_no_named_tensor_explains_is_the_most_if_it_is() -> None:
    for rest, words in ((900, "the most: 900 B that no named tensor explains"), (10, "parameter")):
        tensors = KnownTensors("cpu", {Category.PARAMETER: Bytes(100)}, Bytes(rest))
        found = recording([step(0, {"forward": 1000}, tensors=(tensors,))])
        shown = " ".join(draw.lines(report_sections(summarize(found)), Style()))
        assert words in " ".join(shown.split("fix")[0].split())


def test_a_damaged_trace_is_named_and_the_next_one_is_shown() -> None:
    found = run((60, 70, 100, 102), 0, 1, 2)
    (rank,) = found.ranks
    assert isinstance(rank.traces, RankTraces)
    load = rank.traces.load

    def damaged(name: str) -> MemoryTrace:
        if name.startswith("2/"):
            raise DataError("rank-00000.trace-000002.cols is damaged")
        return load(name)

    rank.traces = by_names(damaged, rank.steps)
    document = report(found)
    assert document["peak"]["nearest_trace"] == {"step": 1, "below_peak": 32}
    (spot,) = document["blind_spots"]
    assert spot["what"] == "the trace of step 2: rank-00000.trace-000002.cols is damaged"


def test_the_tables_of_an_estimate_say_when_they_are_not_of_the_peak() -> None:
    share = (EstimateShare("activation", Bytes(100)),)
    found = estimate(130, by_category=share, by_module=share, by_line=share)
    assert "Categories at the peak" in titles(found)
    below = replace(found, attributed=Bytes(100))
    assert "Lines at the highest traced instant, 30 B below the peak" in titles(below)
    assert not any(title.endswith("at the peak") for title in titles(below))


def test_the_modules_of_equal_layers_are_one_row_of_an_estimate() -> None:
    modules = [EstimateShare(f"GPT.h.{i}.mlp", Bytes(2)) for i in range(48)]
    found = estimate(100, by_module=(EstimateShare("GPT.head", Bytes(4)), *modules))
    text = "\n".join(draw.lines(estimate_sections(found), Style()))
    rows = text.partition("Modules at the peak\n")[2].splitlines()[:3]
    assert [" ".join(row.split()) for row in rows] == [
        "96 B 96.0% GPT.h.*.mlp ×48",
        "4 B 4.0% GPT.head",
        "100 B total",
    ]
    short = "\n".join(draw.lines(estimate_sections(found, top=1), Style()))
    assert "4 B   4.0%  (1 more)" in short


_SIZES = (
    "peak_allocated",
    "peak_reserved",
    "reserved_low",
    "reserved_high",
    "context_low",
    "context_high",
    "capacity",
)


def estimate(size: int, **shares: tuple[EstimateShare, ...]) -> Estimate:
    """An estimate in which all amounts are ``size``, with these tables."""
    return Estimate(
        gpu="t4",
        devices=1,
        steps=3,
        verdict="fits",
        attributed=Bytes(size),
        assumed=(),
        not_modelled=(),
        **{name: Bytes(size) for name in _SIZES},
        **{"by_category": (), "by_module": (), "by_line": (), **shares},
    )


def titles(found: Estimate) -> list[str]:
    return [section.title for section in estimate_sections(found)]
