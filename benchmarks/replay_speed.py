"""How fast exact replay is, in events per second.

    python benchmarks/replay_speed.py [--events N] [--runs N] [SNAPSHOT ...]

Replays a synthetic training run (activations of many sizes kept through the forward pass and
freed through the backward pass, with temporaries, on a fragmented heap), the same under other
settings, and the torch snapshots that are given. A replay counts only if it is exact. The time
is of the whole replay: the start state, every event, and the check of the final layout. Goal: at
least 300,000 events per second.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import time

from gpuprobe.allocator.blocks import PoolBlock
from gpuprobe.allocator.recorder import TraceRecorder
from gpuprobe.allocator.replay import replay_trace
from gpuprobe.allocator.settings import parse_conf
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.model.trace import MemoryTrace

GOAL = 300_000
MIB = 1 << 20


def training_run(events: int, conf: str = "") -> MemoryTrace:
    """A run of about ``events`` events on the simulator itself."""
    rng = random.Random(0)
    sim = Simulator(parse_conf(conf), device_memory=80 << 30)
    recorder = TraceRecorder(sim)

    def take(size: int) -> PoolBlock:
        block = sim.malloc(size)
        if block is None:
            raise SystemExit("the simulated device has no limit, yet ran out of memory")
        return block

    weights = [take(rng.randrange(1, 16 * MIB)) for _ in range(300)]
    layers = [
        [rng.choice((4096, 65536, MIB, 3 * MIB, 12 * MIB, 33 * MIB)) for _ in range(8)]
        for _ in range(48)
    ]
    while len(recorder.events) < events:
        scale = rng.uniform(0.5, 1.0)  # batches of changing length fragment the heap
        kept: list[list[PoolBlock]] = []
        for layer in layers:
            kept.append([take(max(1, int(size * scale))) for size in layer])
            sim.free(take(int(24 * MIB * scale)))
        gradients = []
        while kept:
            temporary = take(int(8 * MIB * scale))
            for block in kept.pop():
                sim.free(block)
            gradients.append(take(MIB + len(kept) * 4096))
            sim.free(temporary)
        for block in gradients:
            sim.free(block)
    for block in weights:
        sim.free(block)
    return recorder.trace()


def measure(name: str, trace: MemoryTrace, runs: int) -> float:
    """Print and return the best events per second of ``runs`` replays."""
    best = 0.0
    for _ in range(runs):
        start = time.perf_counter()
        result = replay_trace(trace, device_memory=80 << 30)
        seconds = time.perf_counter() - start
        if not result.exact:
            raise SystemExit(f"{name}: not exact: {result.first_divergence}")
        best = max(best, result.events / seconds)
    print(f"{name:<44} {len(trace.events):>9,} events  {best:>11,.0f}/s  {best / GOAL:5.2f}x goal")
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=300_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("snapshots", nargs="*", help="torch snapshots (.pickle)")
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, best of {args.runs} runs, goal {GOAL:,} events/s")
    plain = measure("training run", training_run(args.events), args.runs)
    for conf in ("expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:8"):
        measure(f"  {conf}", training_run(args.events // 3, conf), args.runs)
    if args.snapshots:
        from gpuprobe.recording.snapshot.load import read_snapshot

        for path in args.snapshots:
            for trace in read_snapshot(path).ranks[0].load_traces():
                measure(path.rpartition("/")[2][-44:], trace, args.runs)
    return 0 if plain >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
