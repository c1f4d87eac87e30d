"""What the blocks of a trace are needed for, from the operators that used them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.analysis.compare.diff import diff_marks, rows_by_need
from gpuprobe.analysis.inspection.lives import Lives
from gpuprobe.analysis.peak.needs import Biographies, needs_at
from gpuprobe.analysis.peak.peaks import high_water
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.needs import Need, NeedLine, NeedModule, NeedRow, NeedTable
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.trace import USE_COLUMNS, MemoryTrace, UsedLater
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.sections.parts import Line
from gpuprobe.reporters.sections.report.needs import needs_parts

ALLOC, FREE, DONE = (
    TraceAction.ALLOC.code,
    TraceAction.FREE_REQUESTED.code,
    TraceAction.FREE_COMPLETED.code,
)


@dataclass
class Life:
    """A block: born in operator ``born`` (0: before the trace), used by operators, freed before the
    operator after ``freed`` begins; None: it survives. ``later``: a later step uses it."""

    size: int
    born: int
    uses: list[int]
    freed: int | None
    later: bool = False
    traced: bool = True


def trace_of(
    lives: list[Life], *, steps: int = 1, ended: bool = True, failure: int = 0
) -> MemoryTrace:
    """A trace of these blocks; each has an address of its own. Operator n makes its blocks at its
    begin, and frees happen when it has ended. Memory runs out in operator ``failure`` (0: never).
    """
    trace = MemoryTrace("cuda:0", step=0)
    rows = _events_of(lives, trace, failure)
    for columns in (trace.baseline, trace.events):
        for column in sorted(USE_COLUMNS):
            values = getattr(columns, column)
            values.extend([0] * (len(columns) - len(values)))
    name = trace.stacks.string("mm")
    later: dict[bool, set[int]] = {False: set(), True: set()}  # by whether it is an event's row
    for at, life in enumerate(lives):
        columns, row = trace.events if life.born else trace.baseline, rows[at]
        columns.made[row] = int(life.traced) * max(1, life.born)
        if life.uses:
            columns.first_use[row], columns.last_use[row] = min(life.uses), max(life.uses)
            columns.last_name[row] = name
        if life.later:
            later[bool(life.born)].add(row)
    trace.used_later = UsedLater(steps, ended, False, tuple(later[True]), tuple(later[False]))
    return trace


def _events_of(lives: list[Life], trace: MemoryTrace, failure: int) -> dict[int, int]:
    """Fill the events and the baseline; the row of each life."""
    happens: list[tuple[int, int, int, int]] = []  # operator, order, action, life
    if failure:
        happens.append((failure, 1, TraceAction.OOM.code, 0))
    rows = {}
    for at, life in enumerate(lives):
        if life.born:
            happens.append((life.born, 0, ALLOC, at))
        else:
            rows[at] = len(trace.baseline)
            trace.baseline.append(ALLOC, (at + 1) << 20, life.size)
        if life.freed is not None:
            happens += [(life.freed, 1, FREE, at), (life.freed, 2, DONE, at)]
    for operator, _, action, at in sorted(happens):
        if action == ALLOC:
            rows[at] = len(trace.events)
        trace.events.append(action, (at + 1) << 20, lives[at].size)
        trace.events.operator.append(operator)
    return rows


def needs(lives: list[Life], operator: int, **options: int) -> dict[int, Need]:
    """The need of each block that is alive just after the last allocation of an operator."""
    trace = trace_of(lives, **options)
    ledger = ledger_of(trace)
    event = max(
        i
        for i, (action, number) in enumerate(
            zip(trace.events.action, trace.events.operator, strict=True)
        )
        if action == ALLOC and number == operator
    )
    found = Biographies(ledger)
    addresses = ledger.values("address", range(len(ledger)))
    return {(addresses[row] >> 20) - 1: found.need(row, event) for row in ledger.alive(event)}


def test_scratch_of_the_operator_that_runs_is_no_tensor() -> None:
    lives = [Life(8, 1, [1, 2], None), Life(4, 2, [2], 3), Life(32, 2, [], 2, traced=False)]
    found = Biographies(ledger_of(trace_of(lives)))
    peak = found.ledger.peak()
    assert set(found.needs(peak).values()) == {Need.IN_USE}
    assert found.tensors(peak) == 8 + 4


def test_each_need() -> None:
    lives = [
        Life(8, 1, [2, 9], None, later=True),  # 0: used before and after
        Life(8, 1, [2, 5], 9),  # 1: in use by the operator of the peak
        Life(8, 1, [7], 9),  # 2: its first use is to come
        Life(8, 1, [2], 9),  # 3: used before, freed much later
        Life(8, 1, [], 9),  # 4: never used
        Life(8, 1, [], 9, traced=False),  # 5: of a library
        Life(8, 5, [6], 9),  # 6: just made
        Life(8, 1, [2], None),  # 7: it survives, and no later step uses it
        Life(8, 1, [], None, later=True),  # 8: first used by a later step
    ]
    assert needs(lives, 5) == {
        0: Need.LATER,
        1: Need.IN_USE,
        2: Need.NOT_YET,
        3: Need.NEVER_AGAIN,
        4: Need.NEVER,
        5: Need.UNTRACED,
        6: Need.IN_USE,
        7: Need.NEVER_AGAIN,
        8: Need.NOT_YET,
    }


def test_what_the_last_step_used_is_open_and_what_it_did_not_use_is_known() -> None:
    lives = [
        Life(8, 0, [2], None),  # a parameter: the step used it
        Life(8, 0, [], None, traced=True),  # of an earlier step, and not used in this one
        Life(8, 1, [1], None),  # made in this step
        Life(8, 5, [6], 7),
    ]
    expected = {0: Need.OPEN, 1: Need.NEVER, 2: Need.OPEN, 3: Need.IN_USE}
    assert needs(lives, 5, steps=0) == expected
    # A program that failed, or still runs, might have used it.
    assert needs(lives, 5, steps=0, ended=False) == {**expected, 1: Need.OPEN}


def test_without_uses_the_table_is_unavailable() -> None:
    trace = MemoryTrace("cuda:0")
    trace.events.append(ALLOC, 1 << 20, 512)
    assert isinstance(needs_at(trace, 0), Unavailable)


sizes = st.integers(1, 1 << 20)


@st.composite
def random_lives(draw: st.DrawFn) -> list[Life]:
    """Blocks whose uses are within their lives."""
    found = []
    for _ in range(draw(st.integers(1, 12))):
        born = draw(st.integers(0, 8))
        freed = draw(st.none() | st.integers(max(born, 1), 10))
        uses = draw(st.lists(st.integers(max(born, 1), freed or 10), max_size=4))
        later = freed is None and draw(st.booleans())
        found.append(Life(draw(sizes), born, uses, freed, later, draw(st.booleans()) or bool(uses)))
    return found


@given(random_lives(), st.integers(0, 2), st.booleans())
def test_the_rows_sum_to_the_peak_and_earlier_frees_never_raise_it(
    lives: list[Life], steps: int, ended: bool
) -> None:
    trace = trace_of(lives, steps=steps, ended=ended)
    if not trace.events.action or not Biographies(trace).traced:
        return
    ledger = ledger_of(trace)
    table = needs_at(ledger, ledger.peak())
    assert isinstance(table, NeedTable)
    assert table.total == max(ledger.allocated_after())
    assert sum(row.bytes for row in table.rows) == table.total
    for row in table.rows:
        assert sum(line.bytes for line in row.lines) + row.more == row.bytes
        assert sum(line.blocks for line in row.lines) <= row.blocks
        assert sum(module.bytes for module in row.modules) + row.more_modules == row.bytes
    assert table.freed_after_use <= table.total


@given(random_lives())
def test_the_peak_with_early_frees_is_that_of_shorter_lives(lives: list[Life]) -> None:
    """The figure equals a trace in which each block really is freed after its last use."""
    trace = trace_of(lives)
    if not trace.events.action or not Biographies(trace).traced:
        return
    table = needs_at(trace, ledger_of(trace).peak())
    assert isinstance(table, NeedTable)
    moments = []
    for operator in range(11):
        for moment in (0, 1):  # while it runs, after its frees
            held = 0
            for life in lives:
                last = max(life.uses, default=life.born)
                known = bool(life.uses or life.traced)
                end = life.freed if not known else min(life.freed or 99, last)
                if life.freed is None and life.later:
                    end = None
                if not life.born and not life.uses and known and not life.later:
                    continue  # not in this trace at all
                alive_from = life.born <= operator
                alive_to = end is None or operator < end or (operator == end and not moment)
                held += life.size * (alive_from and alive_to)
            moments.append(held)
    assert table.freed_after_use == max(moments)


@given(random_lives(), st.integers(0, 2), st.booleans(), st.integers(0, 10))
def test_the_spells_of_a_block_are_its_need_at_each_event(
    lives: list[Life], steps: int, ended: bool, failure: int
) -> None:
    ledger = ledger_of(trace_of(lives, steps=steps, ended=ended, failure=failure))
    found = Lives(ledger)
    if not found.traced:
        return
    of = Biographies(ledger)
    for row in range(len(ledger)):
        spells = dict(found.spells(row))
        need = None
        for event in range(ledger.start[row], ledger.freed[row]):
            need = spells.pop(event, need)
            assert need is of.need(row, event) is found.need(row, event + 1)
        assert not spells
    positions = range(ledger.events + 1)
    bands = found.bands(range(len(ledger)), positions)
    totals = [sum(band[at] for band in bands.values()) for at in positions]
    assert totals == list(ledger.allocated_after())


@given(random_lives(), random_lives())
def test_changes_by_need_sum_to_the_change_of_the_peak(one: list[Life], two: list[Life]) -> None:
    marks = [high_water(trace_of(lives)) for lives in (one, two)]
    rows = diff_marks(*marks)["need"]
    tables = [needs_at(mark.ledger, mark.event) for mark in marks]
    if isinstance(rows, Unavailable):
        assert any(isinstance(table, Unavailable) for table in tables)
        return
    assert sum(row.delta for row in rows) == marks[1].allocated - marks[0].allocated
    for need, some in rows_by_need(rows).items():
        before, after = (
            sum(row.bytes for row in table.rows if row.need == need.value)
            for table in tables
            if isinstance(table, NeedTable)
        )
        assert (before, after) == (sum(r.before for r in some), sum(r.after for r in some))


def test_a_diff_with_one_traced_side_says_which() -> None:
    traced = high_water(trace_of([Life(512, 1, [1], None)]))
    other = MemoryTrace("cuda:0")
    other.events.append(ALLOC, 1 << 20, 512)
    rows = diff_marks(high_water(other), traced)["need"]
    assert isinstance(rows, Unavailable)
    assert "second recording only" in rows.reason


def test_the_life_of_a_block() -> None:
    trace = trace_of([Life(512, 1, [2, 4], 6), Life(512, 3, [], None, later=True)])
    ledger = ledger_of(trace)
    first, second = Lives(ledger).life(0), Lives(ledger).life(1)
    assert first.first is not None
    assert first.last is not None
    assert (first.first.position, first.last.position, first.last.operator) == (1, 2, "mm")
    assert not first.later_step
    assert second.first is second.last is None
    assert second.later_step


def test_what_needs_memory_later_is_named() -> None:
    """Used later in its step, or used before and by a later step."""
    blocks = [Life(512, 1, [1, 4], 5), Life(256, 1, [1], None, later=True), Life(1, 2, [2], 3)]
    trace = trace_of(blocks)
    table = needs_at(trace, 2)
    assert isinstance(table, NeedTable)
    (row,) = [row for row in table.rows if row.need == Need.LATER.value]
    lines = {line.bytes: line.later_step for line in row.lines}
    assert lines == {512: False, 256: True}


@pytest.mark.parametrize(
    ("need", "use"), [(Need.NOT_YET, "will be last used by"), (Need.NEVER_AGAIN, "last used by")]
)
def test_the_last_use_of_memory_that_is_not_used_yet_is_to_come(need: Need, use: str) -> None:
    made, last = Place("a.py", 3), Place("a.py", 5)
    line = NeedLine(made, 512, 1, "activation", last, "mm", "optimizer")
    table = NeedTable(0, 512, (NeedRow(need.value, 512, 1, (line,), 0),), 512)
    texts = [part.text for part in needs_parts(table, needed=True) if isinstance(part, Line)]
    assert texts == [f"512 B {need.label}: activation from a.py:3; {use} mm at a.py:5 (optimizer)"]


def _of_workspaces(size: int) -> NeedTable:
    line = NeedLine(NoPlace.UNKNOWN, 2 * size, 2, "workspace", None, "", "")
    row = NeedRow(Need.IN_USE.value, 2 * size, 2, (line,), 0)
    return NeedTable(0, 2 * size + 512, (row,), 2 * size + 512)


def test_a_setting_for_workspaces_has_a_value_and_what_it_saves() -> None:
    text = _of_workspaces(8_519_680).smaller
    assert "CUBLAS_WORKSPACE_CONFIG=:16:8 makes each 128.0 KiB, 16.0 MiB less in all" in text
    assert "CUBLAS" not in _of_workspaces(128 << 10).smaller  # set already


def test_modules_that_repeat_are_one() -> None:
    lives = [Life(8 << layer, 1, [2, 9], None, later=True) for layer in range(4)]
    trace = trace_of([*lives, Life(8, 5, [6], 9)])
    string = trace.stacks.string
    names = [string(f"net.layers.{layer}.up") for layer in range(4)]
    trace.events.module.extend([0] * (len(trace.events) - len(trace.events.module)))
    for row, name in enumerate(names):
        trace.events.module[row] = name
    table = needs_at(trace, 4)
    assert isinstance(table, NeedTable)
    (later,) = [row for row in table.rows if row.need == Need.LATER.value]
    assert [(one.key, one.bytes, one.blocks) for one in later.modules] == [
        ("net.layers.*.up", 8 * 15, 4)
    ]


@pytest.mark.parametrize(("in_modules", "told"), [(512, True), (1, False)])
def test_modules_are_told_where_all_lines_are_one(in_modules: int, told: bool) -> None:
    """Such as that which calls a Trainer."""
    lines = tuple(
        NeedLine(
            Place("train.py", 9), 1024, 1, "activation", Place("train.py", 9), name, "backward"
        )
        for name in ("mm", "mul")
    )
    modules = (
        NeedModule("net.*.up", in_modules, 1),
        NeedModule("(no module)", 2048 - in_modules, 1),
    )
    for other, shown in ((lines, told), (lines[:1], False)):
        size = 1024 * len(other)
        row = NeedRow(Need.IN_USE.value, size, len(other), other, 0, modules)
        parts = needs_parts(NeedTable(0, size, (row,), size), needed=True)
        texts = [part.text for part in parts if isinstance(part, Line)]
        assert any("in use now, by module: net.*.up" in text for text in texts) == shown
