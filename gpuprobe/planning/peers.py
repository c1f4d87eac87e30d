"""The simulated job that an estimate is one rank of, and the processes of its other ranks.

The ranks exchange files in a shared directory. A rank that needs a file waits for it; it starts the
process of the sending rank if that does not run yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

from gpuprobe.errors import ProgramFailed, UsageError


@dataclass(frozen=True, slots=True)
class Job:
    """``rank`` of ``ranks``, and how it reaches the others. Raises UsageError for a rank that the
    job does not have.
    """

    rank: int
    ranks: int
    peers: Peers | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise UsageError(
                f"there is no rank {self.rank} of {self.ranks}",
                hint=f"ranks are counted from 0: the last one is {self.ranks - 1}",
            )

    def environment(self, per_node: int) -> dict[str, object]:
        """What else ``torchrun`` sets, with so many ranks on each machine."""
        nodes = -(-self.ranks // per_node)
        return {
            "GROUP_RANK": self.rank // per_node,
            "GROUP_WORLD_SIZE": nodes,
            "LOCAL_WORLD_SIZE": min(per_node, self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.ranks,
        }

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.peers is not None:
            self.peers.failed("" if error is None else str(error).partition("\n")[0])
            self.peers.close()


_PREFIX: Final = "gpuprobe-ranks-"
_OWNER: Final = "owner"
"""The file that has the process which was asked first, and where that is."""
_PAUSE: Final = 0.02  # seconds between two looks for a file

TRIAL: Final = "from gpuprobe.api.virtual import trial; trial()"
"""What the process of one estimate runs; its argument is the order: `gpuprobe.planning.trials`."""


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
        if self._owner:
            remove_left_over(Path(tempfile.gettempdir()))
        self._place = Path(meeting or tempfile.mkdtemp(prefix=_PREFIX))
        self._started: list[subprocess.Popen[bytes]] = []
        self._restore: Callable[[], None] = lambda: None
        if self._owner:
            (self._place / _OWNER).write_text(f"{_here()} {os.getpid()}")
            self._restore = self._closed_by_sigterm()
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
        self._restore()

    def _closed_by_sigterm(self) -> Callable[[], None]:
        """Have SIGTERM close this job before it ends the process, if nobody else handles it.
        Returns what puts back how it was.
        """
        owner = os.getpid()
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        ):
            return lambda: None

        def on_sigterm(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)
            if os.getpid() == owner:  # and no process that the program has forked
                self.close()
            os.kill(os.getpid(), number)

        def restore() -> None:
            if signal.getsignal(signal.SIGTERM) is on_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

        signal.signal(signal.SIGTERM, on_sigterm)
        return restore

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


def remove_left_over(folder: Path) -> None:
    """Remove what jobs have left in ``folder`` whose first process was killed (SIGKILL), and end
    the processes of their ranks, which wait for one another.
    """
    for place in folder.glob(f"{_PREFIX}*"):
        try:
            here, _, pid = (place / _OWNER).read_text().rpartition(" ")
        except OSError:  # a job that begins at this moment, or somebody else's
            continue
        if here != _here() or not pid.isdecimal() or _runs(int(pid)):
            continue
        for path in place.glob("started-*"):
            _end_rank(path, place)
        shutil.rmtree(place, ignore_errors=True)


def _end_rank(mark: Path, place: Path) -> None:
    """End the process of a rank that met others in ``place``: its command line names it."""
    import psutil  # as in `_runs`

    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int(mark.read_text()))
        if any(str(place) in argument for argument in process.cmdline()):
            process.terminate()


def _here() -> str:
    """Where the numbers of processes are this process's: a machine, and a container on it."""
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        space = ""
    return f"{platform.node()} {space}".strip()


def _runs(pid: int) -> bool:
    import psutil  # 20 ms, where a rank is waited for

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
