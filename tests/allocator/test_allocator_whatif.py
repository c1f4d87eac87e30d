"""What-if and the search, and the command that prints them."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from allocator_programs import MIB, POOLS, Program, cut
from shared_files import shared_snapshots
from trace_recorder import TraceRecorder

import gpuprobe
from gpuprobe.allocator.blocks import PoolBlock
from gpuprobe.allocator.driver import DRIVER_ORDERS, SimulatedDriver
from gpuprobe.allocator.replay import SPLITTING_NOT_RECORDED, replay_trace
from gpuprobe.allocator.settings import parse_conf, to_conf
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.allocator.whatif import (
    AddressOrderPeaks,
    Range,
    WhatIfOutcome,
    peaks_by_address_order,
    reserved_alone,
    search,
    what_if,
)
from gpuprobe.cli import main
from gpuprobe.errors import ConfigError, DataError, UsageError
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.run.session import Environment, Session, SessionEnd, Step
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.reporters.json import replay as replay_json
from gpuprobe.reporters.json.schemas import schema
from gpuprobe.reporters.sections.replay import replay_sections
from gpuprobe.reporters.text import draw

MEM_POOL, GRAPH = 1, 2  # in POOLS


def fragmenting(conf: str = "") -> MemoryTrace:
    """Buffers that grow a little each time: cached blocks are always just too small."""
    sim = Simulator(parse_conf(conf), device_memory=80 << 30)
    recorder = TraceRecorder(sim)
    for step in range(12):
        block = sim.malloc((40 + 4 * step) * MIB)
        assert block is not None
        sim.free(block)
    return recorder.trace()


def steady() -> MemoryTrace:
    """The same sizes over and over: nothing to gain."""
    sim = Simulator()
    recorder = TraceRecorder(sim)
    for _ in range(20):
        blocks = [sim.malloc(64 * MIB) for _ in range(4)]
        for block in blocks:
            assert block is not None
            sim.free(block)
    return recorder.trace()


def test_what_was_alive_before_is_reserved_first() -> None:
    """Two blocks of 40 MiB, of which one is freed in the trace and reused there."""
    sim = Simulator()
    old = [sim.malloc(40 * MIB) for _ in range(2)]
    recorder = TraceRecorder(sim)
    before = [block.address for block in old if block is not None]
    for size in (40, 20):
        assert old[0] is not None
        sim.free(old[0])
        old[0] = sim.malloc(size * MIB)
    trace = recorder.trace()
    for address in before:
        trace.baseline.append(TraceAction.ALLOC.code, address, 40 * MIB)
    assert reserved_alone(trace) == 80 * MIB


def test_the_recorded_settings_give_the_recorded_numbers() -> None:
    """From an empty start nothing is re-packed, so the simulation is the recording."""
    for seed in range(6):
        trace = Program(seed, parse_conf("")).run(200).trace()
        recorded = replay_trace(trace)
        assert recorded.exact
        outcome = what_if(trace, recorded, recorded.settings, orders=("ascending",))
        assert outcome.change == ""
        assert outcome.peak_allocated.most == recorded.peak_allocated
        assert outcome.peak_reserved.most == recorded.peak_reserved
        assert outcome.device_allocs.most == recorded.device_allocs
        assert outcome.would_oom == 0


def test_peaks_in_both_orders_of_addresses_are_those_of_the_recorded_ones() -> None:
    """The same requests, recorded in either order, show the peaks that both were recorded with."""
    differ = 0
    for seed in range(30):
        traces = [
            Program(seed, parse_conf(""), order=order).run(300).trace() for order in DRIVER_ORDERS
        ]
        descending, ascending = (replay_trace(trace) for trace in traces)
        assert descending.exact
        assert ascending.exact
        expected = AddressOrderPeaks(
            descending.peak_allocated,
            descending.peak_reserved,
            ascending.peak_allocated,
            ascending.peak_reserved,
        )
        for trace, recorded in zip(traces, (descending, ascending), strict=True):
            assert peaks_by_address_order(trace, recorded) == expected
        differ += expected.descending_reserved != expected.ascending_reserved
    assert differ


def test_expandable_segments_help_growing_buffers() -> None:
    trace = fragmenting()
    recorded = replay_trace(trace)
    before = what_if(trace, recorded, recorded.settings)
    after = what_if(trace, recorded, parse_conf("expandable_segments:True"))
    assert before.peak_reserved.most == sum(40 + 4 * step for step in range(12)) * MIB
    assert after.peak_reserved.most == 100 * MIB  # the largest, 84 MiB, in pages of 20
    assert after.peak_allocated.most <= before.peak_allocated.most
    assert after.change == "expandable_segments:True"


def test_the_search_recommends_the_smallest_change() -> None:
    trace = fragmenting()
    advice = search(trace, replay_trace(trace))
    assert advice.best is not None
    assert advice.best.change == "expandable_segments:True"
    assert advice.gain == advice.baseline.peak_reserved.least - 100 * MIB
    assert not advice.fits


def test_the_search_never_recommends_what_is_on() -> None:
    for conf in ("expandable_segments:True", "roundup_power2_divisions:8", "max_split_size_mb:64"):
        trace = fragmenting(conf)
        recorded = replay_trace(trace, device_memory=80 << 30)
        assert recorded.exact
        advice = search(trace, recorded)
        on = to_conf(recorded.settings)
        assert all(to_conf(outcome.settings) != on for outcome in advice.tried)
        assert all(outcome.change and outcome.change != conf for outcome in advice.tried)


def test_the_search_reports_when_nothing_helps() -> None:
    trace = steady()
    advice = search(trace, replay_trace(trace))
    assert advice.best is None
    result = gpuprobe.replay(trace, search=True)
    assert "nothing helps" in "\n".join(rendered(result))


def pinned(capacity: int | None) -> MemoryTrace:
    """Growing buffers, each freed and then partly taken by a small block that stays: the
    holes are pinned, and only what grows in place can use them."""
    sim = Simulator(driver=SimulatedDriver(capacity))
    recorder = TraceRecorder(sim)
    for step in range(8):
        big = sim.malloc((40 + 20 * step) * MIB)
        if big is not None:
            sim.free(big)
        assert sim.malloc(15 * MIB) is not None
    return recorder.trace()


def test_the_search_finds_what_fits() -> None:
    trace = pinned(None)
    advice = search(trace, replay_trace(trace), capacity=380 * MIB)
    assert advice.baseline.would_oom == advice.baseline.orders
    assert advice.best is not None
    assert advice.best.change == "expandable_segments:True"
    assert advice.best.would_oom == 0
    assert advice.fits
    text = "\n".join(rendered(gpuprobe.replay(trace, search=True, capacity=380 * MIB)))
    assert "fits, where the recorded settings run out of memory" in text


def test_a_capacity_shows_which_settings_run_out_of_memory() -> None:
    trace = steady()
    recorded = replay_trace(trace)
    enough = what_if(trace, recorded, recorded.settings, capacity=256 * MIB)
    short = what_if(trace, recorded, recorded.settings, capacity=255 * MIB)
    assert (enough.would_oom, short.would_oom) == (0, short.orders)
    assert short.ooms.least > 0
    assert short.peak_reserved.most <= 255 * MIB


def test_a_recorded_oom_gives_the_capacity_and_may_be_served() -> None:
    trace = pinned(380 * MIB)
    result = gpuprobe.replay(trace, "expandable_segments:True")
    assert result.first_divergence is None
    (found,) = result.traces
    assert found.recorded.ooms == 1
    assert (found.capacity, found.capacity_source) == (
        380 * MIB,
        "from the recorded out-of-memory",
    )
    assert found.baseline is not None
    assert found.what_if is not None
    assert found.baseline.served_after_all.most == 0
    assert found.baseline.ooms.least == 1
    assert found.what_if.served_after_all.least == 1
    assert any("recorded OOMs served" in line for line in rendered(result))


def test_giving_up_with_memory_left_to_release_is_found() -> None:
    trace = fragmenting()
    for name, value in (("action", TraceAction.OOM.code), ("size", 90 * MIB)):
        getattr(trace.events, name).append(value)
    for name in ("address", "stream", "pool", "device_free"):
        getattr(trace.events, name).append(0)
    divergence = replay_trace(trace).first_divergence
    assert divergence is not None
    assert (divergence.event, divergence.action) == (len(trace.events) - 1, "oom")
    assert divergence.expected.startswith("frees the segment")


@pytest.mark.parametrize(
    ("conf", "reserved", "active"),
    [("", sum(range(40, 88, 4)), 84), ("expandable_segments:True", 100, 84)],
)
def test_fragmentation_is_the_part_of_the_reserved_peak_that_was_not_in_use(
    conf: str, reserved: int, active: int
) -> None:
    """MiB, when reserved memory first reached its peak: each new segment next to all older ones, or
    the pages of the last block, up to a multiple of 20 MiB.
    """
    trace = fragmenting()
    outcome = what_if(trace, replay_trace(trace), parse_conf(conf))
    assert outcome.peak_reserved == Range(reserved * MIB, reserved * MIB)
    part = (reserved - active) * 1_000_000 // reserved
    assert outcome.fragmentation == Range(part, part)


def test_ranges_cover_several_address_orders() -> None:
    trace = Program(4, parse_conf(""), capacity=None).run(300).trace()
    recorded = replay_trace(trace)
    outcome = what_if(trace, recorded, parse_conf("max_split_size_mb:32"))
    assert outcome.orders == 4
    for value in (outcome.peak_reserved, outcome.device_allocs, outcome.fragmentation):
        assert value.least <= value.most
    again = what_if(trace, recorded, parse_conf("max_split_size_mb:32"))
    assert again == outcome  # shuffles have fixed seeds


def taken(sim: Simulator, size: int, pool: int = 0) -> PoolBlock:
    block = sim.malloc(size, 0, pool)
    assert block is not None
    return block


def outcome_of(
    sim: Simulator, recorder: TraceRecorder, conf: str, capacity: int | None
) -> WhatIfOutcome:
    """The requests of the simulator under ``conf``."""
    trace = recorder.trace()
    recorded = replay_trace(trace)
    assert recorded.exact
    return what_if(trace, recorded, parse_conf(conf), capacity=capacity, orders=("ascending",))


def test_how_long_a_graph_held_its_pool_may_decide() -> None:
    """Its memory is cached when there is none left for a request, which failed."""
    sim = Simulator(parse_conf(""), SimulatedDriver(64 * MIB))
    recorder = TraceRecorder(sim, POOLS)
    sim.begin_capture(GRAPH, frozenset({0}))
    block = taken(sim, 30 * MIB, GRAPH)
    sim.end_capture(GRAPH)
    sim.free(block)
    taken(sim, 30 * MIB)
    outcome = outcome_of(sim, recorder, "", 64 * MIB)
    assert outcome.undecided == ()
    # Larger segments leave no memory for the second request.
    outcome = outcome_of(sim, recorder, "roundup_power2_divisions:1", 50 * MIB)
    assert outcome.undecided == ("how long a graph or the program held a private pool",)
    assert (outcome.ooms.least, outcome.ooms.most) == (0, 1)


def test_whether_a_pool_has_overflow_may_decide() -> None:
    sim = Simulator(parse_conf(""), SimulatedDriver(64 * MIB))
    recorder = TraceRecorder(sim, POOLS)
    kept = taken(sim, 4 * MIB, MEM_POOL)  # so that its segment cannot be released
    block = taken(sim, 14 * MIB, MEM_POOL)
    sim.free(block)
    taken(sim, 4 * MIB, MEM_POOL)
    sim.free(kept)
    taken(sim, 12 * MIB)
    assert outcome_of(sim, recorder, "", 64 * MIB).undecided == ()
    outcome = outcome_of(sim, recorder, "", 30 * MIB)
    assert outcome.undecided == ("whether a MemPool serves when the default pool has no memory",)


def test_whether_a_pool_splits_its_blocks_may_decide() -> None:
    """It had one block at a time, which may have been a whole segment."""
    sim = Simulator(parse_conf(""), SimulatedDriver())
    recorder = TraceRecorder(sim, POOLS)
    sim.free(taken(sim, 4 * MIB, MEM_POOL))
    trace = recorder.trace()
    recorded = replay_trace(trace)
    assert SPLITTING_NOT_RECORDED in recorded.notes
    outcome = outcome_of(sim, recorder, "max_split_size_mb:32", None)
    assert outcome.undecided == ("whether a MemPool splits its blocks",)
    assert (outcome.peak_allocated.least, outcome.peak_allocated.most) == (4 * MIB, 20 * MIB)


def test_the_size_of_a_request_that_failed_may_decide() -> None:
    """torch records what it rounded it up to."""
    sim = Simulator(parse_conf("roundup_power2_divisions:2"), SimulatedDriver(40 * MIB))
    recorder = TraceRecorder(sim)
    assert sim.malloc(33 * MIB) is None
    trace = recorder.trace()
    outcome = outcome_of(sim, recorder, "", 40 * MIB)
    assert trace.events.size[0] == 48 * MIB
    assert outcome.undecided == ("the size of requests that failed: it was recorded rounded",)
    assert (outcome.served_after_all.least, outcome.served_after_all.most) == (0, 1)


def test_what_the_program_released_may_decide() -> None:
    """Without stacks, a release and a request that follows may be the request's own retry. The
    device's memory may decide."""
    sim = Simulator(parse_conf(""), SimulatedDriver(64 * MIB))
    recorder = TraceRecorder(sim)
    sim.free(taken(sim, 40 * MIB))
    taken(sim, 50 * MIB)
    assert sim.retries == 1
    recorded = replay_trace(recorder.trace())
    assert (recorded.retries, len(recorded.unclear)) == (0, 1)
    outcome = outcome_of(sim, recorder, "", None)
    assert outcome.undecided == ("which releases of cached memory were the program's own",)
    assert (outcome.peak_reserved.least, outcome.peak_reserved.most) == (50 * MIB, 90 * MIB)
    decided = outcome_of(sim, recorder, "", 64 * MIB)
    assert decided.undecided == ()
    assert decided.retries == Range(1, 1)


def test_one_release_returns_all_pools_without_an_owner() -> None:
    sim = Simulator(parse_conf(""), SimulatedDriver())
    recorder = TraceRecorder(sim, POOLS)
    sim.begin_capture(GRAPH, frozenset({0}))
    captured = taken(sim, 30 * MIB, GRAPH)
    sim.end_capture(GRAPH)
    sim.free(captured)
    sim.release_pool(GRAPH)
    sim.free(taken(sim, 24 * MIB))
    sim.empty_cache()
    assert sim.reserved == 0
    outcome = outcome_of(sim, recorder, "", None)
    assert outcome.device_frees == Range(2, 2)
    assert outcome.undecided == ()


def test_a_release_that_frees_one_pool_releases_all_cached_memory() -> None:
    """Only the end of a ``MemPool`` releases its own alone. Under the settings tried, the default
    pool has cached memory, too: the recorded ones rounded a request up to what the next needed."""
    sim = Simulator(parse_conf("roundup_power2_divisions:2"), SimulatedDriver())
    recorder = TraceRecorder(sim, POOLS)
    sim.free(taken(sim, 33 * MIB))
    taken(sim, 48 * MIB)
    sim.begin_capture(GRAPH, frozenset({0}))
    captured = taken(sim, 30 * MIB, GRAPH)
    sim.end_capture(GRAPH)
    sim.free(captured)
    sim.release_pool(GRAPH)
    sim.empty_cache()
    assert sim.device_frees == 1
    assert outcome_of(sim, recorder, "", None).device_frees == Range(2, 2)


def test_reports_name_what_was_not_recorded() -> None:
    sim = Simulator(parse_conf(""), SimulatedDriver())
    recorder = TraceRecorder(sim, POOLS)
    sim.free(taken(sim, 4 * MIB, MEM_POOL))
    result = gpuprobe.replay(recorder.trace(), "max_split_size_mb:32")
    text = io.StringIO()
    draw.write(replay_sections(result), text)
    assert "not recorded, so both ways are in the ranges: whether a MemPool" in text.getvalue()
    (trace,) = replay_json.document(result)["traces"]
    assert trace["what_if"]["undecided"] == ["whether a MemPool splits its blocks"]


def test_an_inexact_replay_labels_its_what_if() -> None:
    trace = fragmenting()
    trace.events.address[1] += 512
    result = gpuprobe.replay(trace, "expandable_segments:True")
    assert not result.exact
    assert "UNVERIFIED" in "\n".join(rendered(result))
    document = replay_json.document(result)
    assert document["traces"][0]["verified"] is False


def rendered(result: Any) -> list[str]:
    stream = io.StringIO()
    draw.write(replay_sections(result), stream)
    return stream.getvalue().splitlines()


def test_text_names_the_first_divergence_and_stays_narrow() -> None:
    trace = fragmenting()
    trace.events.address[1] += 512
    lines = rendered(gpuprobe.replay(trace))
    text = "\n".join(lines)
    assert "replay is NOT exact: it differs at event 1 (alloc)" in text
    assert "why:" in text
    assert max(map(len, lines)) <= 80
    lines = rendered(gpuprobe.replay(steady(), "expandable_segments:True", search=True))
    assert max(map(len, lines)) <= 100


def test_json_is_versioned_and_complete() -> None:
    result = gpuprobe.replay(fragmenting(), "expandable_segments:True", search=True)
    document = json.loads(json.dumps(replay_json.document(result)))
    jsonschema.validate(document, schema("replay-2"))
    assert (document["schema"], document["version"]) == ("gpuprobe.replay", [2, 2])
    (trace,) = document["traces"]
    assert trace["exact"] is True
    assert trace["first_divergence"] is None
    assert trace["what_if"]["peak_reserved"] == {"least": 100 * MIB, "most": 100 * MIB}
    assert trace["search"]["best"]["change"] == "expandable_segments:True"
    assert document["limits"]


def test_the_api_takes_settings_text_and_objects() -> None:
    trace = fragmenting()
    text = gpuprobe.replay(trace, "expandable_segments:True")
    settings = replace(parse_conf(""), expandable_segments=True)
    assert gpuprobe.replay(trace, settings).peak_reserved == text.peak_reserved == 100 * MIB
    plain = gpuprobe.replay(trace)
    assert plain.exact
    assert plain.first_divergence is None
    assert plain.peak_reserved == plain.final_reserved > text.peak_reserved
    assert plain.peak_allocated == text.peak_allocated == 84 * MIB
    with pytest.raises(ConfigError):
        gpuprobe.replay(trace, "nonsense:1")
    with pytest.raises(UsageError):
        gpuprobe.replay(trace, "expandable_segments:True", capacity=0)
    with pytest.raises(DataError, match="cuda:3"):
        gpuprobe.replay(trace, device=3)


def torch_snapshot(trace: MemoryTrace) -> dict[str, Any]:
    """The trace in the form torch dumps."""
    rows = [
        {
            "action": row.action.value,
            "addr": row.address,
            "size": row.size,
            "stream": row.stream,
            "time_us": 1,
            "frames": [],
            "pool_id": trace.pools[row.pool],
        }
        for row in trace.events.rows()
    ]
    layout = [
        {
            "device": 0,
            "address": s.address,
            "total_size": s.total_size,
            "allocated_size": s.allocated_size,
            "active_size": s.allocated_size + s.pending_size,
            "requested_size": sum(b.requested_size for b in s.blocks),
            "stream": s.stream,
            "segment_type": s.segment_type,
            "segment_pool_id": s.pool_id,
            "is_expandable": s.is_expandable,
            "frames": [],
            "blocks": [
                {
                    "address": b.address,
                    "size": b.size,
                    "requested_size": b.requested_size,
                    "state": b.state.value,
                    "frames": [],
                }
                for b in s.blocks
            ],
        }
        for s in trace.segments
    ]
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False, "max_split_size": -1}
    return {"segments": layout, "device_traces": [rows], "allocator_settings": settings}


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = tmp_path / "run.pickle"
    with path.open("wb") as stream:
        pickle.dump(torch_snapshot(fragmenting()), stream)
    return path


def test_the_command_replays(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(snapshot)]) == 0
    assert "replay exact" in capsys.readouterr().out


def test_the_command_with_what_if(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", str(snapshot), "--what-if", "expandable_segments:True", "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["traces"][0]["what_if"]["peak_reserved"]["most"] == 100 * MIB
    assert main([*command, "--capacity", "90MiB"]) == 1  # the pages need 100
    assert json.loads(capsys.readouterr().out)["traces"][0]["what_if"]["would_oom"] == 4


def test_the_command_searches(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(snapshot), "--search", "--device", "0"]) == 0
    out = capsys.readouterr().out
    assert "recommended: expandable_segments:True" in out


def test_the_command_finds_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = torch_snapshot(fragmenting())
    plain["device_traces"][0][1]["addr"] += 512
    path = tmp_path / "wrong.pickle"
    with path.open("wb") as stream:
        pickle.dump(plain, stream)
    assert main(["replay", str(path)]) == 1
    assert "differs at event 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--what-if", "foo:1"],
        ["--what-if", "expandable_segments"],
        ["--capacity", "many"],
        ["--capacity", "54"],
        ["--capacity", "0"],
        ["--device", "x"],
    ],
)
def test_wrong_arguments_exit_2(
    snapshot: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["replay", str(snapshot), *arguments])
    except SystemExit as stop:
        code = int(str(stop.code))
    assert code == 2
    assert capsys.readouterr().err.startswith("gpuprobe: error:")


@pytest.mark.skipif(not shared_snapshots(), reason="no real snapshots beside this checkout")
def test_a_real_run_is_helped_by_expandable_segments() -> None:
    path = next(p for p in shared_snapshots() if p.stem == "lm_ctx128_train_step")
    result = gpuprobe.replay(path, "expandable_segments:True")
    assert result.exact
    (trace,) = result.traces
    assert trace.baseline is not None
    assert trace.baseline.peak_reserved.most == trace.recorded.peak_reserved
    assert result.peak_reserved < trace.recorded.peak_reserved


def test_a_recording_of_several_steps_is_replayed_step_by_step(tmp_path: Path) -> None:
    """Each step's trace has the layout at its end; a what-if takes the highest."""
    program = Program(8, parse_conf(""))
    path = tmp_path / "run.gpuprobe"
    writer = RecordingWriter.create(path)
    writer.session(Session(0.0, 1, ("train.py",), "trace", ("cuda:0",)), environment())
    highest = 0
    for step in range(3):
        start = len(program.recorder.events)
        program.run(60)
        trace = cut(program.trace(), start)
        trace.step = step
        name = writer.trace(trace)
        writer.step(Step(step, 0, 1, traces=(name,)))
        highest = max(highest, program.sim.peak_reserved)
    writer.end(SessionEnd(1))
    writer.close()
    result = gpuprobe.replay(path, "expandable_segments:True")
    assert result.exact
    assert [t.recorded.step for t in result.traces] == [0, 1, 2]
    simulated = [t for t in result.traces if t.what_if is not None]
    assert len(simulated) == 1
    assert simulated[0].recorded.peak_reserved == highest
    assert "3 of 3 traces replay exactly" in rendered(result)[0]


def environment() -> Environment:
    return Environment(gpuprobe="0", python="3", platform="any", hostname="here")


def test_a_trace_that_frees_twice_is_survived() -> None:
    """A damaged trace: a block is freed again, and another without a request."""
    trace = MemoryTrace("cuda:0")
    alloc, request, done = (
        TraceAction.ALLOC.code,
        TraceAction.FREE_REQUESTED.code,
        TraceAction.FREE_COMPLETED.code,
    )
    for code, address in (
        (alloc, 512), (request, 512), (request, 512), (done, 512), (done, 512), (alloc, 1024),
        (done, 1024), (request, 1024),
    ):  # fmt: skip
        trace.events.append(code, address, MIB)
    found = what_if(trace, replay_trace(trace), parse_conf("expandable_segments:True"))
    assert found.peak_allocated.most == MIB
