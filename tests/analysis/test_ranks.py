"""Comparison of ranks: merged steps, the worst rank, and what makes it differ."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import report_builders as build
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuprobe
from examples import examples
from gpuprobe.analysis.ranks.compare import compare_ranks, merge_steps
from gpuprobe.analysis.time_shares import time_shares
from gpuprobe.model.memory import Category
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.run.session import Collective, KnownTensors, Phase, Step
from gpuprobe.model.values import Bytes, Unavailable
from gpuprobe.recording.summary import summarize
from gpuprobe.reporters.json.schemas import schema
from gpuprobe.reporters.sections.report import report_sections
from gpuprobe.reporters.terminal import Style
from gpuprobe.reporters.text import draw

MIB = build.MIB
MS = 1_000_000


def timed(index: int, spent: dict[str, int], waited: int = 0, **changes: Any) -> Step:
    """A step of these phases, in ms; ``waited`` ms of them in collectives."""
    made = build.step(index, dict.fromkeys(spent, 100 * MIB), device="cuda:0")
    phases = tuple(replace(p, duration_ns=spent[p.path] * MS) for p in made.phases)
    calls = (Collective("all_reduce", 1, Bytes(4), waited * MS),) if waited else ()
    total = sum(ms * MS for path, ms in spent.items() if "/" not in path)
    return replace(made, phases=phases, duration_ns=total, collectives=calls, **changes)


def of_rank(number: int, steps: list[Step], *traces: Any, world: int = 3) -> RankRecording:
    return build.rank_recording(
        steps,
        traces,
        session=build.session(device="cuda:0", rank=number, world_size=world),
        environment=build.environment(hostname=f"node{number}"),
    )


def joined(*ranks: RankRecording) -> Recording:
    return Recording("r.gpuprobe", (1, 0), ranks)


def rendered(recording: Recording) -> str:
    document = gpuprobe.report(recording)
    jsonschema.validate(json.loads(json.dumps(document)), schema("report-2"))
    return " ".join(
        " ".join(draw.lines(report_sections(summarize(recording)), Style(width=200))).split()
    )


def test_a_single_rank_has_no_comparison() -> None:
    alone = joined(of_rank(0, [timed(0, {"forward": 1})], world=1))
    assert compare_ranks(alone) is None
    assert gpuprobe.report(alone)["rank_comparison"] is None


def test_a_rank_with_slow_data_loading_is_the_straggler() -> None:
    usual = {"data": 1, "forward": 10, "backward": 30, "optimizer": 4}
    slow = {"data": 13, "forward": 10, "backward": 18, "optimizer": 4}
    ranks = [of_rank(n, [timed(i, slow if n == 1 else usual) for i in range(5)]) for n in range(3)]
    found = compare_ranks(joined(*ranks))
    assert found is not None
    assert not isinstance(found.time, Unavailable)
    assert (found.time.slowest, found.time.stands_out, found.time.steps) == (1, True, 4)
    assert [(d.key, d.ns) for d in found.time.phases] == [("data", 4 * 12 * MS)]
    assert {step.slowest_rank for step in found.steps} == {1}
    text = rendered(joined(*ranks))
    assert "rank 1 is the one the others wait for: late in 4 of 4 steps" in text
    assert "12.0 ms more own work per step" in text


def test_waiting_in_a_collective_is_not_work() -> None:
    """All ranks have steps of one length; two of them wait in a collective."""
    ranks = [
        of_rank(n, [timed(i, {"forward": 40}, waited=0 if n == 2 else 15) for i in range(3)])
        for n in range(3)
    ]
    found = compare_ranks(joined(*ranks))
    assert found is not None
    assert not isinstance(found.time, Unavailable)
    assert found.time.slowest == 2
    assert [(d.key, d.ns) for d in found.time.phases] == [("collectives", 2 * 15 * MS)]


def test_equal_ranks_have_no_straggler() -> None:
    ranks = [of_rank(n, [timed(i, {"forward": 40}) for i in range(3)]) for n in range(3)]
    assert "no rank stands out" in rendered(joined(*ranks))
    assert "all 3 ranks peak at 100.0 MiB" in rendered(joined(*ranks))


def test_the_worst_rank_differs_by_a_line() -> None:
    def rank(number: int, cache: int) -> RankRecording:
        blocks = [("model.py:10", 80 * MIB, Category.PARAMETER)]
        blocks += [("data.py:7", cache, Category.INPUT)] if cache else []
        trace = build.trace(blocks, device="cuda:0")
        peak = 80 * MIB + cache
        return of_rank(number, [build.step(0, {"backward": peak}, device="cuda:0")], trace)

    recording = joined(rank(0, MIB), rank(1, 31 * MIB), rank(2, MIB))
    found = compare_ranks(recording)
    assert found is not None
    assert not isinstance(found.memory, Unavailable)
    memory = found.memory
    assert (memory.worst.rank, memory.at) == (1, "peak")
    assert [(d.key, d.bytes) for d in memory.categories] == [("input", 30 * MIB)]
    assert [(str(d.key), d.bytes) for d in memory.lines] == [("data.py:7 in forward", 30 * MIB)]
    shown = rendered(recording)
    assert "rank 1 peaks highest: 111.0 MiB on cuda:0 of node1 in step 0, 30.0 MiB more" in shown
    assert "more than rank 0, the median" in " ".join(shown.split())
    two = " ".join(rendered(joined(rank(0, MIB), rank(1, 31 * MIB))).split())
    assert "30.0 MiB more than rank 0 +30.0 MiB" in two  # which is no median
    assert "+30.0 MiB line data.py:7 in forward at the peak" in shown


def test_without_traces_ranks_differ_by_known_categories() -> None:
    def rank(number: int, state: int) -> RankRecording:
        known = KnownTensors(
            "cuda:0", {Category.OPTIMIZER_STATE: Bytes(state)}, rest=Bytes(5 * MIB)
        )
        step = build.step(0, {"backward": 50 * MIB + state}, device="cuda:0", tensors=(known,))
        return of_rank(number, [step])

    found = compare_ranks(joined(rank(0, 8 * MIB), rank(1, 8 * MIB), rank(2, 24 * MIB)))
    assert found is not None
    assert not isinstance(found.memory, Unavailable)
    assert found.memory.at == "step_end"
    assert found.memory.worst.rank == 2
    assert [(d.key, d.bytes) for d in found.memory.categories] == [("optimizer_state", 16 * MIB)]


def test_ranks_without_a_common_step_are_not_compared() -> None:
    ranks = joined(of_rank(0, [timed(0, {"forward": 1})]), of_rank(1, []))
    found = compare_ranks(ranks)
    assert found is not None
    assert isinstance(found.time, Unavailable)
    assert isinstance(found.memory, Unavailable)
    assert found.steps == ()
    assert "time: no step was recorded by every rank" in rendered(ranks)


def test_one_long_step_does_not_make_a_rank_the_straggler() -> None:
    """Rank 0 is 10 ms late in most steps; rank 1 is late once, by 100 ms."""
    late = [timed(i, {"forward": 50}) for i in range(6)]
    long = [timed(i, {"forward": 140 if i == 3 else 40}) for i in range(6)]
    found = compare_ranks(joined(of_rank(0, late), of_rank(1, long)))
    assert found is not None
    assert not isinstance(found.time, Unavailable)
    assert found.time.slowest == 0
    assert found.time.own_ns < found.time.typical_ns
    assert not found.time.stands_out


PHASES = st.dictionaries(
    st.sampled_from(["data", "forward", "backward", "optimizer", "other", "forward/inner"]),
    st.integers(0, 50),
    min_size=1,
).filter(lambda phases: any("/" not in path for path in phases))
STEPS = st.lists(st.tuples(PHASES, st.integers(0, 60)), min_size=1, max_size=4)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(STEPS, min_size=2, max_size=5))
def test_differences_add_up(by_rank: list[list[tuple[dict[str, int], int]]]) -> None:
    ranks = [
        of_rank(n, [timed(i, phases, waited) for i, (phases, waited) in enumerate(steps)])
        for n, steps in enumerate(by_rank)
    ]
    found = compare_ranks(joined(*ranks))
    assert found is not None
    if not isinstance(found.time, Unavailable):
        differences = sum(d.ns for d in found.time.phases)
        assert differences == found.time.own_ns - found.time.typical_ns
        assert differences > 0 or not found.time.stands_out
    for step in merge_steps(ranks):
        assert 0 <= step.median_own_ns <= step.own_ns <= step.longest_ns
        assert step.ranks == sum(len(steps) > step.index for steps in by_rank)
    for rank in ranks:
        shares = time_shares(rank.steps)
        assert shares is not None
        assert (
            sum(phase.ns for phase in shares.phases) + shares.outside_phases_ns
            == shares.duration_ns
        )


def test_time_counts_neither_the_first_step_nor_the_rest_after_the_last() -> None:
    steps = [timed(0, {"forward": 500}), timed(1, {"forward": 4}, 1), timed(2, {"forward": 6}, 2)]
    after = Phase("forward", 0, 9 * MS, 1)
    steps.append(replace(build.step(3, {"forward": MIB}), phases=(after,), ended_by="end"))
    shares = time_shares(steps)
    assert shares is not None
    assert (shares.steps, shares.duration_ns) == (2, 10 * MS)
    assert [(c.count, c.bytes, c.host_ns) for c in shares.collectives] == [(2, 8, 3 * MS)]


def test_time_after_the_last_step_makes_no_rank_slow() -> None:
    """An evaluation on one rank only, and the first step, which initialises everything."""

    def steps(first: int, after: int) -> list[Step]:
        made = [timed(0, {"forward": first})] + [timed(i, {"forward": 40}) for i in (1, 2)]
        return [*made, timed(3, {"forward": after}, ended_by="end")]

    ranks = [of_rank(n, steps(500 if n == 1 else 50, 900 if n == 2 else 9)) for n in range(3)]
    found = compare_ranks(joined(*ranks))
    assert found is not None
    assert not isinstance(found.time, Unavailable)
    assert (found.time.steps, found.time.own_ns, found.time.stands_out) == (2, 80 * MS, False)


def test_a_rank_with_a_lower_peak_is_not_equal_to_the_others() -> None:
    steps = {n: [build.step(0, {"forward": peak * MIB})] for n, peak in enumerate((9, 9, 6, 9))}
    ranks = [of_rank(n, made, world=4) for n, made in steps.items()]
    shown = rendered(joined(*ranks))
    assert "all 4 ranks" not in shown
    assert "3 of 4 ranks peak at 9.0 MiB; rank 2 peaks lowest: 6.0 MiB" in shown


def test_the_slowest_collective_comes_first() -> None:
    calls = [Collective(f"op{i}", 1, Bytes((9 - i) * MIB), MS) for i in range(7)]
    calls.append(Collective("barrier", 3, Bytes(0), 40 * MS))
    calls.append(Collective("send", 3, Bytes(90 * MIB), Unavailable("it is asynchronous")))
    steps = [replace(timed(i, {"forward": 60}), collectives=tuple(calls)) for i in range(2)]
    shown = rendered(joined(of_rank(0, steps, world=2), of_rank(1, steps, world=2)))
    assert "barrier: 3× · 0 B · blocked the program 40.0 ms" in shown
    assert "… 4 more operations" in shown


def test_no_rank_is_slow_on_virtual_gpus() -> None:
    """The durations of their steps are the CPU's time with its noise."""
    ranks = [of_rank(n, [timed(i, {"forward": 40 + 20 * n}) for i in range(3)]) for n in range(2)]
    assert "is the one the others wait for" in rendered(joined(*ranks))
    for rank in ranks:
        rank.session = replace(rank.session, virtual=True)
    assert "time: step times on a simulated GPU are not comparable" in rendered(joined(*ranks))
