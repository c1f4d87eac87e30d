"""Random keys, clicks and sizes on every screen; and what a fault of a screen prints.

``benchmarks/monkey_screens.py`` does it for as long as wanted.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path

import pytest
from monkey_screens import SCREENS, play
from textual.app import App

from gpuprobe.tui.probe_app import ProbeApp


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
