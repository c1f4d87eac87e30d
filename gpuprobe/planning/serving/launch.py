"""A vLLM on the native engine, from its start until its engine is up: started, followed, ended."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from gpuprobe.planning.serving.observer import EVENTS, FOLDER, PLAN, UP

LOG: Final = "vllm.log"
STALLED_S: Final = 300.0
"""Without an event and without a line in the log, vLLM is taken to hang."""
_POLL_S: Final = 0.1
_PATIENCE_S: Final = 15.0
"""For processes to end by themselves once they are asked to."""
_ENTRY: Final = """[vllm.general_plugins]
gpuprobe = gpuprobe.planning.serving.observer:register
"""
_SET_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG of linux/prctl.h


class ServerFailed(Exception):
    """vLLM ended, or hangs, before its engine was up. ``code`` is None where it hangs."""

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code


def prepare(folder: Path, plan: Mapping[str, Any], environment: dict[str, str]) -> None:
    """Have the processes that are started with ``environment`` observed: the plugin is found in
    ``folder``, and no installation is changed.
    """
    (folder / PLAN).write_text(json.dumps(plan), encoding="utf-8")
    entry = folder / "plugin" / "gpuprobe_observer-0.dist-info"
    entry.mkdir(parents=True)
    (entry / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: gpuprobe-observer\nVersion: 0\n", encoding="utf-8"
    )
    (entry / "entry_points.txt").write_text(_ENTRY, encoding="utf-8")
    package = Path(__file__).parents[3]
    before = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(folder / "plugin"), str(package), before])
    )
    environment[FOLDER] = str(folder)
    if "VLLM_PLUGINS" in environment:
        environment["VLLM_PLUGINS"] += ",gpuprobe"


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    engines: int = 1,
    observed: Callable[[Mapping[str, Any]], None] = lambda event: None,
    stalled: float = STALLED_S,
) -> list[dict[str, Any]]:
    """The events of a vLLM until all its ``engines`` are up. However this ends, its processes have
    ended too.

    Raises `ServerFailed` where vLLM ends before, or is silent for ``stalled`` seconds; its log is
    in ``folder``.
    """
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            arguments,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        with _signals_end_this():
            return _follow(process, folder, engines, observed, stalled)
    finally:
        end(process)


def _follow(
    process: subprocess.Popen[bytes],
    folder: Path,
    engines: int,
    observed: Callable[[Mapping[str, Any]], None],
    stalled: float,
) -> list[dict[str, Any]]:
    reader = EventReader(folder)
    log = folder / LOG
    size, since = -1, time.monotonic()
    while True:
        code = process.poll()
        new = reader.new()
        for event in new:
            observed(event)
        if sum(event["stage"] == UP for event in reader.events) >= engines:
            return reader.events
        if code is not None:
            raise ServerFailed(code)
        if new or log.stat().st_size != size:
            size, since = log.stat().st_size, time.monotonic()
        elif time.monotonic() - since > stalled:
            raise ServerFailed(None)
        time.sleep(_POLL_S)


class EventReader:
    """The events of all processes, in the order in which they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.events: list[dict[str, Any]] = []

    def new(self) -> list[dict[str, Any]]:
        """Those since the last call; a line that is being written waits for its end."""
        found = []
        for file in sorted(self._folder.glob(EVENTS)):
            with file.open("rb") as stream:
                stream.seek(self._read.get(file, 0))
                data = stream.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[file] = self._read.get(file, 0) + len(whole)
            found += [json.loads(line) for line in whole.splitlines()]
        found.sort(key=lambda event: event["time"])
        self.events += found
        return found


def end(process: subprocess.Popen[bytes]) -> None:
    """End vLLM and all that it started: politely first, so that it removes its shared memory."""
    left = _processes(process.pid)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    psutil.wait_procs(left, timeout=_PATIENCE_S)
    for other in _processes(process.pid):
        with contextlib.suppress(psutil.Error):
            other.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_PATIENCE_S)
    psutil.wait_procs(_processes(process.pid), timeout=_PATIENCE_S)


def _processes(root: int) -> list[psutil.Process]:
    """All processes of the session that ``root`` leads, whoever is their parent by now. (Their
    environment does not tell: vLLM writes titles over it.)
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == root and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _end_with_parent() -> None:
    """In the new process: SIGTERM if gpuprobe is killed, so that nothing is left of it."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)


@contextlib.contextmanager
def _signals_end_this() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, as SIGINT raises KeyboardInterrupt."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def all_events(folder: Path) -> list[dict[str, Any]]:
    """The events of a vLLM that has ended."""
    reader = EventReader(folder)
    reader.new()
    return reader.events
