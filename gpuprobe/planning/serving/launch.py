"""The run of a vLLM on simulated GPUs, until its engine is up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from gpuprobe.planning.serving.observer import EVENTS, FOLDER, PLAN, UP, Event
from gpuprobe.processes import end_with_parent

if TYPE_CHECKING:
    from typing_extensions import Self

LOG: Final = "vllm.log"
STALLED_S: Final = 300.0
"""vLLM hangs if it writes neither an event nor a line of its log for this time."""
_POLL_S: Final = 0.1
_PATIENCE_S: Final = 15.0
"""The time that resource trackers get to clean up and end."""
_KILLED_S: Final = 15.0
"""The time that the kernel gets to end processes after SIGKILL."""
_ROUNDS: Final = 10
_LONGEST: Final = 107 - 37
"""The longest folder for vLLM's sockets, which remain there: a socket's path has at most 107 bytes
on Linux, and vLLM names them by UUIDs.
"""
_TRACKER: Final = "multiprocessing.resource_tracker"
_ENTRY: Final = """[vllm.general_plugins]
gpuprobe = gpuprobe.planning.serving.observer:register
"""


class ServerFailed(Exception):
    """vLLM ended or hangs before its engine was up. ``code`` is its exit code, None if it hangs."""

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code


def prepare(folder: Path, plan: Mapping[str, int], environment: dict[str, str]) -> None:
    """Set up the observation of processes that start with ``environment``: they find the plugin in
    ``folder``, so no installation is changed.
    """
    (folder / PLAN).write_text(json.dumps(plan), encoding="utf-8")
    entry = folder / "plugin" / "gpuprobe_observer-0.dist-info"
    entry.mkdir(parents=True)
    (entry / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: gpuprobe-observer\nVersion: 0\n", encoding="utf-8"
    )
    (entry / "entry_points.txt").write_text(_ENTRY, encoding="utf-8")
    package = Path(__file__).parents[3]  # last: what else is in that folder must not replace theirs
    before = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(folder / "plugin"), before, str(package)])
    )
    environment[FOLDER] = str(folder)
    if len(os.fsencode(folder)) <= _LONGEST:
        environment.setdefault("VLLM_RPC_BASE_PATH", str(folder))
    if "VLLM_PLUGINS" in environment:
        environment["VLLM_PLUGINS"] += ",gpuprobe"


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    observed: Callable[[Event], None] = lambda event: None,
    stalled: float = STALLED_S,
    clock: Callable[[], float] = time.monotonic,
) -> list[Event]:
    """Run a vLLM until its engine is up, and return its events. Its processes have always
    ended when this returns or raises.

    Raises `ServerFailed` if vLLM ends before that, or makes no progress for ``stalled`` seconds of
    the ``clock``; its log is in ``folder``.
    """
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            arguments,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
        )
    with _Signals() as signals:
        try:
            return _follow(process, folder, observed, stalled, clock)
        finally:
            signals.ending = True
            end(process)


def _follow(
    process: subprocess.Popen[bytes],
    folder: Path,
    observed: Callable[[Event], None],
    stalled: float,
    clock: Callable[[], float],
) -> list[Event]:
    reader = EventReader(folder)
    log = folder / LOG
    size, since = -1, clock()
    while True:
        code = process.poll()
        new = reader.new()
        for event in new:
            observed(event)
        if any(event["stage"] == UP for event in new):
            return reader.events
        if code is not None:
            raise ServerFailed(code)
        if new or log.stat().st_size != size:
            size, since = log.stat().st_size, clock()
        elif clock() - since > stalled:
            raise ServerFailed(None)
        time.sleep(_POLL_S)


class EventReader:
    """Reads the events of all processes in the order of their times."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.events: list[Event] = []

    def new(self) -> list[Event]:
        """The events since the last call; an incomplete line is left for the next one."""
        found: list[Event] = []
        for file in sorted(self._folder.glob(EVENTS)):
            with file.open("rb") as stream:
                stream.seek(self._read.get(file, 0))
                data = stream.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._read[file] = self._read.get(file, 0) + len(complete)
            found += [json.loads(line) for line in complete.splitlines()]
        found.sort(key=lambda event: event["time"])
        self.events += found
        return found


def end(process: subprocess.Popen[bytes]) -> None:
    """End vLLM and all processes that it started, at once: it needs many seconds for SIGTERM, and
    has nothing to save. Python's resource trackers are not killed: they end when the others are
    gone, and remove the shared memory that those had.
    """
    trackers: list[psutil.Process] = []
    for _ in range(_ROUNDS):  # a process may start another one while it is being ended
        running = _processes(process.pid)
        trackers = [other for other in running if _is_tracker(other)]
        others = [other for other in running if other not in trackers]
        if not others:
            break
        for other in others:
            with contextlib.suppress(psutil.Error):
                other.kill()
        psutil.wait_procs(others, timeout=_KILLED_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_KILLED_S)
    psutil.wait_procs(trackers, timeout=_PATIENCE_S)
    for other in _processes(process.pid):
        with contextlib.suppress(psutil.Error):
            other.kill()
    psutil.wait_procs(_processes(process.pid), timeout=_KILLED_S)


def _is_tracker(process: psutil.Process) -> bool:
    """Whether a process is the resource tracker of a program that uses multiprocessing."""
    try:
        return any(_TRACKER in word for word in process.cmdline())
    except (psutil.Error, OSError):
        return False


def _processes(root: int) -> list[psutil.Process]:
    """All processes of the session that ``root`` leads, even if their parent has changed. (They
    cannot be found by their environment: vLLM overwrites it with titles.)
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == root and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class _Signals:
    """SIGTERM and SIGHUP raise SystemExit, as SIGINT raises KeyboardInterrupt. While vLLM is being
    ended they are ignored: a second signal must not leave processes behind.
    """

    def __init__(self) -> None:
        self.ending = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        with contextlib.suppress(ValueError):  # not the main thread
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _received(self, number: int, frame: object) -> None:
        if self.ending:
            return
        self.ending = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


def all_events(folder: Path) -> list[Event]:
    """The events of a vLLM that has ended."""
    reader = EventReader(folder)
    reader.new()
    return reader.events
