"""What the screens of a run look like, at three sizes and in every theme."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from screen_svg import screen_svg, screen_text
from test_view_screen import SIZES, pane, rows, text, until
from textual.pilot import Pilot
from view_recordings import Run

from gpuprobe.api.live import Followed
from gpuprobe.tui.view_app import ViewApp
from gpuprobe.tui.view_block import BlockScreen

GOLDEN = Path(__file__).parent / "screens"


def compare(app: ViewApp, name: str, folder: Path) -> None:
    """GPUPROBE_UPDATE_SCREENS=1 writes them anew; then look at each one."""
    picture = screen_svg(app).replace(str(folder), "/home/me/project")
    golden = GOLDEN / f"{name}.svg"
    if os.environ.get("GPUPROBE_UPDATE_SCREENS"):
        golden.write_text(picture, encoding="utf-8")
    assert picture == golden.read_text("utf-8")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
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
async def test_panes(run: Run, tmp_path: Path, size: tuple[int, int]) -> None:
    app = ViewApp(Followed(run.path), interval=0.05)
    label = f"{size[0]}x{size[1]}"
    async with app.run_test(size=size) as pilot:
        await opened(app, pilot)
        compare(app, f"view-steps-{label}", tmp_path)
        await pilot.press("2")
        await until(pilot, lambda: "holes" in text(app, "#now"))
        await pilot.pause()
        compare(app, f"view-now-{label}", tmp_path)
        await pilot.press("1", "t")
        await until(pilot, lambda: pane(app).ready)
        await pilot.pause()
        compare(app, f"view-trace-{label}", tmp_path)
        await pilot.press("m", "o")
        await until(pilot, lambda: rows(app, "#segments").count == 8)
        await pilot.pause()
        compare(app, f"view-map-{label}", tmp_path)
        await pilot.press("5")
        await pilot.pause()
        compare(app, f"view-findings-{label}", tmp_path)


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_a_block(run: Run, tmp_path: Path, size: tuple[int, int]) -> None:
    app = ViewApp(Followed(run.path), interval=0.05)
    async with app.run_test(size=size) as pilot:
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
        one = Run(tmp_path, rank=rank, world_size=3, slow=slow)
        for _ in range(4 + 3 * (rank == 1)):
            one.step(traced=False)
        one.end()
    app = ViewApp(Followed(one.path), interval=0.05)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: rows(app, "#steps").count == 4)
        await pilot.press("4")
        await pilot.pause()
        compare(app, f"view-ranks-{size[0]}x{size[1]}", tmp_path)


async def test_without_colour_letters_tell_categories_apart(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        compare(app, "view-trace-plain-100x30", tmp_path)
        await pilot.press("m")
        await until(pilot, lambda: rows(app, "#segments").count == 8)
        await pilot.pause()
        assert "·····" in "\n".join(screen_text(app))


async def test_light(run: Run, tmp_path: Path) -> None:
    app = ViewApp(Followed(run.path), interval=0.05)
    async with app.run_test(size=(100, 30)) as pilot:
        await opened(app, pilot)
        await pilot.press("d", "t")
        await until(pilot, lambda: pane(app).ready)
        await pilot.pause()
        compare(app, "view-trace-light-100x30", tmp_path)
