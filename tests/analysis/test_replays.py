"""The memory of a trace without what something keeps: its limits, and what else keeps a block."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_builders import recording, step, window
from test_needs import Life, trace_of

from gpuprobe.analysis.peak.needs import Biographies
from gpuprobe.analysis.peak.peaks import PeakSite, device_peaks
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import held_blocks
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.causes.replays import (
    FreedEarly,
    KindedTrace,
    Remedy,
    RunPeak,
    Smaller,
    over_all_steps,
)
from gpuprobe.model.needs import Need
from gpuprobe.model.run.holders import HeldBy, Holder, HolderRoot, Kept
from gpuprobe.model.trace import Frame
from gpuprobe.model.values import Bytes, Peak

FILE = "/home/me/train.py"
OUTSIDE = 99
"""The line of another function than the others."""
KEPT = Holder("kept", "list", "", 1, 0, Bytes(0), path=(HeldBy("kept", "list"),))
VARIABLE = replace(KEPT, name="x", path=(HeldBy("x", "Tensor"),))


def traced(lives: list[Life], lines: list[int]) -> KindedTrace:
    """A trace in which life n is made by the n-th line; of a number above 100, the hundreds are the
    line that calls the function.
    """
    trace = trace_of(lives)
    table = trace.stacks
    events, baseline = iter(trace.events.address), iter(trace.baseline.address)
    for columns, addresses in ((trace.events, events), (trace.baseline, baseline)):
        for at, address in enumerate(addresses):
            number = lines[(address >> 20) - 1]
            caller, number = divmod(number, 100)
            frames = [Frame(FILE, number, "main" if number == OUTSIDE else "train")]
            frames += [Frame(FILE, caller, "main")] * (caller > 0)
            columns.stack[at] = table.stack(tuple(map(table.frame, frames)))
    return KindedTrace(Biographies(ledger_of(trace)))


def row_of(ledger: Ledger, life: int) -> int:
    addresses = ledger.values("address", range(len(ledger)))
    return addresses.index((life + 1) << 20)


def freed(
    one: KindedTrace,
    event: int,
    lives: Collection[int],
    others: Mapping[int, Holder] | None = None,
    remedy: Remedy = Remedy.RELEASED,
    first: Holder = KEPT,
) -> FreedEarly:
    """The replay without what `first` keeps: the numbers of the lives; `others` by life."""
    rows = [row_of(one.lives.ledger, life) for life in lives]
    needs = one.lives.needs(event)
    blocks = held_blocks(one.lives, {row: needs.get(row, Need.NEVER_AGAIN) for row in rows})
    holders = dict.fromkeys(rows, first)
    also = {row_of(one.lives.ledger, life): holder for life, holder in (others or {}).items()}
    return FreedEarly(one, event, blocks, holders, also, remedy)


EVENT = Life(512, 1, [1], 1)
"""A trace has at least one."""


@st.composite
def programs(draw: st.DrawFn) -> list[Life]:
    lives = []
    for _ in range(draw(st.integers(1, 12))):
        born = draw(st.integers(0, 12))
        used = draw(st.lists(st.integers(born + 1, 14), max_size=3))
        last = max([born, *used])
        end = draw(st.one_of(st.none(), st.integers(max(1, last), 16)))
        lives.append(Life(512 * draw(st.integers(1, 64)), born, used, end))
    return lives


@given(programs(), st.data())
def test_what_is_freed_lowers_the_peak_down_to_what_is_needed(
    lives: list[Life], data: st.DataObject
) -> None:
    lines = data.draw(st.lists(st.integers(1, 4), min_size=len(lives), max_size=len(lives)))
    one = traced([*lives, EVENT], [*lines, 9])
    ledger = one.lives.ledger
    event = ledger.peak()
    recorded = max(ledger.allocated_after())
    assert freed(one, event, []).peak(one) == recorded
    unneeded = [
        life
        for life in range(len(lives))
        if one.lives.needs(event).get(row_of(ledger, life), Need.LATER).needless
    ]
    # Whatever is chosen, what operators still use remains.
    least = max(ledger.running(one.lives.ends_of_use()))
    some = data.draw(st.lists(st.sampled_from(unneeded), unique=True)) if unneeded else []
    alone = freed(one, event, some).peak(one)
    assert least <= alone <= recorded
    # What something else holds can only make it more.
    also = data.draw(st.lists(st.sampled_from(some), unique=True)) if some else []
    shared = freed(one, event, some, dict.fromkeys(also, VARIABLE)).peak(one)
    assert alone <= shared <= recorded
    if some:
        assert freed(one, event, some, dict.fromkeys(some, VARIABLE)).peak(one) == recorded


@given(programs())
def test_no_other_size_is_the_recorded_peak(lives: list[Life]) -> None:
    one = traced([*lives, EVENT], [1] * len(lives) + [9])
    excess = Excess(Answer("", "", ""), 0, [], "")
    assert Smaller(one, excess, lambda live: iter(())).peak(one) == max(
        one.lives.ledger.allocated_after()
    )


def iterations(count: int, kept_from: int = 0) -> list[Life]:
    """A loop of four operators: the second one makes a block of 8 bytes that a list keeps, the
    third uses it, the fourth needs 4 bytes for a moment. A variable keeps it until the next is
    made.
    """
    lives = []
    for at in range(count):
        first = 4 * at + 1
        end = None if at >= kept_from else first + 5
        lives += [Life(8, first + 1, [first + 2], end), Life(4, first + 3, [first + 3], first + 3)]
    return lives


@pytest.mark.parametrize(("first", "alike"), [(101, 8), (102, 0), (201, 0)])
def test_what_the_same_line_made_in_another_call_may_be_kept_as_well(
    first: int, alike: int
) -> None:
    """Three models, each of which is kept until the next one is there."""
    models = [Life(8, 0, [1], 4), Life(12, 3, [4], 7), Life(16, 6, [7], None)]
    one = traced(models, [first, 201, 201])
    event = one.lives.ledger.peak()
    assert max(one.lives.ledger.allocated_after()) == 12 + 16
    change = freed(one, event, [1])
    assert change.alike_left() == alike
    assert change.peak(one) == (16 if first == 201 else 8 + 12)


LOOP = [1, 2] * 5


def test_a_variable_keeps_each_block_as_long_as_the_newest_one_at_the_peak() -> None:
    one = traced(iterations(5), LOOP)
    ledger = one.lives.ledger
    event = ledger.peak()  # the fourth operator of the last iteration
    assert max(ledger.allocated_after()) == 5 * 8 + 4
    kept = range(0, 10, 2)
    assert freed(one, event, kept).peak(one) == 8
    newest = {8: VARIABLE}
    assert freed(one, event, kept, newest).peak(one) == 8 + 4


def test_the_same_code_is_replayed_in_other_steps() -> None:
    one = traced(iterations(5), LOOP)
    change = freed(one, one.lives.ledger.peak(), range(0, 10, 2), {8: VARIABLE})
    other = traced(iterations(3), LOOP)
    assert max(other.lives.ledger.allocated_after()) == 3 * 8 + 4
    assert change.peak(other) == 8 + 4
    elsewhere = traced(iterations(3), [7] * 10)
    assert change.peak(elsewhere) == 3 * 8 + 4


@pytest.mark.parametrize(
    ("kept", "expected"),
    [(Kept.TENSOR, 5 * 8 + 4), (Kept.SAVED, 8)],
)
def test_detaching_keeps_tensors_and_frees_what_graphs_saved(kept: Kept, expected: int) -> None:
    one = traced(iterations(5), LOOP)
    event = one.lives.ledger.peak()
    first = replace(KEPT, kept=kept)
    change = freed(one, event, range(0, 10, 2), remedy=Remedy.DETACHED, first=first)
    assert change.peak(one) == expected


def test_without_graphs_no_other_graph_keeps_a_block() -> None:
    one = traced(iterations(5), LOOP)
    event = one.lives.ledger.peak()
    saved, graph = replace(KEPT, kept=Kept.SAVED), replace(VARIABLE, kept=Kept.SAVED)
    change = freed(one, event, range(0, 10, 2), {8: graph}, Remedy.NO_GRAPH, first=saved)
    assert change.peak(one) == 8
    released = change.with_remedy(Remedy.RELEASED)
    assert released.peak(one) == 8 + 4
    # Nor does that of the call in progress, which is no part of the group.
    change = freed(one, event, range(0, 8, 2), {8: graph}, Remedy.NO_GRAPH, first=saved)
    assert change.peak(one) == 8
    assert change.with_remedy(Remedy.RELEASED).peak(one) == 8 + 4


def test_the_variables_of_a_function_stay_until_an_exception_has_ended_it() -> None:
    lives = [
        Life(8, 1, [1], None),
        Life(8, 2, [2], None),
        Life(16, 3, [3], 3),
        Life(20, 4, [4], 4),
    ]
    one = traced(lives, [1, 2, 3, OUTSIDE])
    event = one.lives.ledger.peak()
    assert max(one.lives.ledger.allocated_after()) == 8 + 8 + 20
    assert freed(one, event, [0, 1]).peak(one) == 20
    error = replace(KEPT, root=HolderRoot.EXCEPTION, file=FILE, function="train")
    assert freed(one, event, [0, 1], first=error).peak(one) == 8 + 8 + 16


def test_what_waits_comes_when_it_is_used() -> None:
    batches = [Life(8, at, [10 + at], None) for at in range(1, 6)]
    one = traced([*batches, Life(1, 11, [11], 11)], [1] * 5 + [2])
    event = one.lives.ledger.peak()
    needs = one.lives.needs(event)
    rows = [row for row, need in needs.items() if need is Need.NOT_YET]
    blocks = held_blocks(one.lives, {row: needs[row] for row in rows})
    change = FreedEarly(one, event, blocks, dict.fromkeys(rows, KEPT), {})
    assert max(one.lives.ledger.allocated_after()) == 5 * 8 + 1
    assert change.peak(one) < 3 * 8


def test_what_else_holds_an_older_block_keeps_it_at_the_peak() -> None:
    # The third one is in another list, too: at the peak it is there, though the newest is not.
    one = traced(iterations(5), LOOP)
    event = one.lives.ledger.peak()
    assert freed(one, event, range(0, 10, 2), {4: VARIABLE}).peak(one) == 8 + 8


def test_a_graph_that_is_detached_everywhere_has_one_iteration() -> None:
    # A loop of a tensor that is computed from that of the iteration before, so that each graph
    # leads to all blocks; a variable has a result of the fourth iteration.
    one = traced([*iterations(5), Life(1, 15, [15], None)], [*LOOP, 3])
    event = one.lives.ledger.peak()
    rows = [row_of(one.lives.ledger, life) for life in range(0, 10, 2)]
    result = row_of(one.lives.ledger, 10)
    saved, graph = replace(KEPT, kept=Kept.SAVED), replace(VARIABLE, kept=Kept.SAVED)
    holders = {
        **dict.fromkeys(rows, saved),
        rows[-1]: replace(KEPT, graphs=1),
        result: replace(VARIABLE, graphs=1),
    }
    blocks = held_blocks(one.lives, dict.fromkeys(rows, Need.NEVER_AGAIN))
    others = dict.fromkeys(rows, graph)
    change = FreedEarly(one, event, blocks, holders, others, Remedy.DETACHED)
    assert change.peak(one) == 8 + 8 + 4 + 1  # the newest tensor, and what the result needs
    assert change.with_remedy(Remedy.RELEASED).peak(one) == 5 * 8 + 4 + 1


def test_a_limited_cache_keeps_its_newest_result() -> None:
    one = traced(iterations(5), LOOP)
    event = one.lives.ledger.peak()
    cache = replace(KEPT, root=HolderRoot.CACHE)
    assert freed(one, event, range(0, 10, 2), first=cache).peak(one) == 8 + 4
    assert freed(one, event, range(0, 8, 2), first=cache).peak(one) == 8 + 4
    # One that waits for its first use is not in the cache, if all that holds it is known.
    lives = [*iterations(5), Life(8, 22, [40], None), Life(20, 24, [24], 24)]
    waits = traced(lives, [*LOOP, 1, 3])
    event = waits.lives.ledger.peak()
    rows = [row_of(waits.lives.ledger, life) for life in (*range(0, 10, 2), 10)]
    blocks = held_blocks(waits.lives, dict.fromkeys(rows[:-1], Need.NEVER_AGAIN))
    holders = {**dict.fromkeys(rows, cache), rows[-1]: VARIABLE}
    assert waits.lives.needs(event)[rows[-1]] is Need.NOT_YET
    assert FreedEarly(waits, event, blocks, holders, {}).peak(waits) == 8 + 20
    others = {rows[-1]: VARIABLE}
    assert FreedEarly(waits, event, blocks, holders, others).peak(waits) == 8 + 8 + 20


def test_what_waits_is_a_variable_until_the_next_one_comes() -> None:
    batches = [Life(8, at, [10 * at], None) for at in range(1, 6)]
    spikes = [Life(4, 10 * at + 5, [10 * at + 5], 10 * at + 5) for at in range(1, 6)]
    used = [Life(1, 10 * at, [10 * at], 10 * at) for at in range(1, 6)]
    one = traced([*batches, *spikes, *used], [1] * 5 + [2] * 5 + [3] * 5)
    event = one.lives.ledger.peak()
    needs = one.lives.needs(event)
    rows = [row for row, need in needs.items() if need is Need.NOT_YET]
    change = FreedEarly(
        one, event, held_blocks(one.lives, {row: needs[row] for row in rows}), {}, {}
    )
    assert change.peak(one) == 8 + 8 + 1


def steps_of(*counts: int, traced_steps: Collection[int]) -> tuple[PeakSite, list[KindedTrace]]:
    """The peak of a run, and the traces of some of its steps: each is a loop of so many iterations,
    of which a list keeps the blocks.
    """
    traces = {at: traced(iterations(count), LOOP) for at, count in enumerate(counts)}
    for at, one in traces.items():
        one.lives.ledger.trace.step = at
    peaks = {at: max(one.lives.ledger.allocated_after()) for at, one in traces.items()}
    steps = [step(at, {"forward": peak}, device="cuda:0") for at, peak in peaks.items()]
    chosen = [traces[at].lives.ledger.trace for at in traced_steps]
    (site,) = device_peaks(recording(steps, chosen))
    return site, list(traces.values())


def known(site: PeakSite, main: KindedTrace) -> RunPeak:
    event = main.lives.ledger.peak()
    lives = range(0, 10, 2)
    (found,) = over_all_steps(site, [freed(main, event, lives, {8: VARIABLE})])
    return found


def test_the_most_of_all_steps_counts() -> None:
    site, (main, other, _) = steps_of(5, 4, 1, traced_steps=(0, 1, 2))
    # A step with another kind of memory keeps what it has.
    assert known(site, main) == RunPeak(8 + 4, at_least=False)
    lines = [7] * 8
    elsewhere = traced(iterations(4), lines)
    elsewhere.lives.ledger.trace.step = 1
    chosen = [main.lives.ledger.trace, elsewhere.lives.ledger.trace]
    steps = [step(at, {"forward": peak}, device="cuda:0") for at, peak in enumerate((44, 36))]
    (site,) = device_peaks(recording(steps, chosen))
    assert known(site, main) == RunPeak(4 * 8 + 4, at_least=False)
    assert other.lives.ledger.trace.step == 1


def test_a_step_that_did_not_raise_the_counters_is_known_by_its_trace() -> None:
    """Its peak may be the same, but with the change it has more: it keeps another kind of memory,
    by another line.
    """
    main, other = traced(iterations(5), LOOP), traced(iterations(5), [7] * 10)
    other.lives.ledger.trace.step = 1
    chosen = [one.lives.ledger.trace for one in (main, other)]
    bounds = window("cuda:0", Peak(1, 44))
    high = step(0, {"forward": 44}, device="cuda:0")
    low = step(1, {"forward": 44}, device="cuda:0", windows=(bounds,))
    (site,) = device_peaks(recording([high, low], chosen))
    assert known(site, main) == RunPeak(5 * 8 + 4, at_least=False)


def test_a_step_without_a_trace_is_like_one_with_the_same_peak() -> None:
    site, (main, *_) = steps_of(5, 5, 5, traced_steps=(0,))
    assert known(site, main) == RunPeak(8 + 4, at_least=False)
    site, (main, *_) = steps_of(5, 4, 5, traced_steps=(0,))
    assert known(site, main) == RunPeak(8 + 4, at_least=True)


def test_a_smaller_block_is_smaller_in_other_steps() -> None:
    site, (main, other) = steps_of(5, 4, traced_steps=(0, 1))

    def rule(live: LiveMemory) -> Iterator[Excess]:
        rows = [row for row in live.rows if live.size[row] == 8]
        yield Excess(Answer("halved", "", ""), rows[0], rows, "", dict.fromkeys(rows, 4))

    live = LiveMemory(main.lives, main.lives.ledger.peak())
    change = Smaller(main, next(rule(live)), rule)
    assert change.peak(main) == 5 * 4 + 4
    assert change.peak(other) == 4 * 4 + 4
    assert over_all_steps(site, [change]) == [RunPeak(5 * 4 + 4, at_least=False)]
    # What a rule does not find there is as much smaller as at the peak.
    blind = Smaller(main, next(rule(live)), lambda live: iter(()))
    assert blind.peak(other) == 4 * 4 + 4
