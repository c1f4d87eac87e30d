"""How long it takes to merge the steps of many ranks and to name the worst of them.

    python benchmarks/rank_merge.py [--ranks 64] [--steps 1000]

The recording is made in memory: every step has five phases, each with a window of one GPU, and
one rank loads its data slowly and holds more memory. Reading the same recording from a disk is
timed beside it. CPU seconds of this process, the best of three.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpuprobe
from gpuprobe.analysis.ranks import compare_ranks
from gpuprobe.model.memory import AllocatorCounts, Category
from gpuprobe.model.run.recording import SCHEMA_VERSION, RankRecording, Recording
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
from gpuprobe.model.values import Bytes, Peak, Unavailable
from gpuprobe.recording.writer import RecordingWriter

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


def written(recording: Recording, folder: Path) -> Path:
    path = folder / "ranks.gpuprobe"
    for rank in recording.ranks:
        writer = RecordingWriter.create(
            path, rank=rank.session.rank, world_size=len(recording.ranks)
        )
        writer.session(rank.session, rank.environment)
        for step in rank.steps:
            writer.step(step)
        if rank.end is not None:
            writer.end(rank.end)
        writer.close()
    return path


def best(action: Callable[[], Any], times: int = 3) -> float:
    spent = []
    for _ in range(times):
        began = time.process_time()
        action()
        spent.append(time.process_time() - began)
    return min(spent)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    made = Recording(
        "ranks.gpuprobe",
        SCHEMA_VERSION,
        tuple(make_rank(rank, options.ranks, options.steps) for rank in range(options.ranks)),
    )
    found = compare_ranks(made)
    assert found is not None
    print(f"{options.ranks} ranks × {options.steps:,} steps")
    print(f"  merge and compare  {best(lambda: compare_ranks(made)):6.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        path = written(made, Path(folder))
        size = sum(file.stat().st_size for file in path.iterdir())
        print(
            f"  read from disk     {best(lambda: gpuprobe.load(path), 1):6.2f} s ({size >> 20} MiB)"
        )
        loaded = gpuprobe.load(path)
    print(f"  the whole report   {best(lambda: gpuprobe.report(loaded), 1):6.2f} s")
    assert not isinstance(found.memory, Unavailable)
    assert not isinstance(found.time, Unavailable)
    print(f"  highest peak: rank {found.memory.worst.rank}, {found.memory.categories[0]}")
    print(f"  slowest: rank {found.time.slowest}, {found.time.phases[0]}")


if __name__ == "__main__":
    main()
