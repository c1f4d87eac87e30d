"""How long ``gpuprobe view`` takes to open a recording of N events, and whether it stalls.

    python benchmarks/view_speed.py [--events 1000000] [--snapshot]

A recording with one traced step of N events (as benchmarks/analysis_speed.py makes them: up to
15,000 blocks at a time, 2,000 stacks) and 5,000 steps is written to a scratch folder, then opened
in Textual's test driver at 160×50. *Opened* is when the plot, the list and the treemap of the
trace are on the screen, from before the recording is looked at; the limit is 3 s. Then keys are
pressed: 200 along the trace, 50 by single events, 20 zooms, 100 down the list, and 200 through the
steps.

A *stall* is how late the event loop comes back to a task that sleeps for 5 ms: what a key that is
pressed at the worst moment waits before anything is done. The limit while scrolling is 50 ms.
What other processes of the machine take is not counted: a stall is at most the CPU time that this
process spent in it.
With ``--snapshot``, a torch snapshot of N events is opened as well (benchmarks/make_snapshot.py).
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from analysis_speed import make_trace

from gpuprobe.api.live import Followed
from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.run.session import DeviceWindow, Environment, Phase, Session, SessionEnd, Step
from gpuprobe.model.values import Bytes, Peak
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.tui.viewer.app import ViewApp
from gpuprobe.tui.viewer.trace import TracePane
from gpuprobe.tui.widgets.table import ItemTable

STEPS = 5_000


def write_recording(path: Path, events: int) -> None:
    writer = RecordingWriter.create(path)
    writer.session(
        Session(2e9, 1, ("train.py",), "trace", ("cuda:0",)),
        Environment("0", "3", "Linux", "another-host", torch="2.13.0"),
    )
    trace = make_trace(events)
    trace.step = 0
    chunk = writer.trace(trace)
    for index in range(STEPS):
        size = Bytes((1 << 30) + index % 7 * (1 << 20))
        counts = AllocatorCounts(size, size, size, size)
        window = DeviceWindow("cuda:0", counts, counts, Peak.exactly(size), Peak.exactly(size))
        phase = Phase("forward", index * 10, 10, 1, (window,))
        traces = (chunk,) if not index else ()
        writer.step(Step(index, index * 10, 10, (phase,), (window,), traces=traces))
    writer.end(SessionEnd(STEPS * 10))
    writer.close()


class Stalls:
    """The longest delays of the event loop since it was last asked."""

    def __init__(self) -> None:
        self.longest: list[float] = []
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            before, spent = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.005)
            late = time.perf_counter() - before - 0.005
            self.longest.append(min(late, time.process_time() - spent))

    def take(self) -> tuple[float, float]:
        """(the longest, the 99th percentile) in ms."""
        found = sorted(self.longest) or [0.0]
        self.longest = []
        return 1e3 * found[-1], 1e3 * found[int(0.99 * (len(found) - 1))]

    def stop(self) -> None:
        self._task.cancel()


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def measure(path: Path, *, steps: bool) -> float:
    began, cpu = time.perf_counter(), time.process_time()
    app = ViewApp(Followed(path), interval=3600)
    async with app.run_test(size=(160, 50)) as pilot:
        stalls = Stalls()
        screen: Any = app.screen
        await until(lambda: screen.run_model is not None)
        listed = time.perf_counter() - began
        pane = screen.query_one(TracePane)
        if steps:
            await pilot.press("g", "t")
        await until(lambda: pane.ready and pane.treemap.rects)
        opened = time.perf_counter() - began
        spent = time.process_time() - cpu
        print(
            f"  list of steps after {listed:5.2f} s, trace after {opened:5.2f} s "
            f"({spent:.2f} s of CPU)"
        )
        _say("while opening", stalls.take(), 0.0, 1)
        rounds: list[tuple[str, tuple[str, ...], int]] = [
            ("along the trace", ("left", "left", "right", "H"), 50),
            ("by single events", ("comma", "full_stop"), 25),
            ("zoom", ("plus", "minus"), 10),
            ("segment map", ("m", "left"), 10),
            ("down the list", ("down",), 100),
        ]
        if steps:
            rounds.append(("steps", ("down",), 200))
        for name, keys, times in rounds:
            if name == "steps":
                await pilot.press("1")
                await until(lambda: screen.query_one("#steps", ItemTable).count == STEPS)
            stalls.take()
            before = time.perf_counter()
            for _ in range(times):
                for key in keys:
                    await pilot.press(key)
            took = time.perf_counter() - before
            _say(name, stalls.take(), took, times * len(keys))
        stalls.stop()
    return opened


def _say(name: str, stall: tuple[float, float], took: float, keys: int) -> None:
    each = f"{1e3 * took / keys:6.1f} ms a key" if took else ""
    print(f"  {name:<18} longest stall {stall[0]:6.1f} ms, 99 % {stall[1]:6.1f} ms   {each}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--snapshot", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "big.gpuprobe"
        write_recording(path, arguments.events)
        times = []
        for number in range(arguments.rounds):
            print(f"recording of {arguments.events:,} events, round {number + 1}")
            times.append(asyncio.run(measure(path, steps=True)))
        print(f"opened in {sorted(times)[len(times) // 2]:.2f} s (median), limit 3 s")
        if arguments.snapshot:
            snapshot = Path(folder) / "big.pickle"
            maker = Path(__file__).with_name("make_snapshot.py")
            command = [sys.executable, str(maker), str(snapshot)]
            subprocess.run([*command, "--events", str(arguments.events)], check=True)
            print(f"snapshot of {arguments.events:,} events")
            asyncio.run(measure(snapshot, steps=False))


if __name__ == "__main__":
    main()
