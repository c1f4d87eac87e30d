"""A real terminal for tests, by tmux."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from pathlib import Path

__all__ = ["Terminal"]


class Terminal:
    """A real terminal, by tmux."""

    def __init__(self, folder: Path) -> None:
        self.socket = f"gpuprobe-{uuid.uuid4().hex[:8]}"
        self.folder = folder

    def tmux(self, *args: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", self.socket, *args],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            # A width in the environment would count more than the terminal's own.
            env={k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "TMUX")},
        )
        return done.stdout

    def start(self) -> None:
        shell = f"PS1='$ ' TERM=screen-256color PATH={Path(sys.executable).parent}:$PATH sh"
        self.tmux("new-session", "-d", "-s", "t", "-x", "110", "-y", "34", shell)

    def type(self, line: str) -> None:
        self.tmux("send-keys", "-t", "t", "-l", line)
        self.tmux("send-keys", "-t", "t", "Enter")

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", "-t", "t", *keys)

    async def shows(self, expected: str, *, gone: bool = False, keys: tuple[str, ...] = ()) -> str:
        """Wait until the screen shows the text (or, with ``gone``, no longer does).

        ``keys`` are pressed now and then meanwhile: what they lead to may not be there yet.
        """
        screen = ""
        for poll in range(400):
            if keys and poll % 40 == 0:
                self.keys(*keys)
            screen = self.tmux("capture-pane", "-p", "-t", "t")
            if (expected in screen) is not gone:
                return screen
            await asyncio.sleep(0.05)
        raise AssertionError(f"{expected!r} {'stayed' if gone else 'never appeared'}:\n{screen}")
