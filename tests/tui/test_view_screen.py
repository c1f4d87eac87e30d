"""The screen of a run: followed, travelled through, drilled into, in Textual's test driver."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from screen_svg import screen_text
from textual.pilot import Pilot
from view_recordings import Run

from gpuprobe.api.recordings import load, report
from gpuprobe.model.run.session import Placed
from gpuprobe.model.values import Bytes
from gpuprobe.recording.load import Followed
from gpuprobe.tui.probe_app import TextScreen
from gpuprobe.tui.viewer.app import ViewApp
from gpuprobe.tui.viewer.block import BlockScreen
from gpuprobe.tui.viewer.screen import PANES, ViewScreen
from gpuprobe.tui.viewer.trace import TracePane
from gpuprobe.tui.widgets.table import ItemTable
from gpuprobe.tui.widgets.text_pane import TextPane

SIZES = [(60, 16), (100, 30), (200, 60)]


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Let the app run until the condition holds; fails after a minute."""
    for _ in range(3000):
        if condition():
            return
        await pilot.pause(0.02)
    raise AssertionError("it never happened")


def text(app: ViewApp, selector: str) -> str:
    return app.screen.query_one(selector, TextPane).text


def rows(app: ViewApp, selector: str) -> ItemTable:
    return app.screen.query_one(selector, ItemTable)


def lines(app: ViewApp, selector: str) -> list[str]:
    shown = rows(app, selector)
    return [shown.text_of(index) for index in range(shown.count)]


def pane(app: ViewApp) -> TracePane:
    return app.screen.query_one(TracePane)


def viewer(run: Run) -> ViewApp:
    return ViewApp(Followed(run.path), interval=0.05)


@asynccontextmanager
async def traced(run: Run) -> AsyncIterator[tuple[ViewApp, Pilot[None]]]:
    """The viewer at the trace of a run's step."""
    app = viewer(run)
    async with app.run_test(size=(130, 40)) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == run._index)
        await pilot.press("t")
        await until(pilot, lambda: pane(app).ready)
        yield app, pilot


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    for index in range(6):
        made.step(traced=index < 3)
    made.finding()
    made.finding(race=False)
    return made


async def test_every_pane_shows_a_finished_run(run: Run) -> None:
    run.end()
    app = viewer(run)
    async with app.run_test(size=(60, 16)) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 6)
        assert "complete after 2.00 s" in text(app, "#title")
        assert rows(app, "#steps").cursor == 5  # the peak
        await pilot.press("k", "k", "g", "j")
        assert rows(app, "#steps").cursor == 1
        await pilot.press("p")
        assert rows(app, "#steps").cursor == 5
        assert not app.screen.query_one("#panel").display  # there is no room for it
        assert not app.screen.query_one("#plot").display
        await pilot.press("2")
        await until(pilot, lambda: "left behind" in text(app, "#now"))
        await until(pilot, lambda: "holes" in text(app, "#now"))
        await pilot.press("3")
        await until(pilot, lambda: pane(app).ready)
        await pilot.press("4")
        assert "complete" in lines(app, "#ranks-pane")[0]
        await pilot.press("5")
        await until(pilot, lambda: "GP201" in lines(app, "#finding-rows")[1])  # after the cause
        assert "memory grows by" in text(app, "#findings-detail")
        await pilot.press("j")
        assert "side.wait_stream(main)" in text(app, "#findings-detail")
        await pilot.press("tab")
        assert isinstance(app.screen, ViewScreen)
        assert isinstance(app.screen._pane, PANES[0])


async def test_a_step_s_peak_and_its_lines(run: Run) -> None:
    run.end()
    app = viewer(run)
    async with app.run_test(size=(130, 40)) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 6)
        await pilot.press("g", "j")
        await until(pilot, lambda: "model.py:6 in forward" in text(app, "#detail"))
        assert "activation" in text(app, "#detail")
        await pilot.press("G")
        await until(pilot, lambda: "this step was not traced" in text(app, "#detail"))


async def test_time_travel(run: Run) -> None:
    """Keys move along the trace, and what was allocated at the cursor is what is shown."""
    run.end()
    app = viewer(run)
    async with app.run_test(size=(130, 40)) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 6)
        await pilot.press("g", "j", "t")
        await until(pilot, lambda: pane(app).ready)
        here = pane(app)
        look = here._inspector
        assert look is not None
        assert look.step == 1
        assert here.position == look.peak
        assert "the peak" in text(app, "#at")
        for keys in (("comma",), ("full_stop", "full_stop"), ("left",), ("L",)):
            before = here.position
            await pilot.press(*keys)
            assert here.position != before
            await until(pilot, lambda: here.ready)
            assert here.state is not None
            assert here.state.allocated == look.allocated[here.position]
            assert sum(here.state.categories.values()) == here.state.allocated
        await pilot.press("plus", "plus")
        assert here.timeline.first <= here.position < here.timeline.end
        assert here.timeline.end - here.timeline.first < len(look) // 3
        await pilot.press("minus", "minus", "minus")
        assert (here.timeline.first, here.timeline.end) == (0, len(look))
        await pilot.press("p")
        assert here.position == look.peak
        await pilot.press("right_square_bracket")
        await until(pilot, lambda: here._inspector is not look and here.ready)
        assert here._inspector is not None
        assert here._inspector.step == 2
        await pilot.press("b")
        await until(pilot, lambda: here.state is not None and here.state.grouping == "module")
        assert any("net.first" in line for line in lines(app, "#groups"))


async def test_the_segment_map_and_its_orders(run: Run) -> None:
    run.end()
    app = viewer(run)
    async with app.run_test(size=(130, 40)) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 6)
        await pilot.press("t", "m")
        await until(pilot, lambda: rows(app, "#segments").count == 8)
        free = [line for line in lines(app, "#segments") if "·" in line]
        assert free
        assert all("10.0 MiB" in line for line in lines(app, "#segments"))
        await pilot.press("o")
        shares = [int(line.rpartition("%")[0].split()[-1]) for line in lines(app, "#segments")]
        assert shares == sorted(shares, reverse=True)


async def test_modules_of_equal_layers_are_one_row_that_opens(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.training.modules = [f"net.h.{layer}.mlp" for layer in range(4)]
    for _ in range(2):
        run.step()
    run.end()
    async with traced(run) as (app, pilot):
        await pilot.press("b")
        await until(pilot, lambda: any("net.h" in line for line in lines(app, "#groups")))
        shown = lines(app, "#groups")
        (at,) = (index for index, line in enumerate(shown) if "net.h.*.mlp  ×4 modules" in line)
        assert any("net.h.*.mlp ×4" in line for line in text(app, "#treemap").splitlines())
        exported = {group["key"] for group in pane(app).document()["groups"]}
        assert {f"net.h.{layer}.mlp" for layer in range(4)} <= exported
        assert not any("*" in key for key in exported)
        await pilot.press(*"j" * at, "enter")
        members = lines(app, "#groups")
        assert len(members) == 4
        assert all("net.h." in line and "×3" in line for line in members)
        await pilot.press("j", "enter")
        blocks = lines(app, "#groups")
        assert len(blocks) == 3
        assert all("activation" in line for line in blocks)
        await pilot.press("escape")
        assert lines(app, "#groups") == members
        assert rows(app, "#groups").cursor == 1
        await pilot.press("escape")
        assert lines(app, "#groups") == shown
        assert rows(app, "#groups").cursor == at


async def test_a_line_opens_to_its_modules(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.training.modules = [*(f"net.h.{layer}.mlp" for layer in range(4)), "net.head"]
    run.step()
    run.end()
    async with traced(run) as (app, pilot):
        assert "model.py:6 in forward  ×12" in lines(app, "#groups")[0]
        await pilot.press("enter")
        modules = lines(app, "#groups")
        assert [line.split()[-2:] for line in modules] in (
            [["×4", "modules"], ["net.head", "×3"]],
            [["×4", "modules"], ["net.head", "×2"]],
        )
        await pilot.press("enter")
        assert len(lines(app, "#groups")) == 4
        await pilot.press("enter")
        assert all("activation" in line for line in lines(app, "#groups"))
        await pilot.press("escape", "escape", "escape")
        assert "model.py:6 in forward  ×12" in lines(app, "#groups")[0]


async def test_drill_down_to_stack_and_source(run: Run) -> None:
    run.end()
    async with traced(run) as (app, pilot):
        assert "model.py:6 in forward" in lines(app, "#groups")[0]
        await pilot.press("enter")
        blocks = lines(app, "#groups")
        assert len(blocks) == 12
        assert all("activation" in line for line in blocks)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, BlockScreen))
        assert "model.py:6 in forward" in lines(app, "#frames")[0]  # torch's frames are folded
        assert rows(app, "#frames").cursor == 0
        assert "hidden = self.first(x)" in text(app, "#source")
        assert "activation" in text(app, "#block")
        await pilot.press("c")
        assert "linear.py:134" in lines(app, "#frames")[0]
        assert rows(app, "#frames").cursor == 1  # the first frame that is the user's
        await pilot.press("k")
        assert "linear.py:134" in text(app, "#source")  # the recorded line, for want of its source
        assert "source is not available" in text(app, "#source")
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, ViewScreen))
        assert len(lines(app, "#groups")) == 12
        await pilot.press("escape")
        assert len(lines(app, "#groups")) < 12


async def test_clicks_choose_panes_positions_and_rectangles(run: Run) -> None:
    run.end()
    app = viewer(run)
    async with app.run_test(size=(130, 40)) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 6)
        await pilot.click("#steps", offset=(5, 3))
        assert rows(app, "#steps").cursor == 2
        await pilot.click("#tabs", offset=(20, 0))
        await until(pilot, lambda: pane(app).ready)
        assert pane(app)._inspector is not None
        before = pane(app).position
        await pilot.click("#bands", offset=(30, 4))
        assert pane(app).position != before
        await until(pilot, lambda: pane(app).ready)
        last = pane(app).treemap.rects[-1]
        await pilot.click("#treemap", offset=(last.x + 1 + last.width // 2, last.y))
        wanted = pane(app).treemap.groups[last.item].key
        assert wanted.rpartition("/")[2] in lines(app, "#groups")[rows(app, "#groups").cursor]


async def test_a_run_is_followed_until_it_ends(run: Run) -> None:
    app = viewer(run)
    async with app.run_test(size=(130, 40)) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 6)
        assert "running" in text(app, "#title")
        await pilot.press("G")
        run.step()
        await until(pilot, lambda: rows(app, "#steps").count == 7)
        assert rows(app, "#steps").cursor == 6  # the last one is followed
        # A second optimizer's step amends the last one.
        last = run.step(traced=False)
        run.writer.step(replace(last, duration_ns=123_000_000))
        await until(pilot, lambda: "123.0 ms" in lines(app, "#steps")[-1])
        assert rows(app, "#steps").count == 8
        await pilot.press("3")
        await until(pilot, lambda: pane(app).ready)
        run.finding(line=14)
        await pilot.press("5")
        await until(pilot, lambda: "3 findings" in text(app, "#finding-rows"))
        await pilot.press("2")
        for _ in range(8):
            run.step(traced=False)
        await until(pilot, lambda: "grows by 2.0 MiB per step" in text(app, "#now"))
        run.end()
        await until(pilot, lambda: "complete" in text(app, "#title"))


async def test_a_deleted_recording_is_said_and_the_screen_lives_on(run: Run) -> None:
    app = viewer(run)
    async with app.run_test(size=(130, 40)) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 6)
        shutil.rmtree(run.path)
        await until(pilot, lambda: app.screen.query_one("#problem").has_class("shown"))
        assert "removed" in text(app, "#problem")
        assert rows(app, "#steps").count == 6
        await pilot.press("j", "d", "r", "3")
        await until(pilot, lambda: "cannot be read" in text(app, "#bands"))
        assert app.is_running


async def test_ranks_side_by_side(tmp_path: Path) -> None:
    for rank, slow in ((0, 1.0), (1, 1.0), (2, 3.0)):
        one = Run(tmp_path, rank=rank, world_size=3, slow=slow)
        for _ in range(4 + 3 * (rank == 1)):
            one.step(traced=False)
        one.end()
    app = viewer(one)
    async with app.run_test(size=(130, 40)) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 4)
        await pilot.press("4")
        shown = lines(app, "#ranks-pane")
        assert [line.split()[0] for line in shown] == ["0", "1", "2"]
        assert "highest peak" in shown[1]
        assert "slowest" in shown[2]
        await pilot.press("j", "enter")
        await until(pilot, lambda: rows(app, "#steps").count == 7)
        assert "rank 1 of 3" in text(app, "#title")
        await pilot.press("n", "n")
        await until(pilot, lambda: "rank 0 of 3" in text(app, "#title"))


async def test_hostile_names_are_text(tmp_path: Path) -> None:
    folder = tmp_path / "[red]x\x1b[31m"
    folder.mkdir()
    run = Run(folder, "r\x1b[2J.gpuprobe")
    run.step()
    run.end()
    async with traced(run) as (app, pilot):
        await pilot.press("enter", "enter")
        await until(pilot, lambda: isinstance(app.screen, BlockScreen))
        picture = app.export_screenshot()
        assert "\x1b" not in picture
        assert "r\\x1b[2J.gpuprobe" in text_of_title(app)


def text_of_title(app: ViewApp) -> str:
    return app.screen_stack[0].query_one("#title", TextPane).text


async def test_without_traces_it_says_what_is_needed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(traced=False)
    run.end()
    app = viewer(run)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 1)
        await pilot.press("3")
        await until(pilot, lambda: "needs a recording at level 'trace'" in text(app, "#bands"))


async def test_this_process_s_run_is_asked_about_at_the_driver(tmp_path: Path) -> None:
    """The fake fleet's first process is taken for the run's: NVML tells what it holds, and who
    else is there.
    """
    from gpuprobe.api.devices import inventory

    process = inventory(("nvml",), "8xh100", detail="table").processes[0]
    run = Run(tmp_path, pid=process.pid, hostname="elsewhere")
    for _ in range(3):
        run.step(traced=False)
    app = ViewApp(Followed(run.path), interval=0.05, demo="8xh100")
    async with app.run_test(size=(130, 40)) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 3)
        await pilot.press("2")
        await until(
            pilot, lambda: "H100 80GB HBM3: this process outside torch" in text(app, "#now")
        )
        assert "no other process" in text(app, "#now")


async def test_what_is_shown_is_saved_as_json(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.end()
    monkeypatch.chdir(tmp_path)
    app = viewer(run)
    async with app.run_test(size=(130, 40)) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 6)
        screen = app.screen
        assert isinstance(screen, ViewScreen)
        await pilot.press("g")
        await until(pilot, lambda: "peak" in screen.document())
        assert screen.document()["step"]["index"] == 0
        assert screen.document()["peak"]["device"] == "cuda:0"
        await pilot.press("2")
        assert any("steps/s" in line for line in screen.document()["lines"]["pace"])
        await pilot.press("4")
        assert screen.document()["ranks"][0]["steps"] == 6
        await pilot.press("5")
        assert [finding["rule"] for finding in screen.document()["findings"]] == ["GP201", "GP206"]
        await pilot.press("3")
        await until(pilot, lambda: pane(app).ready)
        await pilot.press("e")
        await until(pilot, lambda: bool(list(tmp_path.glob("gpuprobe-view-*.json"))))
        (path,) = tmp_path.glob("gpuprobe-view-*.json")
        await until(pilot, lambda: path.read_text("utf-8").endswith("}\n"))
        saved = json.loads(path.read_text("utf-8"))
        assert (saved["schema"], saved["version"], saved["pane"]) == (
            "gpuprobe.view",
            [2, 1],
            "trace",
        )
        assert sum(group["bytes"] for group in saved["groups"]) == saved["allocated"]
        assert sum(saved["categories"].values()) == saved["allocated"]
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, TextScreen))
        assert any("save the current view" in line for line in screen_text(app))


async def test_the_findings_are_those_of_the_report(run: Run) -> None:
    """What is on the wrong device is found in the recording, not while the program runs."""
    on_gpu = Placed("module", "net", "cuda:0", Bytes(64))
    batch = Placed("batch", "", "cpu", Bytes(4096), "pageable")
    run.step(traced=False, placement=(on_gpu, batch))
    run.end()
    app = viewer(run)
    async with app.run_test(size=(130, 40)) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 7)
        await pilot.press("5")
        screen = app.screen
        assert isinstance(screen, ViewScreen)
        shown = screen.document()["findings"]
        assert [finding["rule"] for finding in shown] == ["GP201", "GP206", "GP303"]
        in_report = report(load(run.path))["findings"]
        assert [finding["message"] for finding in in_report] == [f["message"] for f in shown]
        assert any("GP303" in line for line in lines(app, "#finding-rows"))


async def test_the_causes_are_those_of_the_report(run: Run) -> None:
    run.end()
    app = viewer(run)
    async with app.run_test(size=(130, 40)) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 6)
        await pilot.press("5")
        await until(pilot, lambda: "1 cause of the peak, 2 findings" in text(app, "#finding-rows"))
        assert "findings 3" in text(app, "#tabs")
        (cause,) = report(load(run.path))["causes"]
        below = f"{run.training.folder}/"
        assert cause["sentence"].replace(below, "") in lines(app, "#finding-rows")[0]
        shown = " ".join(text(app, "#findings-detail").split())
        assert f"fix: {cause['remedy'].replace(below, '')}" in shown
        assert "saves: not tried" in shown
        screen = app.screen
        assert isinstance(screen, ViewScreen)
        (saved,) = screen.document()["causes"]
        assert saved["sentence"] == cause["sentence"]


async def test_the_axis_of_a_trace_has_phases_and_times(run: Run) -> None:
    run.end()
    async with traced(run) as (app, _):
        shown = text(app, "#bands").splitlines()
        assert "phase" in shown[-2]
        assert "forward" in shown[-2]
        assert shown[-2].index("forward") < shown[-2].index("backward")
        assert "event 0 " in shown[-1]
        assert re.search(r"\d+ · \d.* [mnµ]?s", shown[-1])
