"""The plot and what the screens show, as plain data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.analysis.inspection.steps import StepPeak
from gpuprobe.analysis.peak.peaks import Share
from gpuprobe.model.memory import AllocatorCounts, Category
from gpuprobe.model.needs import Need
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.run.session import (
    DeviceWindow,
    Environment,
    HostWindow,
    KnownTensors,
    Phase,
    ProgramError,
    Session,
    SessionEnd,
    Step,
)
from gpuprobe.model.trace import Frame
from gpuprobe.model.values import Bytes, Peak, Unavailable
from gpuprobe.reporters.html.report import asset
from gpuprobe.tui.monitor.keys import KEYS
from gpuprobe.tui.probe_app import APP_KEYS
from gpuprobe.tui.viewer.block import source_lines, stack_rows
from gpuprobe.tui.viewer.run_model import detail_lines, model_of
from gpuprobe.tui.viewer.screen import VIEW_KEYS
from gpuprobe.tui.widgets import plot
from gpuprobe.tui.widgets.keymap import Key
from gpuprobe.tui.widgets.palette import PALETTES, letter
from gpuprobe.tui.widgets.plot import LABEL, draw
from gpuprobe.tui.widgets.styled_text import line_width, text_of

MIB = 1 << 20


@given(st.lists(st.integers(0, 1 << 40), max_size=400), st.integers(14, 200), st.integers(2, 30))
def test_a_plot_fits_and_loses_no_peak(values: list[int], width: int, height: int) -> None:
    plot = draw(values, width, height)
    assert len(plot.lines) == height
    assert all(line_width(line) <= max(width, 17) for line in plot.lines)
    if not values:
        return
    shown = [index for column in plot.columns for index in column]
    assert set(shown) == set(range(len(values)))
    top = text_of(plot.lines[0])[LABEL:]
    if max(values):  # the highest value reaches the top, in the column that holds it
        full = {i for i, cell in enumerate(top) if cell == "█"}
        at = values.index(max(values))
        assert any(at in plot.columns[i] for i in full)


def step(index: int, peak: int, *, ended_by: str = "optimizer", exact: bool = True) -> Step:
    size = Bytes(peak // 2)
    counts = AllocatorCounts(size, size, Bytes(peak * 2), size)

    def window(high: int) -> DeviceWindow:
        bounds = Peak.exactly(high) if exact else Peak(high, high * 2)
        return DeviceWindow("cuda:0", counts, counts, bounds, bounds)

    phases = (
        Phase("forward", 0, 3_000, 1, (window(peak // 2),)),
        Phase("forward/inner", 0, 1_000, 1, (window(peak),)),
        Phase("backward", 3_000, 2_000, 1, (window(peak),)),
    )
    tensors = KnownTensors("cuda:0", {Category.PARAMETER: Bytes(MIB)}, Bytes(3 * MIB))
    return Step(index, 0, 5_000, phases, (window(peak),), tensors=(tensors,), ended_by=ended_by)


def recording(*ranks: RankRecording) -> Recording:
    return Recording("/runs/mine.gpuprobe", (1, 0), ranks)


def rank(*steps: Step, end: SessionEnd | None = None, number: int = 0) -> RankRecording:
    session = Session(0.0, 1, ("train.py",), "trace", ("cuda:0",), "/runs", rank=number)
    environment = Environment("0", "3", "Linux", "another-host", torch="2.13.0")
    return RankRecording(session, environment, steps, end=end)


def test_the_table_shows_peaks_and_their_phase() -> None:
    model = model_of(recording(rank(step(0, 4 * MIB), step(1, 9 * MIB), end=SessionEnd(10**9))))
    assert model.title == "mine.gpuprobe"
    assert model.state == "complete after 1.00 s"
    assert model.measure == "allocated on cuda:0"
    assert [row.peak for row in model.rows] == ["4.0 MiB", "9.0 MiB"]
    assert {row.phase for row in model.rows} == {"backward"}
    assert model.highest == 1
    assert not model.running


def test_bounds_are_shown_as_such() -> None:
    model = model_of(recording(rank(step(0, MIB, exact=False), end=SessionEnd(1))))
    assert model.rows[0].peak == "≥1.0 MiB"


def test_states_in_words() -> None:
    failed = SessionEnd(1, ProgramError("KeyError", "\x1b[31mred"))
    assert model_of(recording(rank(end=failed))).state == "failed: KeyError: \\x1b[31mred"
    # On another machine nobody can tell whether it still runs: it is followed.
    assert model_of(recording(rank(step(0, MIB)))).running
    assert model_of(recording()).state == "no rank has started"


def test_without_device_counters_the_process_is_shown() -> None:
    host = HostWindow(Bytes(MIB), Bytes(2 * MIB), Peak(2 * MIB, 3 * MIB))
    phase = Phase("forward", 0, 1, 1, (), host)
    model = model_of(recording(rank(Step(0, 0, 1, (phase,), (), host), end=SessionEnd(1))))
    assert model.measure == "resident memory of the process"
    row = model.rows[0]
    assert (row.peak, row.end, row.phase) == ("≥2.0 MiB", "2.0 MiB", "forward")


def test_ranks_are_chosen_by_position_and_clamped() -> None:
    both = recording(rank(step(0, MIB)), rank(step(0, 2 * MIB), number=1))
    assert [model_of(both, i).rows[0].peak for i in (0, 1, 9)] == ["1.0 MiB", "2.0 MiB", "2.0 MiB"]
    assert "rank 1 of 2" in model_of(both, 1).facts


def test_the_panel_says_what_it_knows_and_what_not() -> None:
    model = model_of(recording(rank(step(0, 4 * MIB), end=SessionEnd(1))))
    row = model.rows[0]

    def texts(peak: StepPeak | Unavailable | None) -> list[str]:
        return [text_of(line) for line in detail_lines(model, row, peak)]

    waiting = "\n".join(texts(None))
    assert "reading the trace" in waiting
    assert "everything else" in waiting
    assert "  inner" in waiting  # nested phases are indented
    missing = texts(Unavailable("no trace\x1b"))
    assert "no trace\\x1b" in missing
    peak = StepPeak("cuda:0", 4 * MIB, "backward", (), (), ())
    assert "4.0 MiB on cuda:0, in backward" in texts(peak)


def test_bars_of_a_step_have_one_scale_and_the_colours_of_their_categories() -> None:
    model = model_of(recording(rank(step(0, 4 * MIB), end=SessionEnd(1))))
    row = model.rows[0]
    shares = (Share("activation", 6 * MIB, 3), Share("parameter", 2 * MIB, 1))
    peak = StepPeak("cuda:0", 8 * MIB, "backward", shares, (), ())
    lines = detail_lines(model, row, peak)
    drawn = {text_of(line).split()[3]: line for line in lines[-8:] if "■" in text_of(line)}
    assert {role for _, role in drawn["activation"]} >= {"activation"}
    assert text_of(drawn["activation"]).count("█") == 7  # 6 of 8 MiB in 10 cells: 7.5
    assert text_of(drawn["parameter"]).count("█") == 2
    held = next(line for line in lines if "everything else" in text_of(line))
    assert text_of(held).count("█") <= 5  # 4 MiB at the end, on the same scale
    plain = [text_of(line) for line in detail_lines(model, row, peak, plain=True)]
    assert any(" A activation" in line for line in plain)


FORWARD = Frame("/home/me/project/train.py", 3, "forward")
TORCH = Frame("/x/lib/python3.11/site-packages/torch/nn/modules/module.py", 9, "_call_impl")
NATIVE = Frame("??", 0, "at::native::empty")
LIBRARY = Frame("/x/lib/python3.11/site-packages/transformers/models/x.py", 5, "attend")
MAIN = Frame("/home/me/project/train.py", 9, "main")


def test_a_folded_stack_begins_with_the_user_s_line() -> None:
    stack = (NATIVE, LIBRARY, TORCH, FORWARD, TORCH, TORCH, LIBRARY, TORCH, MAIN)
    assert stack_rows(stack, folded=True) == [3, None, 6, None, 8]
    assert stack_rows(stack, folded=False) == list(range(9))
    assert stack_rows((NATIVE, LIBRARY, TORCH), folded=True) == [1]
    assert stack_rows((NATIVE, TORCH), folded=True) == [0, 1]  # there is nothing else
    assert stack_rows((), folded=True) == []


def test_source_that_is_not_here_leaves_the_recorded_line() -> None:
    (marked, line), (_, why) = source_lines(FORWARD, rank().session)
    assert marked
    assert line == "…/project/train.py:3 in forward"
    assert "No such file" in why


def test_the_page_and_the_screens_have_one_palette_and_every_category() -> None:
    style = asset("palette.css")
    light, *dark = re.findall(r"\{([^{}]*--parameter:[^{}]*)\}", style)
    assert len(dark) == 2  # what the browser prefers, and what the reader chose
    for theme, blocks in (("light", [light]), ("dark", dark)):
        for block in blocks:
            colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
            for kind in (*Category, *Need):
                assert PALETTES[theme].roles[kind.value] == colours[kind.value]
    order = re.search(r"const CATEGORIES = \[(.*?)\]", asset("base.js"), re.DOTALL)
    assert order is not None
    assert set(re.findall(r'"(\w+)"', order.group(1))) == {c.value for c in Category}
    needs = re.search(r"const NEEDS = \{(.*?)\}", asset("base.js"), re.DOTALL)
    assert needs is not None
    assert dict(re.findall(r'(\w+): "([^"]*)"', needs.group(1))) == {n.value: n.short for n in Need}
    assert set(plot._ORDER) == {*Category, *Need}
    for kinds in (Category, Need):
        assert len({letter(kind) for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("keys", [KEYS, VIEW_KEYS], ids=["top", "view"])
def test_no_key_is_bound_twice(keys: Sequence[Key]) -> None:
    """Textual would call the first action alone."""
    names = Counter(
        name for key in (*keys, *APP_KEYS) for names in key.actions for name in names.split(",")
    )
    assert [name for name, count in names.items() if count > 1] == []
