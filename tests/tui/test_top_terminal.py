"""The dashboard in a real terminal, on real processes, beside a real training run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_library import build, compiler
from real_terminal import Terminal

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    made = Terminal(tmp_path)
    made.start()
    yield made
    made.tmux("kill-server")


def fleet_with(pid: int, folder: Path) -> Path:
    """A library that lists the process on the first of two GPUs."""
    fleet = json.loads((ROOT / "gpuprobe/testing/fleets/8xh100.json").read_text())
    fleet["devices"] = fleet["devices"][:2]
    for device, listed in zip(fleet["devices"], ([pid, 1], [1]), strict=True):
        device["processes"] = [{"pid": one, "memory": 5 << 30} for one in listed]
    fleet |= {"environ": {}, "cuda_order": [0, 1]}
    path = folder / "mine.json"
    path.write_text(json.dumps(fleet))
    return build(str(path), folder / "lib")


async def test_from_a_training_run_to_its_end(terminal: Terminal, tmp_path: Path) -> None:
    """Start, attach, filter, sort, look into a step, end the run, quit."""
    if compiler() is None:
        pytest.skip("no C compiler for the fake driver library")
    run = subprocess.Popen(
        [sys.executable, "-m", "gpuprobe", "run", "-q", "-o", "mine.gpuprobe",
         str(ROOT / "examples" / "train_gpt.py"), "--steps", "1000000", "--layers", "1"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        library = fleet_with(run.pid, tmp_path)
        for _ in range(1200):
            if list(tmp_path.glob("mine.gpuprobe/*.jsonl")):
                break
            await asyncio.sleep(0.05)
        terminal.type(f"cd {tmp_path}; export XDG_CONFIG_HOME={tmp_path}/config")
        terminal.type(f"LD_LIBRARY_PATH={library} gpuprobe top --interval 0.25; echo left with $?")
        await terminal.shows("H100 80GB HBM3")
        await terminal.shows("recorded: R")  # it was found by itself
        terminal.keys("/")
        await terminal.shows("Enter keeps")
        terminal.keys("-l", f"pid:{run.pid}")
        await terminal.shows("1 of 3")
        terminal.keys("Enter")
        await terminal.shows("Enter keeps", gone=True)
        terminal.keys("P")
        await terminal.shows("PID▼")
        # The run of this process; the one that was found first may be another test's.
        terminal.keys("Enter")
        await terminal.shows(f"process {run.pid}")
        await terminal.shows("mine.gpuprobe · running", keys=("Enter",))
        await terminal.shows("Step 1 ·", keys=("g", "j"))
        terminal.keys("Escape")
        await terminal.shows(f"process {run.pid}")
        terminal.keys("Escape")
        await terminal.shows("PID▼")
        terminal.keys("K")
        await terminal.shows(f"End process {run.pid}?")
        assert run.poll() is None
        terminal.keys("t")
        assert await asyncio.to_thread(run.wait, 60) is not None
        terminal.keys("q")
        await terminal.shows("left with 0")
        assert json.loads((tmp_path / "config/gpuprobe/top.json").read_text())["sort"] == "pid"
    finally:
        run.kill()
        run.wait()


BROKEN = """
import sys
from gpuprobe.tui.monitor.app import TopApp
from contextlib import contextmanager

class Broken:
    reads = 0
    def read(self):
        from gpuprobe.api.devices import inventory
        from gpuprobe.model.machine.monitor import Moment
        self.reads += 1
        if self.reads > 2:
            raise ZeroDivisionError("on purpose")
        return Moment(inventory(("nvml",), "8xh100"))

@contextmanager
def source():
    yield Broken()

app = TopApp(interval=0.1, source=source)
app.run()
print("ended by", type(app.crash).__name__, app.return_code)
"""


async def test_the_terminal_is_given_back_whatever_ends_the_screen(
    terminal: Terminal, tmp_path: Path
) -> None:
    def alternate() -> str:
        return terminal.tmux("display-message", "-p", "-t", "t", "#{alternate_on}").strip()

    for number in (signal.SIGHUP, signal.SIGTERM):
        command = "exec gpuprobe top --demo --readonly"
        terminal.type(f"clear; sh -c 'echo $$ > {tmp_path}/pid; {command}'; echo ended $?")
        await terminal.shows("H100 80GB HBM3")
        assert alternate() == "1"
        os.kill(int((tmp_path / "pid").read_text()), number)
        await terminal.shows(f"ended {128 + number}")
        assert alternate() == "0"
    (tmp_path / "broken.py").write_text(BROKEN)
    terminal.type(f"clear; {sys.executable} {tmp_path}/broken.py")
    await terminal.shows("ended by ZeroDivisionError 70")
    assert alternate() == "0"
