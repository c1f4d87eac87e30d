"""The cost of detecting hazards per operator, compared with torch's own sanitizer.

Both watch the same loop on the same simulated GPU (``compute="shapes"``), in one run, by turns:
the bare loop, the loop under ``gpuprobe.detect_hazards``, the loop under torch's
``CUDASanitizerDispatchMode``. Cost is the least CPU time of a round over the bare loop's, which
other programs of the machine disturb least. Then memory: what each keeps after many reads of a
weight that is never written.

Usage: python benchmarks/hazard_cost.py [--rounds 15] [--operators 400] [--launches 1000000]
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable

import torch
from torch.cuda._sanitizer import CUDASanitizerDispatchMode, EventHandler

import gpuprobe
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.events import Allocation, EventRecord, EventWait, Free, Launch
from gpuprobe.hazards.footprint import Footprint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--operators", type=int, default=400)
    parser.add_argument("--launches", type=int, default=1_000_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bare, ours, theirs = per_operator(args.rounds, args.operators)
    cost, other = ours - bare, theirs - bare
    print(f"{'per operator':<34}{'time':>12}{'cost':>12}")
    for name, seconds in (("simulated GPU alone", bare), ("gpuprobe", ours), ("torch", theirs)):
        print(f"{name:<34}{seconds * 1e6:>9.1f} us{(seconds - bare) * 1e6:>9.1f} us")
    print(f"gpuprobe / torch's sanitizer: {cost / other:.2f}   (goal: at most 0.33)")
    print()
    kept, size = memory(args.launches)
    share, each = torch_memory(20_000)
    print(f"{args.launches:,} launches: {kept} accesses kept, {size / 2**20:.1f} MiB grown")
    print(f"torch's sanitizer: {each:.0f} bytes per launch ({share:,} launches measured)")


def per_operator(rounds: int, operators: int) -> tuple[float, float, float]:
    """Seconds per operator: alone, under gpuprobe, under torch's sanitizer."""
    times: dict[str, list[float]] = {"bare": [], "ours": [], "theirs": []}
    with gpuprobe.virtual_gpu("h100-80gb", "shapes"):
        weight = torch.randn(64, 64, device="cuda")
        batch = torch.randn(64, 64, device="cuda")

        def loop() -> None:
            value = batch
            for _ in range(operators // 4):
                value = value @ weight
                value = value.relu()
                value = value + batch
                value.mul_(0.5)

        def timed(run: Callable[[], None]) -> float:
            gc.collect()
            start = time.process_time()  # what else the machine does is not counted
            run()
            return (time.process_time() - start) / operators

        loop()
        for _ in range(rounds):
            times["bare"].append(timed(loop))
            with gpuprobe.detect_hazards():
                loop()
                times["ours"].append(timed(loop))
            handler = CUDASanitizerDispatchMode()
            with handler:
                loop()
                times["theirs"].append(timed(loop))
    return tuple(min(values) for values in times.values())  # type: ignore[return-value]


def memory(launches: int) -> tuple[int, int]:
    """Accesses kept and bytes grown by an engine over many launches."""
    engine = Engine()
    main_stream, side = engine.stream(0, 0), engine.stream(0, 1)
    weight = Footprint(0, 4096)
    engine.apply(Allocation(0, 4096))
    tracemalloc.start()
    before = 0
    for at in range(launches):
        address = 10_000 + 512 * (at % 64)
        engine.apply(Allocation(address, 512))
        access = [(0, weight, False), (address, Footprint(address, address + 512), True)]
        engine.apply(Launch(main_stream if at % 3 else side, "op", access, "line"))
        engine.apply(Free(address))
        if at % 16 == 0:
            engine.apply(EventRecord(1, main_stream, "line"))
            engine.apply(EventWait(1, side, "line"))
        if at == launches // 10:
            before = tracemalloc.get_traced_memory()[0]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return engine.kept, grown


def torch_memory(launches: int) -> tuple[int, float]:
    """Bytes that torch's handler keeps per launch that reads the same tensor."""
    handler = EventHandler()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(launches):
        handler._handle_kernel_launch(0, {1}, set(), set(), "op", {1: []})
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return launches, grown / launches


if __name__ == "__main__":
    main()
