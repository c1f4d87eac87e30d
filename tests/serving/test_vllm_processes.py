"""A server that comes up, dies, hangs, or does not want to end: nothing is left of any."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import psutil
import pytest
from waiting import read_fifo, wait_for_end

from gpuprobe.planning.serving import launch

_SERVER = """
import json, os, signal, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
folder, how = sys.argv[1:]
shared = SharedMemory(create=True, size=4096)
with open(f"{folder}/shared", "w") as file:
    file.write(shared.name)
child = subprocess.Popen([sys.executable, "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"])
with open(f"{folder}/children", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
def event(stage):
    with open(f"{folder}/{os.getpid()}.events", "a") as file:
        file.write(json.dumps({"stage": stage, "time": time.time()}) + "\\n")
event("load_model: begins")
if how == "dies":
    sys.exit("ValueError: no such model")
if how == "up":
    event("up")
if os.path.exists(f"{folder}/begun"):
    open(f"{folder}/begun", "w").close()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pause()
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    file = tmp_path / "server.py"
    file.write_text(_SERVER)
    return file


def _nothing_is_left(folder: Path) -> None:
    for pid in map(int, (folder / "children").read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not (Path("/dev/shm") / (folder / "shared").read_text()).exists()


def _run(
    server: Path, how: str, folder: Path, clock: Callable[[], float] = time.monotonic
) -> list[str]:
    command = [sys.executable, str(server), str(folder), how]
    return [event["stage"] for event in launch.run(command, os.environ, folder, clock=clock)]


def test_up(server: Path, tmp_path: Path) -> None:
    assert _run(server, "up", tmp_path) == ["load_model: begins", "up"]
    _nothing_is_left(tmp_path)


def test_it_dies(server: Path, tmp_path: Path) -> None:
    with pytest.raises(launch.ServerFailed) as caught:
        _run(server, "dies", tmp_path)
    assert caught.value.code == 1
    assert "no such model" in (tmp_path / launch.LOG).read_text()
    _nothing_is_left(tmp_path)


def test_it_hangs(server: Path, tmp_path: Path) -> None:
    minutes = count(step=60)

    def clock() -> float:  # it stands still until the server has begun to load its model
        return next(minutes) if list(tmp_path.glob("*.events")) else 0

    with pytest.raises(launch.ServerFailed) as caught:
        _run(server, "hangs", tmp_path, clock)
    assert caught.value.code is None
    _nothing_is_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("times", [1, 2])
def test_interrupted(server: Path, tmp_path: Path, number: signal.Signals, times: int) -> None:
    """A second signal comes while the processes are being ended."""
    program = (
        "import sys, os; from pathlib import Path; from gpuprobe.planning.serving import launch\n"
        "launch.run([sys.executable, *sys.argv[1:]], os.environ, Path(sys.argv[2]))"
    )
    os.mkfifo(tmp_path / "begun")
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(server), str(tmp_path), "hangs"],
        stderr=subprocess.DEVNULL,
    )
    read_fifo(tmp_path / "begun")
    server_id, _ = map(int, (tmp_path / "children").read_text().split())
    for _ in range(times):
        process.send_signal(number)
        if times > 1:  # once the server has ended, its processes are being ended
            wait_for_end(server_id)
    assert process.wait(timeout=60) != 0
    _nothing_is_left(tmp_path)


def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    file = tmp_path / "1.events"
    whole = json.dumps({"stage": "up", "time": 1.0}) + "\n"
    file.write_text(whole + whole[:10])
    reader = launch.EventReader(tmp_path)
    assert len(reader.new()) == 1
    with file.open("a") as stream:
        stream.write(whole[10:])
    assert [event["stage"] for event in reader.new()] == ["up"]
    assert len(reader.events) == 2
