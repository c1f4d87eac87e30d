"""The other ranks of a pretended job: a process for each that somebody waits for.

They meet in a directory: what a rank posts is a file there, with the name that sender and receiver
both know. Who needs a file waits for it, and starts the rank that is to post it, unless it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gpuprobe.errors import ProgramFailed

_PAUSE: Final = 0.02  # seconds between two looks for a file

TRIAL: Final = "from gpuprobe.api.virtual import trial; trial()"
"""What the process of one estimate runs; its argument is the order: `gpuprobe.planning.trial`."""


class Peers:
    """The ranks of one pretended job; ``rank`` is -1 in a process that is none of them. ``order``
    makes the order of a rank's process, whose ``peers`` is this directory; ``meeting`` is that of
    the process that was asked first, "" in that one.
    """

    def __init__(
        self,
        rank: int,
        order: Callable[..., dict[str, Any]],
        *,
        cwd: Path,
        environment: dict[str, str],
        meeting: str = "",
    ) -> None:
        self._rank = rank
        self._order = order
        self._cwd = cwd
        self._environment = environment
        self._owner = not meeting
        self._place = Path(meeting or tempfile.mkdtemp(prefix="gpuprobe-ranks-"))
        self._started: list[subprocess.Popen[bytes]] = []
        (self._place / f"started-{rank}").write_text(str(os.getpid()))

    @property
    def meeting(self) -> str:
        return str(self._place)

    def post(self, name: str, content: bytes) -> None:
        """Have ``content`` ready for whoever takes what has that name."""
        target = self._place / name
        partial = target.with_name(f"{name}.{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(target)

    def take(self, name: str, rank: int) -> bytes:
        """What ``rank`` posts under a name, once it has.

        Raises ProgramFailed where that rank ends without it.
        """
        path = self._place / name
        self.start(rank)
        while True:
            ended = self._ended(rank)
            try:
                return path.read_bytes()
            except FileNotFoundError:
                if ended is not None:
                    raise ProgramFailed(
                        f"rank {self._rank} waits for what rank {rank} sends, and that rank "
                        f"ended without it{ended}",
                        hint="run the program as torchrun does, on gloo, to see whether it does so "
                        "there",
                    ) from None
            time.sleep(_PAUSE)

    def failed(self, reason: str) -> None:
        """Tell the others why this rank posts nothing more."""
        self.post(f"ended-{self._rank}", reason.encode())

    def close(self) -> None:
        """In the process that was asked first, end all that were started. Another one leaves those
        that it started: some other rank may wait for them, or they are wanted themselves.
        """
        if not self._owner:
            return
        for path in self._place.glob("started-*"):
            text = path.read_text()
            if text.isdecimal() and int(text) != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(text), 15)
        for process in self._started:
            process.wait()
        shutil.rmtree(self._place, ignore_errors=True)

    def start(self, rank: int) -> None:
        """Start the process of a rank, if nobody has."""
        mark = self._place / f"started-{rank}"
        try:
            handle = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return
        with os.fdopen(handle, "w") as stream, (self._place / f"log-{rank}").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", TRIAL, json.dumps(self._order(rank, self.meeting))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._cwd,
                env=self._environment,
            )
            stream.write(str(process.pid))
        self._started.append(process)

    def is_over(self, rank: int) -> bool:
        """Whether the process of a rank that was started has ended."""
        for process in self._started:
            process.poll()
        text = (self._place / f"started-{rank}").read_text()
        return text.isdecimal() and not _runs(int(text))

    def started(self, rank: int) -> bool:
        """Whether a rank runs, or has run: another one may have waited for it."""
        return (self._place / f"started-{rank}").exists()

    def post_differences(self, document: dict[str, Any]) -> None:
        """Have ready in what ranks differ, as this one has found."""
        self.post(f"differences-{self._rank}", json.dumps(document).encode())

    def differences(self, rank: int) -> dict[str, Any]:
        """What a rank that has ended has posted so."""
        found: dict[str, Any] = json.loads((self._place / f"differences-{rank}").read_bytes())
        return found

    def output(self, rank: int) -> str:
        """What the process of a rank has printed."""
        return (self._place / f"log-{rank}").read_text(encoding="utf-8", errors="replace")

    def _ended(self, rank: int) -> str | None:
        """Why a rank posts nothing more, None where it still runs."""
        try:
            return f": {(self._place / f'ended-{rank}').read_text()}"
        except FileNotFoundError:
            pass
        return "" if self.is_over(rank) else None


def _runs(pid: int) -> bool:
    import psutil  # 20 ms, where a rank is waited for

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
