"""Steps of large recordings: read in columns, the same as if each were decoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report_builders as build
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from gpuprobe.errors import DataError
from gpuprobe.model.io.codec import to_plain
from gpuprobe.model.memory import Category
from gpuprobe.model.run.columns import MISSING, StepColumns
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import AllocatorActivity, Collective, KnownTensors, Step
from gpuprobe.model.values import Bytes, Peak, Unavailable
from gpuprobe.recording.many.shapes import Shape, Shapes
from gpuprobe.recording.many.steps import KEPT_STEPS, LazySteps
from gpuprobe.recording.reader import RecordingTail, read_recording
from gpuprobe.recording.summary import summarize
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.reporters.json.report import to_document

MIB = build.MIB


def a_step(index: int, peak: int = 100, **changes: Any) -> Step:
    made = build.step(index, {"data": MIB, "forward": peak * MIB, "backward": 7}, device="cuda:0")
    calls = (Collective("all_reduce", 1, Bytes(4), 10 + index), Collective("wait", 1, Bytes(0), 5))
    tensors = (KnownTensors("cuda:0", {Category.PARAMETER: Bytes(9)}, Bytes(-3)),)
    return replace(made, **{"collectives": calls, "tensors": tensors, **changes})


def line(step: Step) -> bytes:
    return json.dumps({"type": "step", **to_plain(step)}, separators=(",", ":")).encode()


def written(folder: Path, *ranks: list[Step], extra: bytes = b"") -> Path:
    path = folder / "r.gpuprobe"
    for rank, steps in enumerate(ranks):
        writer = RecordingWriter.create(path, rank=rank, world_size=len(ranks))
        writer.session(
            build.session("counters", "cuda:0", rank=rank, world_size=len(ranks)),
            build.environment(),
        )
        for step in steps:
            writer.step(step)
        writer.close()
        if extra:
            with (path / f"rank-{rank:05d}.jsonl").open("ab") as file:
                file.write(extra)
    return path


def same(columns: StepColumns, other: StepColumns) -> None:
    assert columns.rows == other.rows
    assert (columns.phases, columns.devices) == (other.phases, other.devices)
    for key in {*columns.numbers(), *other.numbers()}:
        assert columns.number(*key) == other.number(*key), key
    for key in {*columns.marks(), *other.marks()}:
        assert columns.mark(*key) == other.mark(*key), key


def both(path: Path) -> tuple[tuple[RankRecording, ...], tuple[RankRecording, ...]]:
    """The ranks read in columns, and decoded: they are the same, and so is their report."""
    lazy, eager = RecordingTail(path, columns=True).poll(), RecordingTail(path).poll()
    for one, two in zip(lazy.ranks, eager.ranks, strict=True):
        assert isinstance(one.steps, LazySteps)
        assert tuple(one.steps) == two.steps
        assert one.steps[-1:] == two.steps[-1:]
        assert one.blind_spots == two.blind_spots
        same(one.columns, two.columns)
    assert to_document(summarize(lazy)) == to_document(summarize(eager))
    return lazy.ranks, eager.ranks


def test_columns_are_those_of_the_steps(tmp_path: Path) -> None:
    steps = [a_step(index, 100 + index % 3) for index in range(40)]
    (first, _), _ = both(written(tmp_path, steps, [a_step(i, 300) for i in range(40)]))
    assert list(first.columns.number("waited_ns")) == [15 + index for index in range(40)]
    assert first.columns.number("allocated_least", "cuda:0")[1] == 101 * MIB


SHAPES: dict[str, Callable[[int], dict[str, Any]]] = {
    "as before": lambda n: {},
    "ended": lambda n: {"ended_by": "end"},
    "no windows": lambda n: {"windows": ()},
    "no phases": lambda n: {"phases": ()},
    "unknown peak": lambda n: {
        "windows": (build.window("cuda:0", Unavailable("no reason"), n),),
    },
    "other device": lambda n: {"windows": (build.window("cuda:1", Peak(n, 2 * n), n),)},
    "two devices": lambda n: {
        "windows": tuple(build.window(f"cuda:{i}", Peak.exactly(n + i), n) for i in (3, 0)),
    },
    "unknown wait": lambda n: {"collectives": (Collective("wait", n, Bytes(n)),)},
    "activity": lambda n: {
        "windows": (
            replace(build.window("cuda:0", Peak(n, n), n), activity=AllocatorActivity(ooms=n)),
        ),
    },
    "long number": lambda n: {"duration_ns": 10**17 + n},
    "zero": lambda n: {"duration_ns": 0},
}


@settings(max_examples=examples(10), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(SHAPES)), st.integers(0, 20), st.integers(1, 10**6)),
        min_size=1,
        max_size=25,
    )
)
def test_any_shapes_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, int, int]]
) -> None:
    """Steps with other keys in between, written again, and out of order."""
    steps = [a_step(index, **SHAPES[shape](n)) for shape, index, n in rows]
    both(written(tmp_path_factory.mktemp("shapes"), steps))


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: good.replace(b'"duration_ns":', b'"duration_ns":0', 1),  # 010: not JSON
        lambda good: good.replace(b'"index":9', b'"index":-9'),
        lambda good: good.replace(b'"index":9', b'"index":9.5'),
        lambda good: good.replace(b'"index":9', b'"index":"9"'),
        lambda good: good.replace(b'"index":9', b'"index":99999999999999999'),
        lambda good: good[:-1],
        lambda good: good + b"}",
        lambda good: good.replace(b"cuda:0", b"cuda:\xff", 1),
    ],
)
def test_a_damaged_line_of_a_known_shape_is_none(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    bad = damage(line(a_step(9)))
    assert bad != line(a_step(9))
    path = written(tmp_path, [a_step(i) for i in range(9)], extra=bad + b"\n\n")
    (rank,), _ = both(path)
    assert len(rank.steps) == 9
    assert any("1 damaged line" in spot.what for spot in rank.blind_spots)


def test_names_of_traces_are_read_and_named_once(tmp_path: Path) -> None:
    names = ("rank-00000.trace-000001.cols",)
    steps = [a_step(i, traces=names if i in (3, 5) else ()) for i in range(8)]
    (rank,), _ = both(written(tmp_path, steps))
    assert [step.index for step in rank.traced_steps()] == [3]
    assert [len(step.traces) for step in rank.steps] == [0, 0, 0, 1, 0, 0, 0, 0]


def test_a_shape_has_the_numbers_that_are_wanted() -> None:
    step = a_step(77)
    shape = Shape.of(line(step))
    matched = shape.match(line(a_step(5, 3)))
    assert matched is not None
    columns = StepColumns()
    shape.append(columns, [matched.groups()])
    same(columns, StepColumns.of([a_step(5, 3)]))
    assert shape.match(line(step).replace(b"forward", b"forwarf")) is None


def test_a_line_with_a_number_that_is_not_whole_has_no_shape() -> None:
    for text in (b'"more":1.5,', b'"more":1e5,', b'"more":[2,3E7],'):
        with pytest.raises(DataError):
            Shape.of(line(a_step(1)).replace(b'"index"', text + b'"index"'))


def test_the_number_of_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuprobe.recording.many.shapes.MAX_SHAPES", 3)
    shapes = Shapes()
    for number in range(6):
        step = replace(a_step(number), ended_by="x" * number)
        for _ in range(2):
            shapes.learn(line(step), step)
    known = [shapes.find(line(replace(a_step(9), ended_by="x" * n))) for n in range(6)]
    assert [found is not None for found in known] == [True] * 3 + [False] * 3


def test_few_steps_are_kept(tmp_path: Path) -> None:
    tail = RecordingTail(written(tmp_path, [a_step(i) for i in range(30)]), columns=True)
    (rank,) = tail.poll().ranks
    list(rank.steps)
    assert len(tail._kept) == 30 < KEPT_STEPS
    assert rank.steps[3] is rank.steps[3]


def test_a_recording_that_is_replaced_meanwhile_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, [a_step(i) for i in range(9)])
    (rank,) = RecordingTail(path, columns=True).poll().ranks
    (path / "rank-00000.jsonl").write_bytes(b"x" * 100_000)
    with pytest.raises(DataError, match=r"rank-00000\.jsonl was changed while it was read"):
        rank.steps[4]


def test_following_reads_on(tmp_path: Path) -> None:
    path = written(tmp_path, [a_step(i) for i in range(5)])
    tail = RecordingTail(path, columns=True)
    assert len(tail.poll().ranks[0].steps) == 5
    with (path / "rank-00000.jsonl").open("ab") as file:
        for index in range(5, 12):
            file.write(line(a_step(index)) + b"\n")
        file.write(line(a_step(12))[:40])
    rank = tail.poll().ranks[0]
    assert [step.index for step in rank.steps] == list(range(12))
    assert rank.truncated


def test_large_recordings_are_read_in_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, [a_step(i) for i in range(5)])
    assert isinstance(read_recording(path).ranks[0].steps, tuple)
    monkeypatch.setattr("gpuprobe.recording.reader.LARGE", 100)
    assert isinstance(read_recording(path).ranks[0].steps, LazySteps)


def test_missing_figures_are_no_zeros() -> None:
    columns = StepColumns.of([a_step(0), replace(a_step(1), windows=(), phases=())])
    assert columns.number("allocated_most", "cuda:0")[1] == MISSING
    assert columns.number("phase", "forward")[1] == MISSING
    assert list(columns.number("never", "")) == [MISSING] * 2
    assert list(columns.mark("window", "cuda:0")) == [1, 0]
