"""Random keys, clicks and sizes on every screen; and what a fault of a screen prints.

``benchmarks/monkey_screens.py`` does it for as long as wanted.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path

import pytest
from monkey_screens import RECORDED, SCREENS, play
from quick_pilot import QuickPilot
from textual.app import App

from gpuprobe.tui.probe_app import ProbeApp
from gpuprobe.tui.viewer.app import open_run
from gpuprobe.tui.widgets.table import ItemTable


@pytest.mark.parametrize("name", SCREENS)
def test_no_order_of_keys_and_sizes_ends_a_screen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what is saved is saved there
    rng = random.Random(name)
    assert asyncio.run(play(partial(SCREENS[name], tmp_path), rng, 25)) == 25


class _Faulty(ProbeApp):
    """Fails where the test says, with a local variable that nobody meant to show."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def on_mount(self) -> None:
        if self.where == "worker":
            self.run_worker(self._fail, thread=True)
        else:
            self.call_later(self._fail)

    def _fail(self) -> None:
        secret = "a value " + "that nobody meant to show"
        raise IndexError(f"out of range: {len(secret)}")


@pytest.mark.parametrize("where", ["screen", "worker"])
def test_a_fault_is_raised_and_prints_no_locals(
    where: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    app = _Faulty(where)
    monkeypatch.setattr(app, "run", lambda: App.run(app, headless=True))
    with pytest.raises(IndexError, match="out of range: 33"):
        app.show()
    printed = "".join(capfd.readouterr())
    assert "nobody meant" not in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("size", [(1, 1), (6, 105), (12, 1), (200, 1), (3, 40)])
def test_the_palette_of_commands_at_any_size(size: tuple[int, int], tmp_path: Path) -> None:
    """Textual's own list fails where it has no columns, or no lines."""

    async def session() -> None:
        app = SCREENS["view, the runs"](tmp_path)
        async with app.run_test(size=(100, 30)):
            pilot = QuickPilot(app)
            await pilot.press("ctrl+p")
            await pilot.resize_terminal(*size)
            await pilot.press("t", "h", "pagedown", "pageup", "down", "end", "home", "escape")
        if app.crash is not None:
            raise app.crash

    asyncio.run(session())


def test_escape_leaves_a_run_from_its_trace_too(tmp_path: Path) -> None:
    async def session() -> None:
        app = SCREENS["view, the runs"](tmp_path)
        async with app.run_test(size=(120, 40)):
            pilot = QuickPilot(app)
            open_run(app, str(RECORDED / "virtual.gpuprobe"))
            await pilot.pause()
            await pilot.press("t")
            for _ in range(200):
                if isinstance(app.focused, ItemTable) and app.focused.id == "groups":
                    break
                await pilot.pause(0.02)
            await pilot.press("escape")
            for _ in range(50):
                await pilot.pause(0.02)
            assert len(app.screen_stack) == 1

    asyncio.run(session())
