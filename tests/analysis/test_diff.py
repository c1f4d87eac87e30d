"""The diff adds up, and distinguishes moved lines from new ones."""

from __future__ import annotations

import io
import json
from pathlib import Path

import jsonschema
import pytest
from analysis_programs import MIB, Script
from hypothesis import given, settings
from hypothesis import strategies as st
from report_builders import environment, session
from shared_files import shared_snapshots

import gpuprobe
from examples import examples
from gpuprobe.analysis.compare.diff import BY, DiffRow, diff_marks, diff_recordings
from gpuprobe.analysis.compare.matching import match_modules
from gpuprobe.analysis.peak.peaks import HighWater, high_water
from gpuprobe.cli import main
from gpuprobe.model.memory import Category
from gpuprobe.model.run.recording import SCHEMA_VERSION, LoadedTraces, RankRecording, Recording
from gpuprobe.model.run.session import SessionEnd
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.json import diff as diff_json
from gpuprobe.reporters.json.schemas import schema
from gpuprobe.reporters.sections.diff import diff_sections
from gpuprobe.reporters.text import draw

SNAPSHOTS = shared_snapshots()
LINEAR = ("/v/lib/python3.11/site-packages/torch/nn/functional.py", 5, "linear")
RELU = ("/v/lib/python3.11/site-packages/torch/nn/functional.py", 9, "relu")

ROWS = st.lists(
    st.tuples(
        st.integers(1, 10_000),  # size
        st.integers(0, 4),  # file and function
        st.integers(1, 30),  # line
        st.sampled_from(("", "a", "a.b", "a.c", "enc.0", "enc.1", "dec.0", "dec.1")),
        st.sampled_from(tuple(Category)),
        st.booleans(),  # alive before the trace
        st.sampled_from(((), (LINEAR,), (RELU, LINEAR))),
    ),
    max_size=25,
)


def trace_of(rows: list[tuple[int, int, int, str, Category, bool, tuple]]) -> MemoryTrace:  # type: ignore[type-arg]
    script = Script("cpu")
    for size, where, line, module, category, before, inner in rows:
        frame = (f"/home/u/f{where % 2}.py", line, f"g{where}")
        stack = script.stack(*inner, frame) if where < 4 else 0
        make = script.before if before else script.alloc
        make(size, stack=stack, module=module, category=category)
    return script.trace


@settings(max_examples=examples(200), deadline=None)
@given(one=ROWS, two=ROWS)
def test_the_rows_sum_to_the_change_of_the_peak(one: list, two: list) -> None:  # type: ignore[type-arg]
    before, after = high_water(trace_of(one)), high_water(trace_of(two))
    found = diff_marks(before, after)
    assert tuple(found) == BY
    assert isinstance(found.pop("need"), Unavailable)  # these traces have no uses
    for rows in found.values():
        assert not isinstance(rows, Unavailable)
        assert sum(row.before for row in rows) == before.allocated
        assert sum(row.after for row in rows) == after.allocated
        assert sum(row.delta for row in rows) == after.allocated - before.allocated
        assert sum(row.blocks_before for row in rows) == len(before)
        assert sum(row.blocks_after for row in rows) == len(after)
        assert len({row.key for row in rows if row.status != "removed"}) == len(
            [row for row in rows if row.status != "removed"]
        )


@settings(max_examples=examples(100), deadline=None)
@given(rows=ROWS)
def test_a_run_compared_with_itself_has_not_changed(rows: list) -> None:  # type: ignore[type-arg]
    mark = high_water(trace_of(rows))
    for by, found in diff_marks(mark, mark).items():
        if by == "need":
            continue  # see test_needs.py
        assert not isinstance(found, Unavailable)
        assert {row.status for row in found} <= {"same"}


@settings(max_examples=examples(100), deadline=None)
@given(
    lines=st.lists(st.integers(1, 200), min_size=1, max_size=8, unique=True),
    shift=st.integers(1, 50),
    sizes=st.lists(st.integers(1, 9999), min_size=8, max_size=8, unique=True),
)
def test_shifted_lines_are_moved_not_removed_and_added(
    lines: list[int], shift: int, sizes: list[int]
) -> None:
    """Text was added above a function: all of its lines are ``shift`` further down."""
    marks = []
    for by in (0, shift):
        script = Script("cpu")
        for line, size in zip(sorted(lines), sizes, strict=False):
            frame = ("/home/u/m.py", line + by, "forward")
            script.alloc(size, stack=script.stack(LINEAR, frame))
        marks.append(high_water(script.trace))
    rows = diff_marks(*marks)["line"]
    assert {(row.status, row.delta) for row in rows} == {("moved", 0)}
    for row in rows:
        old, new = (int(key.split(":")[1].split()[0]) for key in (row.moved_from, row.key))
        assert new - old == shift


def line_rows(before: dict[int, int], after: dict[int, int]) -> dict[str, DiffRow]:
    marks = []
    for lines in (before, after):
        script = Script("cpu")
        for line, size in lines.items():
            inner = LINEAR if size % 2 else RELU
            script.alloc(size, stack=script.stack(inner, ("/home/u/m.py", line, "forward")))
        marks.append(high_water(script.trace))
    return {row.key.split("/")[-1]: row for row in diff_marks(*marks)["line"]}


def test_a_line_added_in_the_middle_is_the_added_one() -> None:
    rows = line_rows({10: 101, 20: 202, 30: 303}, {10: 101, 15: 999, 21: 202, 31: 305})
    assert rows["m.py:15 in forward"].status == "added"
    assert rows["m.py:21 in forward"].moved_from.endswith("m.py:20 in forward")
    grown = rows["m.py:31 in forward"]
    assert (grown.status, grown.delta) == ("moved", 2)
    assert rows["m.py:10 in forward"].status == "same"


def test_a_removed_line_is_not_paired_with_an_unrelated_added_one() -> None:
    """Two methods with one name, like ``forward`` of two classes: order is no evidence."""
    rows = line_rows({39: 101, 513: 203}, {39: 301, 399: 405})
    assert {key: row.status for key, row in rows.items()} == {
        "m.py:39 in forward": "changed",
        "m.py:513 in forward": "removed",
        "m.py:399 in forward": "added",
    }


def test_a_function_that_was_shifted_and_grew_is_still_the_same() -> None:
    rows = line_rows({10: 101, 20: 203}, {14: 111, 24: 333})
    assert [row.status for row in rows.values()] == ["moved", "moved"]


def marks_of_files(*runs: dict[str, dict[int, int]]) -> list[HighWater]:
    """The high water mark of each run, given as files, their lines, and the bytes of each."""
    marks = []
    for files in runs:
        script = Script("cpu")
        for name, lines in files.items():
            for line, size in lines.items():
                inner = LINEAR if line % 2 else RELU
                frame = (f"/home/u/{name}", line, "forward")
                script.alloc(size, stack=script.stack(inner, frame))
        marks.append(high_water(script.trace))
    return marks


@pytest.mark.parametrize("shift", [0, 6])
def test_a_file_with_another_name_is_the_same_code(shift: int) -> None:
    """A renamed file in which one line grew; ``shift``: its lines are further down as well."""
    before = {"net.py": {3: 100, 7: 200, 9: 300}}
    after = {"model.py": {3 + shift: 100, 7 + shift: 200, 9 + shift: 350}}
    rows = diff_marks(*marks_of_files(before, after))["line"]
    assert {(row.status, row.delta) for row in rows} == {("moved", 0), ("moved", 50)}
    (grown,) = (row for row in rows if row.delta)
    assert grown.key == f"/home/u/model.py:{9 + shift} in forward"


def test_unrelated_files_are_not_renamed_ones() -> None:
    before = {"net.py": {3: 100, 7: 200, 9: 300}, "gone.py": {5: 40}}
    # Another file; two that are as much like the one that went; one line with another size.
    after = {"model.py": {1: 11, 20: 22, 9: 33}, "a.py": {5: 41}}
    rows = diff_marks(*marks_of_files(before, after))["line"]
    assert {row.status for row in rows} == {"added", "removed"}
    twins = {"a.py": before["net.py"], "b.py": before["net.py"]}
    rows = diff_marks(*marks_of_files(before, twins))["line"]
    assert {row.status for row in rows} == {"added", "removed"}


def test_another_checkout_is_the_same_code() -> None:
    marks = []
    for root in ("/home/a/proj", "/builds/7/proj"):
        script = Script("cpu")
        for name in ("x.py", "pkg/x.py"):
            script.alloc(10 * len(name), stack=script.stack((f"{root}/{name}", 3, "f")))
        marks.append(high_water(script.trace))
    rows = diff_marks(*marks)["line"]
    assert [row.status for row in rows] == ["moved", "moved"]
    assert all(row.key.split("proj")[1] == row.moved_from.split("proj")[1] for row in rows)


def test_a_renamed_function_is_found_by_its_shape_and_bytes() -> None:
    marks = []
    for name in ("forward", "forward_fast"):
        script = Script("cpu")
        script.alloc(77, stack=script.stack(LINEAR, ("/home/u/m.py", 5, name)))
        marks.append(high_water(script.trace))
    (row,) = diff_marks(*marks)["line"]
    assert (row.status, row.delta) == ("moved", 0)


def test_renamed_modules_with_the_same_structure_are_pairs() -> None:
    before = {"encoder": 1, "encoder.0.attn": 5, "encoder.1.attn": 5, "head": 9, "old": 3}
    after = {"backbone": 1, "backbone.0.attn": 7, "backbone.1.attn": 5, "head": 8, "x.new": 3}
    assert match_modules(before, after) == {
        "encoder": "backbone",
        "encoder.0.attn": "backbone.0.attn",
        "encoder.1.attn": "backbone.1.attn",
        "head": "head",
    }


def test_a_removed_module_is_not_paired_with_one_of_another_shape() -> None:
    assert match_modules({"a.x": 1, "a.y": 1}, {"b.x": 1}) == {}
    # Two candidates, told apart by their bytes.
    assert match_modules({"a": 5, "b": 6}, {"c": 6, "d": 5}) == {"a": "d", "b": "c"}
    assert match_modules({"a": 5, "b": 6}, {"c": 1, "d": 2}) == {}
    deep = ".".join("m" * 100_000)
    assert match_modules({deep: 1}, {deep + ".n": 1}) == {}


def recording(*traces: MemoryTrace, path: str = "r", level: str = "trace", device: str = "cpu",
              ended: bool = True) -> Recording:  # fmt: skip
    rank = RankRecording(
        session(level, device),
        environment(),
        end=SessionEnd(1) if ended else None,
        traces=LoadedTraces(lambda: iter(traces)),
    )
    return Recording(path, SCHEMA_VERSION, (rank,))


def test_the_baseline_is_part_of_the_comparison() -> None:
    """20 bytes more in the trace, 100 more before it: all 120 are explained."""
    marks = []
    for old, new in ((100, 30), (200, 50)):
        script = Script("cpu")
        script.before(old, stack=script.stack(("/home/u/m.py", 1, "build")))
        script.alloc(new, stack=script.stack(("/home/u/m.py", 9, "forward")))
        marks.append(script.trace)
    found = diff_recordings(recording(marks[0]), recording(marks[1]))
    (peak,) = found.peaks
    assert peak.delta == 120
    rows = peak.rows["line"]
    assert not isinstance(rows, Unavailable)
    assert {row.key.split(":")[1]: row.delta for row in rows} == {
        "1 in build": 100,
        "9 in forward": 20,
    }
    assert found.cautions == ()


def test_an_inexact_comparison_has_cautions() -> None:
    one, two = Script("cpu"), Script("cuda:0")
    one.alloc(100)
    two.alloc(512)
    found = diff_recordings(
        recording(one.trace),
        recording(two.trace, level="counters", device="cuda:0", ended=False),
    )
    text = "\n".join(found.cautions)
    assert "different devices: cpu and cuda:0" in text
    assert "different levels: trace and counters" in text
    assert "is not closed" in text
    assert found.peaks[0].device == "cpu -> cuda:0"
    assert found.peaks[0].delta == 412


def test_a_device_in_one_recording_only_hides_no_other() -> None:
    one, two = Script("cuda:0"), Script("cuda:1")
    one.alloc(100)
    two.alloc(50)
    both = recording(one.trace, two.trace, device="cuda:0")
    found = diff_recordings(both, recording(one.trace, device="cuda:0"))
    assert [peak.device for peak in found.peaks] == ["cuda:0", "cuda:1"]
    assert found.peaks[0].delta == 0
    assert isinstance(found.peaks[1].delta, Unavailable)
    assert isinstance(found.peaks[1].rows["line"], Unavailable)
    assert "rank 0, cuda:1: only in the first recording" in found.cautions
    text = io.StringIO()
    draw.write(diff_sections(found), text)
    assert "change unknown" in text.getvalue()
    document = json.loads(json.dumps(diff_json.document(found)))
    jsonschema.Draft202012Validator.check_schema(schema("diff-2"))
    jsonschema.validate(document, schema("diff-2"))
    assert "unavailable" in document["peaks"][1]["rows"]["line"]
    assert document["peaks"][0]["delta"] == 0


def test_the_text_shows_control_characters_and_drops_no_bytes() -> None:
    marks = []
    for extra in (0, MIB):
        script = Script("cpu")
        for line in range(1, 30):
            frame = ("/home/u/\x1b[31mm.py", line, "f")
            script.alloc(line * 1000 + extra, stack=script.stack(frame))
        marks.append(script.trace)
    found = diff_recordings(recording(marks[0]), recording(marks[1]))
    stream = io.StringIO()
    draw.write(diff_sections(found, ("line",), top=3), stream)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "(26 more)" in text
    assert "+29.0 MiB" in text.splitlines()[-1]
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.skipif(not SNAPSHOTS, reason="the shared snapshots are not on this machine")
def test_the_command_on_two_real_snapshots(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before, after = (str(path) for path in SNAPSHOTS[:2])
    assert main(["diff", before, after, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["version"]) == ("gpuprobe.diff", [2, 4])
    jsonschema.validate(document, schema("diff-2"))
    (peak,) = document["peaks"]
    assert peak["delta"] == peak["after"]["at_least"] - peak["before"]["at_least"]
    for by in BY[:-1]:  # a snapshot has no uses of memory
        assert sum(row["delta"] for row in peak["rows"][by]) == peak["delta"]
    assert main(["diff", before, after, "--by", "category"]) == 0
    text = capsys.readouterr().out
    assert "By category" in text
    assert "By line" not in text
    found = gpuprobe.diff(before, after)
    assert found.peaks[0].delta == peak["delta"]
    assert main(["diff", before, str(tmp_path / "none")]) == 2
    assert "no such file" in capsys.readouterr().err
