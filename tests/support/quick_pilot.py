"""Keys, clicks and sizes for a screen without waiting until it is idle.

Textual's own pilot waits after each key until the process is idle, which a screen that moves never
is: half a second a key. This one waits until what was pending has been handled, and continues, as a
terminal does with a key that is held down.
"""

from __future__ import annotations

import asyncio
import contextlib
import unicodedata
from typing import Any

from textual import events
from textual.app import ScreenStackError
from textual.keys import REPLACED_KEYS, _character_to_key, _get_unicode_name_from_key
from textual.pilot import Pilot


class QuickPilot(Pilot[Any]):
    """Made of an app that runs: ``QuickPilot(app)``."""

    async def press(self, *keys: str) -> None:
        for key in keys:
            name = _character_to_key(key) if len(key) == 1 and not key.isalnum() else key
            self.app.post_message(events.Key(name, _character(name)))
            await self.pause()

    async def pause(self, delay: float | None = None) -> None:
        """Until the app, then its screen, then what has the focus have handled what was pending.
        What has been removed meanwhile is not waited for.
        """
        app = self.app
        for pump in (lambda: app, lambda: app.screen, lambda: app.focused):
            handled = asyncio.Event()
            try:
                waits = app.is_running and (target := pump()) is not None
                waits = waits and target.call_later(handled.set)
            except ScreenStackError:
                return
            while waits and not handled.is_set() and app.is_running and target.is_running:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(handled.wait(), 0.05)
        await asyncio.sleep(delay or 0.0)


def _character(key: str) -> str | None:
    original = REPLACED_KEYS.get(key, key)
    try:
        return unicodedata.lookup(_get_unicode_name_from_key(original))
    except KeyError:
        return key if len(key) == 1 else None
