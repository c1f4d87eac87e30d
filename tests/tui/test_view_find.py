"""``/`` finds a row in any list of a run's screens."""

from __future__ import annotations

import pytest
from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.widgets import Label

from gpuprobe.tui.widgets.prompt import Prompt
from gpuprobe.tui.widgets.table import ItemTable

NAMES = ("conv1 forward", "conv2 forward", "linear backward", "conv3 Forward", "\x1b[31mevil")


class Lists(App[None]):
    moved: tuple[int, ...] = ()

    def compose(self) -> ComposeResult:
        yield ItemTable(id="list")

    def on_mount(self) -> None:
        rows = self.query_one(ItemTable)
        rows.fill([(("name", "head"),)], len(NAMES), lambda index: [((NAMES[index], ""),)])
        rows.focus()

    def on_item_table_moved(self, message: ItemTable.Moved) -> None:
        self.moved += (message.index,)


async def typed(pilot: Pilot[None], *keys: str) -> int:
    await pilot.press(*keys)
    await pilot.pause()
    return pilot.app.screen_stack[0].query_one(ItemTable).cursor


async def test_typing_goes_to_the_first_row_with_all_words() -> None:
    app = Lists()
    async with app.run_test(size=(60, 12)) as pilot:
        assert await typed(pilot, "slash", *"back") == 2
        assert isinstance(app.screen, Prompt)
        assert await typed(pilot, "ctrl+u", *"forw") == 0  # from where it stood
        assert await typed(pilot, "space", "3") == 3  # a second word; large or small letters
        assert await typed(pilot, "enter") == 3
        assert not isinstance(app.screen, Prompt)
        assert app.moved[-1] == 3  # whatever shows the row's details was told


async def test_the_next_and_the_one_before_go_around() -> None:
    app = Lists()
    async with app.run_test(size=(60, 12)) as pilot:
        await typed(pilot, "f3")  # nothing was looked for yet
        await typed(pilot, "slash", *"forward", "enter")
        found = [await typed(pilot, key) for key in ("f3", "f3", "f3", "shift+f3")]
        assert found == [1, 3, 0, 3]


@pytest.mark.parametrize("size", [(60, 12), (200, 60)])
async def test_what_is_nowhere_moves_nothing_and_says_so(size: tuple[int, int]) -> None:
    app = Lists()
    async with app.run_test(size=size) as pilot:
        assert await typed(pilot, "j", "slash", *"nowhere") == 1
        line = str(app.screen.query_one("#hint", Label).content)
        assert "no match" in line
        assert await typed(pilot, "enter") == 1
        await typed(pilot, "f3")
        assert [n.message for n in app._notifications] == ["nothing has “nowhere”"]


async def test_esc_goes_back_to_where_it_stood() -> None:
    app = Lists()
    async with app.run_test(size=(60, 12)) as pilot:
        assert await typed(pilot, "j", "slash", *"lin") == 2
        assert await typed(pilot, "escape") == 1
        assert app.moved[-1] == 1


async def test_an_empty_list_has_nothing() -> None:
    app = Lists()
    async with app.run_test(size=(60, 12)) as pilot:
        app.query_one(ItemTable).fill([], 0, lambda index: [])
        assert await typed(pilot, "slash", "x", "enter") <= 0
