"""How long the analysis of a trace of N events takes, and which function takes it.

    python benchmarks/analysis_speed.py [--events 1000000]

The trace is made in memory: training-like steps over a simulated address space, a third of
the bytes in large blocks, every allocation with one of 2,000 stacks. The import of a snapshot
is not part of it. Times are CPU seconds of this process; shares are of their sum.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpuprobe.analysis.growth.leaks import leaks
from gpuprobe.analysis.peak.high_water import by_category, by_line, by_module, high_water
from gpuprobe.analysis.reserved.fragmentation import fragmentation
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.analysis.trace.timeline import thin, timeline
from gpuprobe.model.memory import Block, BlockState, Segment, TraceAction
from gpuprobe.model.trace import AllocatorSettings, Frame, MemoryTrace

_ALLOC = TraceAction.ALLOC.code
_REQUESTED = TraceAction.FREE_REQUESTED.code
_COMPLETED = TraceAction.FREE_COMPLETED.code
_MIB = 1 << 20


def make_trace(events: int, seed: int = 0) -> MemoryTrace:
    """A trace of about ``events`` events: blocks come from equal slots, freed in random order."""
    rng = random.Random(seed)
    trace = MemoryTrace(device="cuda:0", settings=AllocatorSettings())
    table = trace.stacks
    stacks = []
    torch_frames = [
        Frame(f"/v/site-packages/torch/nn/modules/m{i}.py", i, "forward") for i in range(40)
    ]
    for index in range(2000):
        path = [table.frame(rng.choice(torch_frames)) for _ in range(10)]
        path.append(table.frame(Frame(f"/home/u/model{index % 50}.py", index, "forward")))
        path += [table.frame(rng.choice(torch_frames)) for _ in range(8)]
        path.append(table.frame(Frame("/home/u/train.py", 10 + index % 3, "main")))
        stacks.append(table.stack(tuple(path)))
    sizes = [4 * 1024, 300 * 1024, 900 * 1024 + 4, 4 * _MIB + 1000]
    slots: dict[int, list[int]] = {}
    segments = []
    for index, size in enumerate(sizes):
        slot = (size + 511) // 512 * 512
        base = (index + 1) << 40
        slots[size] = [base + i * slot for i in range(20_000)]
        # Large blocks get a segment each, small ones share: both are layouts torch can have.
        each = slot if size > _MIB else slot * 20_000
        segments += [(at, each, slot, size) for at in range(base, base + slot * 20_000, each)]
    out = trace.events
    live: list[tuple[int, int, int]] = []
    clock = 0
    while len(out) < events:
        clock += 3
        if len(live) < 15_000 and rng.random() < 0.55:
            size = rng.choice(sizes)
            address = slots[size].pop()
            stack = rng.choice(stacks)
            out.append(_ALLOC, address, size, 0, clock, stack)
            live.append((address, size, stack))
        elif live:
            index = rng.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            address, size, _ = live.pop()
            out.append(_REQUESTED, address, size, 0, clock)
            out.append(_COMPLETED, address, size, 0, clock)
            slots[size].append(address)
    final = []
    live.sort()
    starts = [address for address, _, _ in live]
    for base, total, slot, size in segments:
        mine = live[bisect_left(starts, base) : bisect_left(starts, base + total)]
        blocks, at = [], base
        for address, requested, stack in mine:
            if address > at:
                blocks.append(Block(at, address - at, 0, BlockState.INACTIVE))
            blocks.append(Block(address, slot, requested, BlockState.ALLOCATED, stack))
            at = address + slot
        if at < base + total:
            blocks.append(Block(at, base + total - at, 0, BlockState.INACTIVE))
        kind = "large" if size > _MIB else "small"
        final.append(Segment(0, base, total, 0, kind, blocks=tuple(blocks)))
    trace.segments = tuple(final)
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    trace = make_trace(arguments.events)

    best: dict[str, float] = {}

    def timed(name: str, work: Callable[..., Any], *given: Any) -> Any:
        before = time.process_time()
        result = work(*given)
        took = time.process_time() - before
        best[name] = min(best.get(name, took), took)
        return result

    count = len(trace.events)
    steps = [count * i // 10 for i in range(1, 10)]
    for _ in range(arguments.rounds):
        ledger = timed("ledger", ledger_of, trace)
        mark = timed("high_water", high_water, ledger)
        for function in (by_category, by_line, by_module):
            timed(function.__name__, function, mark)
        line = timed("timeline", timeline, ledger)
        timed("thin", thin, line, 2000)
        timed("fragmentation", fragmentation, trace)
        timed("leaks", leaks, ledger, steps)
    total = sum(best.values())
    print(f"{len(trace.events)} events, {len(ledger)} blocks, {len(mark)} live at the peak")
    for name, took in best.items():
        print(f"  {name:<14} {took * 1e3:8.1f} ms  {took / total:6.1%}")
    print(
        f"  {'sum':<14} {total * 1e3:8.1f} ms  {total / len(trace.events) * 1e9:.0f} ns per event"
    )


if __name__ == "__main__":
    main()
