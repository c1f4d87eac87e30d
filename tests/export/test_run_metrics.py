"""Totals of recordings that are followed, and the metrics made of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_strategies import values_of
from prometheus_client.parser import text_string_to_metric_families

from examples import examples
from gpuprobe.api.live import facts_of_ranks
from gpuprobe.api.recordings import load, report
from gpuprobe.errors import NotARecording
from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.memory import AllocatorCounts, Category
from gpuprobe.model.run.session import (
    AllocatorActivity,
    Collective,
    DeviceWindow,
    Environment,
    HostWindow,
    KnownTensors,
    Phase,
    Session,
    SessionEnd,
    Step,
)
from gpuprobe.model.run.totals import RankTotals
from gpuprobe.model.values import Bytes, Peak, Unavailable
from gpuprobe.recording.reader import read_recording
from gpuprobe.recording.totals import MAX_NAMES, RankSum, TotalsTail
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.reporters.metrics.gpu import GPU_METRICS
from gpuprobe.reporters.metrics.prometheus import render
from gpuprobe.reporters.metrics.run import (
    RUN_METRICS,
    STATES,
    RunReading,
    run_families,
    run_name,
)

ENVIRONMENT = Environment("0.1", "3.11", "Linux", "host", torch="2.13.0")
MUCH = 1 << 40

sizes = st.integers(0, 1 << 40).map(Bytes)
peaks = st.tuples(sizes, sizes).map(lambda pair: Peak(min(pair), max(pair)))
missing = st.just(Unavailable("not read"))
counts = st.integers(0, 9)
windows = st.builds(
    DeviceWindow,
    device=st.sampled_from(["cuda:0", "cuda:1", "cpu"]),
    start=st.just(AllocatorCounts()),
    end=st.builds(AllocatorCounts, allocated=sizes | missing, reserved=sizes | missing),
    peak_allocated=peaks | missing,
    peak_reserved=peaks | missing,
    activity=st.builds(AllocatorActivity, counts, counts, counts, counts) | missing,
)
steps = st.builds(
    Step,
    index=st.just(0),
    start_ns=st.integers(0, 1 << 60),
    duration_ns=st.integers(0, 1 << 50),
    phases=st.lists(
        st.builds(
            Phase,
            st.sampled_from(["forward", "backward", "forward/attention"]),
            st.just(0),
            st.integers(0, 1 << 50),
            st.just(1),
        ),
        max_size=3,
    ).map(tuple),
    windows=st.lists(windows, max_size=3, unique_by=lambda w: w.device).map(tuple),
    host=st.builds(HostWindow, rss_peak=peaks | missing),
    collectives=st.lists(
        st.builds(
            Collective, st.sampled_from(["all_reduce", "wait"]), counts, sizes, sizes | missing
        ),
        max_size=2,
    ).map(tuple),
    ended_by=st.sampled_from(["optimizer", "user", "end"]),
)


def session(rank: int = 0, world_size: int = 1) -> Session:
    return Session(
        1700000000.5, os.getpid(), ("train.py",), "counters", ("cuda:0",), "/", rank, 0, world_size
    )


OPEN: list[RecordingWriter] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No recording stays open: the dashboards of other tests would find it."""
    yield
    while OPEN:
        OPEN.pop().close()


def begun(path: Path, rank: int = 0, world_size: int = 1) -> RecordingWriter:
    writer = RecordingWriter.create(path, rank=rank, world_size=world_size, force=True)
    OPEN.append(writer)
    writer.session(session(rank, world_size), ENVIRONMENT)
    return writer


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(steps, max_size=6), st.lists(st.integers(0, 2), min_size=6, max_size=6), st.booleans()
)
def test_totals_are_those_of_all_steps(
    tmp_path: Path, made: list[Step], gaps: list[int], ends: bool
) -> None:
    """Followed step by step, or read at once: what the steps that a reader keeps come to."""
    writer = begun(tmp_path / "run.gpuprobe")
    followed = TotalsTail(writer.path)
    index = 0
    for step, gap in zip(made, gaps, strict=False):
        index += gap  # 0: it replaces the one before
        writer.step(_with_index(step, index))
        followed.poll(MUCH)
    if ends:
        writer.end(SessionEnd(5))
    writer.close()
    ((total,), _) = followed.poll(MUCH)
    ((at_once,), _) = TotalsTail(writer.path).poll(MUCH)
    assert total == at_once

    kept = read_recording(writer.path).ranks[0].steps
    full = [step for step in kept if step.ended_by != "end"]
    assert total.steps == len(full)
    assert total.duration_ns == sum(step.duration_ns for step in full)
    assert total.step == (full[-1] if full else None)
    assert total.newest == (kept[-1] if kept else None)
    assert (total.end is not None) == ends
    for name in ("forward", "backward"):
        spent = sum(p.duration_ns for step in kept for p in step.phases if p.path == name)
        assert sum(p.duration_ns for p in total.phases if p.name == name) == spent
    assert "forward/attention" not in {phase.name for phase in total.phases}
    for device in total.devices:
        mine = [w for step in kept for w in step.windows if w.device == device.device]
        known = [w.peak_allocated for w in mine if isinstance(w.peak_allocated, Peak)]
        if known:
            assert isinstance(device.peak_allocated, Peak)
            assert device.peak_allocated.at_least == max(p.at_least for p in known)
            assert device.peak_allocated.at_most == max(p.at_most for p in known)
        else:
            assert isinstance(device.peak_allocated, Unavailable)
        did = [w.activity for w in mine if isinstance(w.activity, AllocatorActivity)]
        if did:
            assert isinstance(device.activity, AllocatorActivity)
            assert device.activity.alloc_retries == sum(a.alloc_retries for a in did)
        else:
            assert isinstance(device.activity, Unavailable)
        of_full = [w for step in full for w in step.windows if w.device == device.device]
        assert device.end == (of_full or mine)[-1].end
        assert device.step_peak_allocated == (of_full or mine)[-1].peak_allocated
    for op in total.collectives:
        calls = [c for step in kept for c in step.collectives if c.op == op.op]
        assert op.count == sum(c.count for c in calls)
        assert op.bytes == sum(c.bytes for c in calls)
        times = [c.host_ns for c in calls if not isinstance(c.host_ns, Unavailable)]
        assert op.host_ns == sum(times) if times else isinstance(op.host_ns, Unavailable)


def _with_index(step: Step, index: int) -> Step:
    from dataclasses import replace

    return replace(step, index=index)


def test_half_a_file_is_said_to_be_half(tmp_path: Path) -> None:
    writer = begun(tmp_path / "run.gpuprobe")
    for index in range(2000):
        writer.step(Step(index, 0, 10, ended_by="x" * 1000))
    tail = TotalsTail(writer.path)
    ranks, read = tail.poll(1)
    assert tail.behind
    assert ranks[0].steps < 2000
    assert 0 < read < 2_000_000
    while tail.behind:
        ranks, _ = tail.poll(1)
    ((totals,), read) = tail.poll(MUCH)
    assert (ranks, read) == ((totals,), 0)
    assert totals.steps == 2000


def test_a_run_that_is_replaced_begins_anew(tmp_path: Path) -> None:
    writer = begun(tmp_path / "run.gpuprobe")
    for index in range(3):
        writer.step(Step(index, 0, 10))
    tail = TotalsTail(writer.path)
    assert tail.poll(MUCH)[0][0].steps == 3
    writer.close()
    again = begun(tmp_path / "run.gpuprobe")
    assert tail.poll(MUCH)[0][0].steps == 0
    again.step(Step(0, 0, 10))
    assert tail.poll(MUCH)[0][0].steps == 1


def test_a_recording_that_goes_away_is_said(tmp_path: Path) -> None:
    writer = begun(tmp_path / "run.gpuprobe")
    tail = TotalsTail(writer.path)
    tail.poll(MUCH)
    (writer.path / "rank-00000.jsonl").unlink()
    with pytest.raises(NotARecording):
        tail.poll(MUCH)
    writer.path.rmdir()
    with pytest.raises(NotARecording):
        tail.poll(MUCH)


def test_names_of_the_program_are_bounded(tmp_path: Path) -> None:
    writer = begun(tmp_path / "run.gpuprobe")
    for index in range(100):
        phases = (Phase(f"phase {index}", 0, 7, 1),)
        calls = (Collective(f"op {index}", 1, Bytes(3), 2),)
        writer.step(Step(index, 0, 7, phases, collectives=calls))
        writer.finding(Finding("GP999", f"kind {index}", Level.NOTE, "m", count=2))
    ((totals,), _) = TotalsTail(writer.path).poll(MUCH)
    assert len(totals.phases) == len(totals.collectives) == len(totals.findings) == MAX_NAMES
    assert sum(phase.duration_ns for phase in totals.phases) == 700
    assert sum(call.count for call in totals.collectives) == 100
    assert sum(found.count for found in totals.findings) == 200
    assert "other" in {phase.name for phase in totals.phases}


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Path]:
    """Two ranks of a job; the second has no step yet."""
    path = tmp_path / "train.gpuprobe"
    first, second = begun(path, 0, 2), begun(path, 1, 2)
    window = DeviceWindow(
        "cuda:0",
        AllocatorCounts(),
        AllocatorCounts(allocated=Bytes(100), reserved=Bytes(200)),
        Peak(150, 180),
        Unavailable("not read"),
        AllocatorActivity(4, 1, 2, 0),
    )
    tensors = KnownTensors("cuda:0", {Category.PARAMETER: Bytes(60), Category.GRADIENT: Bytes(30)})
    for index in range(2):
        first.step(
            Step(
                index,
                index * 1_000_000_000,
                500_000_000,
                phases=(Phase("forward", 0, 300_000_000, 1), Phase("backward", 0, 200_000_000, 1)),
                windows=(window,),
                tensors=(tensors,),
                collectives=(Collective("all_reduce", 3, Bytes(99), 1_000_000),),
            )
        )
    first.finding(Finding("GP201", "read-after-write", Level.ERROR, "m", count=5))
    first.finding(Finding("GP206", "implicit-sync", Level.NOTE, "m", count=7))
    first.finding(Finding("GP206", "implicit-sync", Level.NOTE, "n", count=2))
    yield path
    first.close()
    second.close()


def readings(path: Path, state: str = "running") -> list[RunReading]:
    ranks, _ = TotalsTail(path).poll(MUCH)
    return [RunReading(run_name(str(path)), str(path), state, totals) for totals in ranks]


def series(text: str) -> dict[str, float]:
    """``name{label=value,…}`` without the run -> value, by the official client's parser."""
    found: dict[str, float] = {}
    for one in text_string_to_metric_families(text):
        for sample in one.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "run"}
            key = f"{sample.name}{{{','.join(f'{k}={v}' for k, v in labels.items())}}}"
            assert key not in found
            found[key] = sample.value
    return found


def test_what_a_run_comes_to(recorded: Path) -> None:
    found = series(render(run_families(readings(recorded))))
    expected = {
        "gpuprobe_run_state{rank=0,state=running}": 1,
        "gpuprobe_run_state{rank=0,state=incomplete}": 0,
        "gpuprobe_run_start_timestamp_seconds{rank=0}": 1700000000.5,
        "gpuprobe_run_last_step_timestamp_seconds{rank=0}": 1700000002.0,
        "gpuprobe_run_step{rank=0}": 1,
        "gpuprobe_run_steps_total{rank=0}": 2,
        "gpuprobe_run_step_duration_seconds{rank=0}": 0.5,
        "gpuprobe_run_step_seconds_total{rank=0}": 1,
        "gpuprobe_run_phase_seconds_total{rank=0,phase=forward}": 0.6,
        "gpuprobe_run_phase_seconds_total{rank=0,phase=backward}": 0.4,
        "gpuprobe_run_allocated_bytes{rank=0,device=cuda:0}": 100,
        "gpuprobe_run_reserved_bytes{rank=0,device=cuda:0}": 200,
        "gpuprobe_run_peak_allocated_bytes{rank=0,device=cuda:0}": 150,
        "gpuprobe_run_step_peak_allocated_bytes{rank=0,device=cuda:0}": 150,
        "gpuprobe_run_tensor_bytes{rank=0,device=cuda:0,category=parameter}": 60,
        "gpuprobe_run_tensor_bytes{rank=0,device=cuda:0,category=gradient}": 30,
        "gpuprobe_run_allocator_retries_total{rank=0,device=cuda:0}": 4,
        "gpuprobe_run_allocator_ooms_total{rank=0,device=cuda:0}": 0,
        "gpuprobe_run_device_allocations_total{rank=0,device=cuda:0}": 8,
        "gpuprobe_run_collective_calls_total{rank=0,op=all_reduce}": 6,
        "gpuprobe_run_collective_bytes_total{rank=0,op=all_reduce}": 198,
        "gpuprobe_run_collective_seconds_total{rank=0,op=all_reduce}": 0.002,
        "gpuprobe_run_hazards_total{rank=0,kind=read-after-write}": 5,
        "gpuprobe_run_syncs_total{rank=0}": 9,
        "gpuprobe_run_findings{rank=0,kind=implicit-sync,level=note}": 2,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_what_follows_the_last_step_is_no_step(tmp_path: Path) -> None:
    """All that is told of the newest step is of one step; peaks are of everything."""
    writer = begun(tmp_path / "run.gpuprobe")
    for index, ended_by, size in ((0, "optimizer", 100), (1, "optimizer", 200), (2, "end", 900)):
        counts = AllocatorCounts(allocated=Bytes(size), reserved=Bytes(size))
        window = DeviceWindow("cuda:0", counts, counts, Peak(size, size), Peak(size, size))
        tensors = KnownTensors("cuda:0", {Category.PARAMETER: Bytes(size)})
        host = HostWindow(Bytes(size), Bytes(size), Peak(size, size))
        writer.step(
            Step(index, index, 1, (), (window,), host, tensors=(tensors,), ended_by=ended_by)
        )
    writer.close()
    found = series(render(run_families(readings(writer.path))))
    device = "{rank=0,device=cuda:0}"
    assert found["gpuprobe_run_step{rank=0}"] == 1
    assert found["gpuprobe_run_steps_total{rank=0}"] == 2
    for name in ("allocated", "reserved", "step_peak_allocated", "step_peak_reserved"):
        assert found[f"gpuprobe_run_{name}_bytes{device}"] == 200, name
    assert found["gpuprobe_run_tensor_bytes{rank=0,device=cuda:0,category=parameter}"] == 200
    assert found["gpuprobe_run_resident_bytes{rank=0}"] == 200
    assert found[f"gpuprobe_run_peak_allocated_bytes{device}"] == 900
    assert found["gpuprobe_run_peak_resident_bytes{rank=0}"] == 900
    document = report(load(writer.path))
    assert document["ranks"][0]["steps"] == 2
    assert facts_of_ranks(load(writer.path))[0].steps == 2


def test_what_is_not_known_is_left_out(recorded: Path) -> None:
    found = series(render(run_families(readings(recorded))))
    # Reserved peaks were not read, nor was resident memory; rank 1 has made no step.
    assert not [key for key in found if "peak_reserved" in key or "resident" in key]
    names = {key.partition("{")[0] for key in found if "rank=1" in key}
    assert names == {
        "gpuprobe_run_info",
        "gpuprobe_run_state",
        "gpuprobe_run_start_timestamp_seconds",
        "gpuprobe_run_steps_total",
        "gpuprobe_run_step_seconds_total",
    }


def test_the_run_is_named_once_for_all_ranks(recorded: Path) -> None:
    text = render(run_families(readings(recorded)))
    (name,) = set(re.findall(r'run="([^"]*)"', text))
    assert re.fullmatch(r"train-[0-9a-f]{8}", name)
    assert run_name("/a/train.gpuprobe") != run_name("/b/train.gpuprobe")
    assert len(run_name("/" + "x" * 300)) < 80


@pytest.mark.parametrize("state", STATES)
def test_states(recorded: Path, state: str) -> None:
    found = series(render(run_families(readings(recorded, state))))
    on = [key for key, value in found.items() if key.startswith("gpuprobe_run_state") and value]
    assert sorted(on) == [f"gpuprobe_run_state{{rank={rank},state={state}}}" for rank in (0, 1)]


def test_names_follow_the_conventions() -> None:
    everything = (*GPU_METRICS, *RUN_METRICS)
    assert len({m.name for m in everything}) == len(everything)
    for metric in RUN_METRICS:
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.name.removesuffix("_total").endswith(metric.unit)
        assert metric.labels[:2] == ("run", "rank")
        assert metric.help.endswith(".")


def test_totals_without_steps_say_so() -> None:
    totals = RankTotals(session(), ENVIRONMENT)
    found = series(render(run_families([RunReading("r-1", "/r", "unknown", totals)])))
    assert found["gpuprobe_run_steps_total{rank=0}"] == 0
    assert "gpuprobe_run_step{rank=0}" not in found


@settings(deadline=None, max_examples=examples(60))
@given(
    values_of(Session),
    values_of(Environment),
    st.lists(values_of(Step), max_size=2, unique_by=lambda step: step.index),
    st.lists(values_of(Finding), max_size=2),
)
def test_whatever_a_recording_holds_can_be_exported(
    about: Session, environment: Environment, made: list[Step], found: list[Finding]
) -> None:
    """A damaged or hostile recording must not end an exporter that others rely on."""
    sums = RankSum()
    for step in sorted(made, key=lambda step: step.index):
        sums.step(step)
    for one in found:
        sums.finding(one)
    totals = sums.result(RankTotals(about, environment))
    families = run_families([RunReading("r-1", "/r", "running", totals)])
    series(render(families))
