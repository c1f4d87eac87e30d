"""Launches of steps: recorded, added up, and shown in every format."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import report_builders as build
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.analysis.launches import BY, NATIVE_ONLY, launch_count, launches_of, mergeable, summed
from gpuprobe.api.views import write_perfetto
from gpuprobe.errors import DataError
from gpuprobe.model.memory import Category
from gpuprobe.model.run.launches import (
    Launched,
    LaunchedKernel,
    LaunchKind,
    LaunchPlace,
    LaunchReport,
    StepLaunches,
    check_launches,
    joined,
    rows_of,
    step_launches,
)
from gpuprobe.model.run.recording import SCHEMA_VERSION, Recording
from gpuprobe.model.run.session import Step
from gpuprobe.model.values import Unavailable
from gpuprobe.recording.reader import read_recording
from gpuprobe.recording.summary import summarize
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.reporters.json import report as report_json
from gpuprobe.reporters.json.schemas import schema
from gpuprobe.reporters.sections.report import report_sections
from gpuprobe.reporters.text import draw

ADD = "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>"


def kernel(name: str = ADD, blocks: int = 1, **more: Any) -> LaunchedKernel:
    return LaunchedKernel(name, grid=(blocks, 1, 1), block=(128, 1, 1), multiprocessors=132, **more)


HERE = LaunchPlace("forward", "train.py:7 in step", "Model.a")
THERE = LaunchPlace("backward", "train.py:9 in step", "Model.b")
OPTIMIZER = LaunchPlace("optimizer", "train.py:10 in step")
LIBRARY = LaunchedKernel("cublasSgemm_v2", LaunchKind.LIBRARY)
COLLECTIVE = LaunchedKernel("ncclAllReduce", LaunchKind.COLLECTIVE)
GRAPH = LaunchedKernel("cudaGraphLaunch", LaunchKind.GRAPH, nodes=5)
STEP: list[Launched] = [
    (kernel(), HERE, 3),
    (kernel(blocks=132), HERE, 2),
    (kernel("softmax", blocks=4), THERE, 4),
    (LIBRARY, THERE, 6),
    (COLLECTIVE, THERE, 1),
    (GRAPH, OPTIMIZER, 2),
    (kernel("caught", captured=True), HERE, 7),
]


def steps(*launches: StepLaunches | Unavailable) -> list[Step]:
    return [
        replace(
            build.step(i, {"forward": 1 << 20, "backward": 1 << 20, "optimizer": 1 << 20}),
            launches=one,
        )
        for i, one in enumerate(launches)
    ]


def recorded(some: Iterable[Step], **session: Any) -> Recording:
    made = build.session(**{"device": "cuda:0", **session})
    return Recording("r.gpuprobe", (2, 4), (build.rank_recording(some, (), session=made),))


def report_of(rows: Iterable[Launched]) -> LaunchReport:
    found = launches_of(recorded(steps(step_launches(rows))).ranks[0])
    assert isinstance(found, LaunchReport)
    return found


def text(recording: Recording, *, full: bool = False) -> str:
    stream = io.StringIO()
    draw.write(report_sections(summarize(recording), full=full), stream, full=full)
    return stream.getvalue()


# -- how they are added up


def test_a_report_counts_kinds_and_leaves_out_what_was_captured() -> None:
    found = report_of(STEP)
    assert (found.kernels, found.library, found.collectives, found.graphs) == (9, 6, 1, 2)
    assert found.count == 18
    assert (found.replayed, found.captured) == (10, 7)
    assert (found.tiny, found.multiprocessors) == (7, 132)
    assert found.mergeable == 5


def test_a_kernel_is_tiny_below_one_block_for_each_multiprocessor() -> None:
    assert kernel(blocks=131).tiny
    assert not kernel(blocks=132).tiny
    assert not LaunchedKernel("k", grid=(11, 12, 1), block=(1, 1, 1), multiprocessors=132).tiny
    assert not LIBRARY.tiny  # its configuration is unknown
    assert not LaunchedKernel("k", grid=(1, 1, 1), block=(1, 1, 1)).tiny  # so is the device's


def test_elementwise_kernels_and_reductions_can_be_merged() -> None:
    assert mergeable("reduce_kernel<512, 1, ReduceOp<float>>")
    assert mergeable("elementwise_kernel<128, 2>")
    assert not mergeable("softmax<elementwise_kernel>")
    assert not mergeable("triton_poi_fused_gelu_0")


def test_the_last_whole_step_is_shown() -> None:
    some = steps(step_launches(STEP), step_launches(STEP[:1]), step_launches(STEP[:2]))
    some[2] = replace(some[2], ended_by="end")
    found = launches_of(recorded(some).ranks[0])
    assert isinstance(found, LaunchReport)
    assert (found.step, found.count) == (1, 3)
    assert [(one.step, one.count) for one in found.steps] == [(0, 18), (1, 3), (2, 5)]
    first = launches_of(recorded(some).ranks[0], 0)
    assert isinstance(first, LaunchReport)
    assert (first.step, first.count) == (0, 18)


NAMES = st.sampled_from(["a", "b", "elementwise_kernel<4>", "reduce_kernel<1>"])
KERNELS = st.builds(
    LaunchedKernel,
    name=NAMES,
    kind=st.sampled_from(LaunchKind),
    device=st.sampled_from(["cuda:0", "cuda:1"]),
    grid=st.sampled_from([(), (1, 1, 1), (40, 2, 2), (500, 1, 1)]),
    multiprocessors=st.sampled_from([0, 132]),
    nodes=st.integers(0, 9),
    captured=st.booleans(),
)
PLACES = st.builds(
    LaunchPlace,
    phase=st.sampled_from(["forward", "backward", "forward/a"]),
    place=st.sampled_from(["a.py:1", "a.py:2 in f", "(unknown)"]),
    module=st.sampled_from(["", "Model.a", "Model.b"]),
    decoding=st.booleans(),
)
ROWS = st.lists(st.tuples(KERNELS, PLACES, st.integers(1, 10**6)), max_size=30)


@given(ROWS)
def test_every_table_sums_to_the_launches_of_the_step(rows: Sequence[Launched]) -> None:
    found = report_of(rows)
    launched = sum(count for kernel, _, count in rows if not kernel.captured)
    assert found.count == launched
    assert found.kernels + found.library + found.collectives + found.graphs == launched
    assert found.count + found.captured == sum(count for _, _, count in rows)
    tiny = sum(count for kernel, _, count in rows if kernel.tiny and not kernel.captured)
    for by in BY:
        sums = summed(found.rows, by)
        assert sum(number for _, number, _ in sums) == launched, by
        assert sum(small for _, _, small in sums) == tiny == found.tiny, by
        assert len({name for name, _, _ in sums}) == len(sums)


@given(ROWS, ROWS)
def test_two_parts_of_a_step_are_one(one: Sequence[Launched], two: Sequence[Launched]) -> None:
    whole = joined(step_launches(one), step_launches(two))
    assert isinstance(whole, StepLaunches)
    assert launch_count(whole) == launch_count(step_launches([*one, *two]))
    more = joined(step_launches(one, 3), step_launches(two, 4))
    assert isinstance(more, StepLaunches)
    assert more.decoded == 7
    assert sorted(map(repr, rows_of(whole))) == sorted(
        map(repr, rows_of(step_launches([*two, *one])))
    )
    missing = Unavailable("not counted")
    assert joined(missing, step_launches(one)) == step_launches(one)
    assert joined(step_launches(one), missing) == step_launches(one)


# -- in files


def written(path: Path, *launches: StepLaunches | Unavailable) -> Path:
    writer = RecordingWriter.create(path)
    writer.session(build.session(device="cuda:0"), build.environment())
    for one in steps(*launches):
        writer.step(one)
    writer.close()
    return path


@given(rows=ROWS)
def test_a_recording_holds_the_rows(
    rows: Sequence[Launched], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = written(tmp_path_factory.mktemp("r") / "r.gpuprobe", step_launches(rows, 3))
    (step,) = read_recording(path).ranks[0].steps
    assert step.launches == step_launches(rows, 3)


def test_a_recording_of_before_has_none(tmp_path: Path) -> None:
    path = written(tmp_path / "r.gpuprobe", Unavailable("not counted"))
    stream = path / "rank-00000.jsonl"
    lines = stream.read_text().splitlines()
    assert "launches" not in lines[-1]
    version = json.dumps(SCHEMA_VERSION, separators=(",", ":"))
    stream.write_text("\n".join([lines[0].replace(version, "[2,3]"), *lines[1:]]) + "\n")
    found = read_recording(path)
    assert found.schema_version == (2, 3)
    assert isinstance(found.ranks[0].steps[0].launches, Unavailable)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kernel": [0]},
        {"place": [0, 1, 0]},
        {"kernel": [0, 2]},
        {"place": [0, 9]},
        {"count": [-1, 1]},
        {"kernels": 7},
    ],
)
def test_damaged_launches_are_a_damaged_line(tmp_path: Path, wrong: dict[str, Any]) -> None:
    good = step_launches(STEP[:2])
    path = written(tmp_path / "r.gpuprobe", good, good)
    stream = path / "rank-00000.jsonl"
    *lines, last = stream.read_text().splitlines()
    plain = json.loads(last)
    plain["launches"] |= wrong
    stream.write_text("\n".join([*lines, json.dumps(plain)]) + "\n")
    (rank,) = read_recording(path).ranks
    assert [step.index for step in rank.steps] == [0]
    assert "1 damaged line" in rank.blind_spots[-1].what


def test_columns_that_do_not_belong_together_are_refused() -> None:
    good = step_launches(STEP)
    check_launches(good)
    with pytest.raises(DataError, match="different lengths"):
        check_launches(replace(good, count=good.count[1:]))
    with pytest.raises(DataError, match="not listed"):
        check_launches(replace(good, kernels=good.kernels[1:]))
    with pytest.raises(DataError, match="not listed"):
        check_launches(replace(good, places=()))


# -- in views


def test_the_report_shows_them() -> None:
    made = recorded(steps(step_launches(STEP), step_launches(STEP)))
    assert "Launches in step 1" not in text(made)  # only if asked for
    shown = text(made, full=True)
    assert "Launches in step 1" in shown
    assert "18 launches: 9 kernels, 6 library calls, 1 collective, 2 CUDA graphs" in shown
    assert "by phase: backward 11, forward 5, optimizer 2" in shown
    assert "other traced steps: step 0 18" in shown
    assert "the CUDA graphs replay 10 kernels" in shown
    assert "7 launches captured in a CUDA graph, not counted" in shown
    assert "tiny: 7 of 9 kernels (78%)" in shown
    assert "as one CUDA graph: 1 launch instead of 18" in shown
    assert f"           5     3  {ADD}" in shown
    assert "Model.b" in shown
    assert "train.py:9 in step" in shown
    assert "launches by kernel and configuration:" in shown
    assert "132    128" in shown


DECODE = LaunchPlace("forward", "chat.py:3", "Model.a", decoding=True)
AFTER = LaunchPlace("forward", "chat.py:3", "", decoding=True)
DECODED: list[Launched] = [
    (kernel(), DECODE, 30),
    (kernel(blocks=132), DECODE, 5),
    (LIBRARY, DECODE, 15),
    (kernel("argmax", blocks=4), AFTER, 6),
    (kernel("caught", captured=True), DECODE, 9),
]


def test_the_launches_of_a_decoded_token_have_a_section() -> None:
    shown = text(recorded(steps(step_launches([*STEP, *DECODED], 5))), full=True)
    found = shown[shown.index("Launches per decoded token in step 0") :]
    assert "11.2 launches, 8.2 of them kernels; mean of 5 tokens of every sequence" in found
    assert "tiny: 7.2 of 8.2 kernels (88%)" in found
    assert f"           7     6  {ADD}" in found
    assert "        11.2   7.2  chat.py:3" in found
    assert "          10     6  Model.a" in found
    assert "         1.2   1.2  (no module)" in found
    assert "Model.b" not in found
    assert "74 launches" in shown  # the section of the step has all of them


def test_without_a_token_there_is_no_such_section() -> None:
    assert "per decoded token" not in text(recorded(steps(step_launches(STEP))), full=True)


def test_a_step_that_launches_nothing() -> None:
    assert "  0 launches\n" in text(recorded(steps(step_launches([]))), full=True)


def test_without_counts_one_sentence_gives_the_reason() -> None:
    shown = text(recorded(steps(Unavailable("not counted"))), full=True)
    assert "Launches\n  Launches are counted on simulated GPUs only.\n" in shown
    missing = [
        {"level": "counters"},  # a level without traces
        {"device": "cpu"},
    ]
    for session in missing:
        assert "Launches" not in text(recorded(steps(Unavailable("not counted")), **session))


def test_json_has_every_row() -> None:
    document = report_json.to_document(summarize(recorded(steps(step_launches(STEP)))))
    jsonschema.Draft202012Validator(schema("report-2")).validate(document)
    found = document["launches"]
    assert sum(row["count"] for row in found["rows"] if not row["captured"]) == found["count"] == 18
    (row,) = (row for row in found["rows"] if row["kernel"] == ADD and row["tiny"])
    assert row == {
        "kernel": ADD,
        "kind": "kernel",
        "device": "cuda:0",
        "grid": [1, 1, 1],
        "block": [128, 1, 1],
        "shared": 0,
        "tiny": True,
        "nodes": 0,
        "captured": False,
        "phase": "forward",
        "key": "train.py:7 in step",
        "file": "train.py",
        "line": 7,
        "function": "step",
        "module": "Model.a",
        "decoding": False,
        "count": 3,
    }
    without = report_json.to_document(summarize(recorded(steps(Unavailable("not counted")))))
    jsonschema.Draft202012Validator(schema("report-2")).validate(without)
    assert without["launches"]["unavailable"] == NATIVE_ONLY.reason


def test_perfetto_has_a_slice_for_each_step(tmp_path: Path) -> None:
    (step,) = steps(step_launches(STEP))
    trace = build.trace([("a.py:1", 1, Category.OTHER)])
    rank = build.rank_recording([replace(step, traces=("t",))], (trace,))
    write_perfetto(Recording("r.gpuprobe", (2, 4), (rank,)), tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    (slice_,) = (event for event in events if event.get("cat") == "launches")
    assert slice_["name"] == "step 0: 18 launches"
    assert slice_["args"]["phases"] == {"forward": 5, "backward": 11, "optimizer": 2}
    assert slice_["args"]["kernels"]["cublasSgemm_v2"] == 6
    counted = [e["args"]["launches"] for e in events if e["name"] == "launches by phase"]
    assert counted == [5, 11, 2, 0]
