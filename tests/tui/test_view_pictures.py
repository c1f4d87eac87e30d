"""What the screens of a run look like, at three sizes and in every theme."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from screen_svg import screen_svg, screen_text
from test_view_screen import SIZES, pane, rows, text, until
from textual.pilot import Pilot
from view_recordings import Run as Training

from gpuprobe.model.run.session import Environment, HostWindow, Session, Step
from gpuprobe.model.run.totals import Run, RunSummary
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.recording.load import Followed
from gpuprobe.tui.viewer.app import RunsScreen, ViewApp
from gpuprobe.tui.viewer.block import BlockScreen

GOLDEN = Path(__file__).parent / "screens"


async def compare(app: ViewApp, pilot: Pilot[None], name: str, folder: Path) -> None:
    """GPUPROBE_UPDATE_SCREENS=1 writes them anew; then look at each one. What is still on its way
    to the screen is waited for.
    """
    golden = GOLDEN / f"{name}.svg"
    if os.environ.get("GPUPROBE_UPDATE_SCREENS"):
        picture = screen_svg(app).replace(str(folder), "/home/me/project")
        golden.write_text(picture, encoding="utf-8")
    expected = golden.read_text("utf-8")
    for _ in range(250):
        picture = screen_svg(app).replace(str(folder), "/home/me/project")
        if picture == expected:
            return
        await pilot.pause(0.02)
    assert picture == expected


@pytest.fixture
def run(tmp_path: Path) -> Training:
    made = Training(tmp_path)
    for index in range(14):
        made.step(traced=index < 4)
    made.finding()
    made.finding(race=False)
    made.end()
    return made


async def opened(app: ViewApp, pilot: Pilot[None]) -> None:
    await until(pilot, lambda: rows(app, "#steps").count > 0)
    await pilot.press("g", "j")
    await until(pilot, lambda: "Lines" in text(app, "#detail"))


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_panes(run: Training, tmp_path: Path, size: tuple[int, int]) -> None:
    app = ViewApp(Followed(run.path), interval=0.05)
    label = f"{size[0]}x{size[1]}"
    async with app.run_test(size=size) as pilot:
        await opened(app, pilot)
        await compare(app, pilot, f"view-steps-{label}", tmp_path)
        await pilot.press("2")
        await until(pilot, lambda: "holes" in text(app, "#now"))
        await pilot.pause()
        await compare(app, pilot, f"view-now-{label}", tmp_path)
        await pilot.press("1", "t")
        await until(pilot, lambda: pane(app).ready)
        await pilot.pause()
        await compare(app, pilot, f"view-trace-{label}", tmp_path)
        await pilot.press("m", "o")
        await until(pilot, lambda: rows(app, "#segments").count == 8)
        await pilot.pause()
        await compare(app, pilot, f"view-map-{label}", tmp_path)
        await pilot.press("5")
        await until(pilot, lambda: "cause of the peak" in text(app, "#finding-rows"))
        await pilot.pause()
        await compare(app, pilot, f"view-findings-{label}", tmp_path)


async def test_a_block(run: Training, tmp_path: Path) -> None:
    app = ViewApp(Followed(run.path), interval=0.05)
    async with app.run_test(size=(60, 24)) as pilot:
        await opened(app, pilot)
        await pilot.press("t")
        await until(pilot, lambda: pane(app).ready)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: isinstance(app.screen, BlockScreen))
        await until(pilot, lambda: "hidden" in text(app, "#source"))
        await pilot.pause()
        # The path of the test's folder has another length every time.
        shown = "\n".join(screen_text(app)).replace(str(tmp_path), "")
        assert "model.py:6 in forward" in shown
        assert "hidden = self.first(x)" in shown
        assert "allocated by, innermost first" in shown


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_ranks(tmp_path: Path, size: tuple[int, int]) -> None:
    for rank, slow in ((0, 1.0), (1, 1.0), (2, 3.0)):
        one = Training(tmp_path, rank=rank, world_size=3, slow=slow)
        for _ in range(4 + 3 * (rank == 1)):
            one.step(traced=False)
        one.end()
    app = ViewApp(Followed(one.path), interval=0.05)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 4)
        await pilot.press("4")
        await pilot.pause()
        await compare(app, pilot, f"view-ranks-{size[0]}x{size[1]}", tmp_path)


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_runs(tmp_path: Path, size: tuple[int, int]) -> None:
    session = Session(time.time() - 3700, 42, ("train.py", "--lr", "1"), "trace", ("cuda:0",))
    environment = Environment("0", "3.11.0", "Linux", "elsewhere")
    step = Step(12, 0, 5_000_000, host=HostWindow(rss_peak=Peak.exactly(3 << 30)))
    found = [
        Run(
            "/me/a.gpuprobe", (42, 43), RunSummary("/me/a.gpuprobe", 1, session, environment, step)
        ),
        Run("/me/b.gpuprobe", (77,), None),
        Run("/me/c.gpuprobe", (78,), Unavailable("the header of the recording is damaged")),
    ]
    app = ViewApp()
    async with app.run_test(size=size) as pilot:
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        screen.interval = 3600
        screen.workers.cancel_group(screen, "runs")
        await pilot.pause()
        screen.post_message(RunsScreen.Found(found))
        await until(pilot, lambda: screen.found is found)
        await pilot.pause()
        await compare(app, pilot, f"view-runs-{size[0]}x{size[1]}", tmp_path)


async def test_without_colour_letters_tell_categories_apart(
    run: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = ViewApp(Followed(run.path), interval=0.05)
    async with app.run_test(size=(100, 30)) as pilot:
        await opened(app, pilot)
        await pilot.press("t")
        await until(pilot, lambda: pane(app).ready)
        await pilot.pause()
        shown = "\n".join(screen_text(app))
        assert "AAAA" in shown
        assert "PPPP" in shown
        await compare(app, pilot, "view-trace-plain-100x30", tmp_path)
        await pilot.press("m")
        await until(pilot, lambda: rows(app, "#segments").count == 8)
        await pilot.pause()
        assert "·····" in "\n".join(screen_text(app))


async def test_light(run: Training, tmp_path: Path) -> None:
    app = ViewApp(Followed(run.path), interval=0.05)
    async with app.run_test(size=(100, 30)) as pilot:
        await opened(app, pilot)
        await pilot.press("d", "t")
        await until(pilot, lambda: pane(app).ready)
        await pilot.pause()
        await compare(app, pilot, "view-trace-light-100x30", tmp_path)
