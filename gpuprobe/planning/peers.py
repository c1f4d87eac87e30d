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
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

from gpuprobe import processes
from gpuprobe.errors import ProgramFailed
from gpuprobe.model.io.codec import to_plain
from gpuprobe.model.io.files import read_regular
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.planning.program import ProgramStart
from gpuprobe.planning.trials import WORKER


@dataclass(frozen=True, slots=True)
class Job:
    """``rank`` of ``ranks``, and the processes of the others."""

    rank: int
    ranks: int
    peers: Peers | None = None

    def environment(self, per_node: int) -> dict[str, object]:
        """The other variables that ``torchrun`` sets, with ``per_node`` ranks on each machine."""
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
"""The file with the PID and the machine of the job's first process."""
_MOST_TEXT: Final = 4096  # bytes of such a file
_PAUSE: Final = 0.02  # seconds between two checks for a file


class Peers:
    """The ranks of one simulated job; ``rank`` is -1 in a process that is not a rank.

    ``request`` is that of one of them. Its ``meeting`` is the shared directory, "" in the job's
    first process, which creates it and ends the others. Their processes start as the program of
    ``start`` did.
    """

    def __init__(self, rank: int, request: EstimateRequest, start: ProgramStart) -> None:
        self._rank = rank
        self._start = start
        self._owner = not request.meeting
        if self._owner:
            remove_stale_jobs(Path(tempfile.gettempdir()))
        self._folder = Path(request.meeting or tempfile.mkdtemp(prefix=_PREFIX))
        self._request = replace(request, meeting=str(self._folder))
        self._started: list[subprocess.Popen[bytes]] = []
        self._restore: Callable[[], None] = lambda: None
        if self._owner:
            (self._folder / _OWNER).write_text(f"{_machine()} {os.getpid()}")
            self._restore = self._closed_by_sigterm()
        (self._folder / f"started-{rank}").write_text(str(os.getpid()))

    @property
    def meeting(self) -> str:
        return str(self._folder)

    def post(self, name: str, content: bytes) -> None:
        """Publish ``content`` under a name that its receiver knows."""
        target = self._folder / name
        partial = target.with_name(f"{name}.{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(target)

    def take(self, name: str, rank: int) -> bytes:
        """Wait for the content that ``rank`` posts under a name.

        Raises ProgramFailed if that rank ends without posting it.
        """
        path = self._folder / name
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
        """Post the reason why this rank posts nothing more."""
        self.post(f"ended-{self._rank}", reason.encode())

    def close(self) -> None:
        """In the job's first process, end all processes of the job. Another process leaves those
        that it started running: other ranks may wait for them, or their estimates were requested.
        """
        if not self._owner:
            return
        for path in self._folder.glob("started-*"):
            text = path.read_text()
            if text.isdecimal() and int(text) != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(text), 15)
        for process in self._started:
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._restore()

    def _closed_by_sigterm(self) -> Callable[[], None]:
        """Close this job on SIGTERM before it ends the process, unless the signal has a handler.
        Returns a function that restores the default.
        """
        owner = os.getpid()
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        ):
            return lambda: None

        def on_sigterm(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)
            if os.getpid() == owner:  # not in a process that the program has forked
                self.close()
            os.kill(os.getpid(), number)

        def restore() -> None:
            if signal.getsignal(signal.SIGTERM) is on_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

        signal.signal(signal.SIGTERM, on_sigterm)
        return restore

    def start(self, rank: int) -> None:
        """Start the process of a rank, unless it has been started already."""
        mark = self._folder / f"started-{rank}"
        try:
            descriptor = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return
        with os.fdopen(descriptor, "w") as stream, (self._folder / f"log-{rank}").open("wb") as log:
            request = json.dumps(to_plain(replace(self._request, rank=rank)))
            process = subprocess.Popen(
                processes.command(WORKER, request),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._start.cwd,
                env=self._start.environment,
            )
            stream.write(str(process.pid))
        self._started.append(process)

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a rank that was started has ended."""
        for process in self._started:
            process.poll()
        text = (self._folder / f"started-{rank}").read_text()
        return text.isdecimal() and not _runs(int(text))

    def started(self, rank: int) -> bool:
        """Whether a rank runs or has run: another one may have waited for it."""
        return (self._folder / f"started-{rank}").exists()

    def post_differences(self, document: Mapping[str, object]) -> None:
        """Publish the differences between ranks that this one has found
        (`gpuprobe.torch_support.traffic`).
        """
        self.post(f"differences-{self._rank}", json.dumps(document).encode())

    def differences(self, rank: int) -> dict[str, Any]:
        """The differences that a rank has found, after it has ended."""
        found: dict[str, Any] = json.loads((self._folder / f"differences-{rank}").read_bytes())
        return found

    def output(self, rank: int) -> str:
        """The output of a rank's process."""
        return (self._folder / f"log-{rank}").read_text(encoding="utf-8", errors="replace")

    def _ended(self, rank: int) -> str | None:
        """Why a rank posts nothing more; None while it runs."""
        try:
            return f": {(self._folder / f'ended-{rank}').read_text()}"
        except FileNotFoundError:
            pass
        return "" if self.has_ended(rank) else None


def remove_stale_jobs(folder: Path) -> None:
    """Remove the directories in ``folder`` of jobs whose first process was killed (SIGKILL), and
    end the processes of their ranks, which wait for one another.
    """
    for shared in folder.glob(f"{_PREFIX}*"):
        try:
            if not _is_own(shared):
                continue
            machine, _, pid = _read(shared / _OWNER).rpartition(" ")
        except OSError:  # a job that is just starting, or has just ended
            continue
        if machine != _machine() or not pid.isdecimal() or _runs(int(pid)):
            continue
        for path in shared.glob("started-*"):
            _end_rank(path, shared)
        shutil.rmtree(shared, ignore_errors=True)


def _is_own(shared: Path) -> bool:
    """Whether it is a directory that a job of this user has made: the temporary folder is shared
    with others. Raises OSError.
    """
    status = shared.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return False
    if not hasattr(os, "getuid"):  # pragma: no cover - Windows: each user has a folder
        return True
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


def _read(path: Path) -> str:
    """The text of a small file of a job. Raises OSError, also for anything but a regular file."""
    return read_regular(path, most=_MOST_TEXT, inside=True).decode("utf-8", "replace")


def _end_rank(mark: Path, shared: Path) -> None:
    """End the process of a rank of the job in ``shared``, which its command line names."""
    import psutil  # as in `_runs`

    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int(_read(mark)))
        if any(str(shared) in argument for argument in process.cmdline()):
            process.terminate()


def _machine() -> str:
    """The machine and its PID namespace: PIDs of a different one mean other processes."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{platform.node()} {namespace}".strip()


def _runs(pid: int) -> bool:
    import psutil  # 20 ms, only if a rank is waited for

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
