"""What a report of many ranks costs, reading included: CPU time and memory.

    python benchmarks/fleet_report.py [--jobs 64x1000,1024x1000] [--keep FOLDER]

Makes a recording with the project's own writer for each job (ranks x steps), then runs ``gpuprobe
report`` on it in a separate process. Every step has five phases, each with a window of one GPU;
one rank loads its data slowly and one holds more memory, and the report has to name both. Prints
CPU seconds (user and system) and peak resident memory of that process, and the lines it printed.
``--keep`` leaves the recordings in a folder, where the next run finds them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpuprobe.model.memory import AllocatorCounts, Category
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import (
    Collective,
    DeviceWindow,
    Environment,
    HostWindow,
    KnownTensors,
    Phase,
    Session,
    SessionEnd,
    Step,
)
from gpuprobe.model.values import Bytes, Peak
from gpuprobe.recording.writer import RecordingWriter

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
MS = 1_000_000
SLOW, FULL = 17, 5  # the rank that the others wait for, and the one that holds more
PHASES = {"data": 2, "forward": 20, "backward": 40, "optimizer": 5, "other": 1}  # ms


def window(allocated: int, peak: int) -> DeviceWindow:
    size, reserved = Bytes(allocated), Bytes(peak + 64 * MIB)
    counts = AllocatorCounts(size, size, reserved, size)
    return DeviceWindow("cuda:0", counts, counts, Peak.exactly(peak), Peak.exactly(reserved))


def make_step(rank: int, index: int) -> Step:
    spent = dict(PHASES)
    if rank == SLOW:
        spent["data"], spent["backward"] = spent["data"] + 15, spent["backward"] - 15
    state = 800 * MIB + (300 * MIB if rank == FULL else 0)
    peak = 4000 * MIB + (rank % 3) * MIB + (300 * MIB if rank == FULL else 0)
    start = index * 70 * MS
    phases, at = [], start
    for name, duration in spent.items():
        here = window(2000 * MIB, peak if name == "backward" else peak - 500 * MIB)
        phases.append(Phase(name, at, duration * MS, 1, (here,), HostWindow(Bytes(1), Bytes(1))))
        at += duration * MS
    tensors = KnownTensors(
        "cuda:0",
        {Category.PARAMETER: Bytes(400 * MIB), Category.OPTIMIZER_STATE: Bytes(state)},
        Bytes(2000 * MIB - 400 * MIB - state),
    )
    return Step(
        index,
        start,
        at - start,
        tuple(phases),
        (window(2000 * MIB, peak),),
        HostWindow(Bytes(1), Bytes(1)),
        (tensors,),
        collectives=(Collective("all_reduce", 2, Bytes(8), 50_000),),
    )


def make_rank(rank: int, ranks: int, steps: int) -> RankRecording:
    session = Session(
        1.0, 100 + rank, ("train.py",), "counters", ("cuda:0",), "", rank, rank % 8, ranks
    )
    return RankRecording(
        session,
        Environment("0", "3.11", "linux", f"node{rank // 8}"),
        tuple(make_step(rank, index) for index in range(steps)),
        end=SessionEnd(steps * 70 * MS),
    )


def written(path: Path, ranks: int, steps: int) -> Path:
    """A recording of so many ranks; those that are there already are kept."""
    for rank in range(ranks):
        stream = path / f"rank-{rank:05d}.jsonl"
        if stream.exists() and stream.read_bytes()[-400:].find(b'{"type":"end"') >= 0:
            continue
        made = make_rank(rank, ranks, steps)
        writer = RecordingWriter.create(path, rank=rank, world_size=ranks, force=stream.exists())
        writer.session(made.session, made.environment)
        for step in made.steps:
            writer.step(step)
        if made.end is not None:
            writer.end(made.end)
        writer.close()
    return path


def report(path: Path) -> tuple[float, int, list[str]]:
    """CPU seconds, peak resident memory in bytes, and what was printed."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpuprobe", "report", str(path)],
            stdout=out,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"the report of {path} failed")
        out.seek(0)
        lines = out.read().splitlines()
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", default="64x1000,1024x1000")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(exist_ok=True)
        print(f"{'ranks':>6} {'steps':>6} {'MiB':>6} {'CPU s':>7} {'RSS MiB':>8} {'lines':>6}")
        for job in options.jobs.split(","):
            ranks, steps = map(int, job.split("x"))
            path = written(folder / f"job-{ranks}x{steps}.gpuprobe", ranks, steps)
            size = sum(file.stat().st_size for file in path.iterdir())
            spent, memory, lines = report(path)
            print(
                f"{ranks:>6} {steps:>6} {size >> 20:>6} {spent:>7.2f} "
                f"{memory >> 20:>8} {len(lines):>6}"
            )
            named = " ".join(" ".join(lines).split())
            assert f"rank {FULL} peaks highest" in named
            assert f"rank {SLOW} is the one the others wait for" in named


if __name__ == "__main__":
    main()
