"""Write a synthetic torch memory snapshot, true to the schema, of any number of events.

    python benchmarks/make_snapshot.py out.pickle [--events 1000000] [--depth 28] [--seed 0]

The expensive form: every event has a separate list of frames (frame dictionaries shared), all
nine keys of torch 2.10, pool ids included. A million events take 1.2 GB while they are written.

The program it shows trains a model: parameters alive from before the trace; then, in each
step, activations in the forward pass, gradients and temporaries in the backward pass, and
frees in reverse order. Small blocks come from 2 MiB segments, large ones have a separate
segment that is cached and used again. One list that grows is a leak.
"""

from __future__ import annotations

import argparse
import pickle
import random
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
_DEFAULT_POOL = [0, 0]  # each event has its own tuple of it


class Memory:
    """Addresses that do not overlap: 2 MiB segments cut into equal blocks, and large ones."""

    def __init__(self) -> None:
        self.next = 0x7F00_0000_0000
        self.free: dict[int, list[int]] = {}
        self.segments: dict[int, tuple[int, int]] = {}  # address -> total, block size

    @staticmethod
    def block(size: int) -> int:
        unit = 512 if size <= MIB else 2 * MIB
        return -(-size // unit) * unit

    def take(self, size: int) -> tuple[int, tuple[int, int] | None]:
        """An address for ``size`` bytes; and the new segment (address, size), if one was made."""
        block = self.block(size)
        free = self.free.setdefault(block, [])
        if free:
            return free.pop(), None
        total = max(block, 2 * MIB)
        start, self.next = self.next, self.next + total
        self.segments[start] = (total, block)
        free.extend(range(start + (total // block - 1) * block, start, -block))
        return start, (start, total)

    def give(self, address: int, size: int) -> None:
        self.free[self.block(size)].append(address)


class Trace:
    """The events of a training run, as they happen: 300 stacks, of a few shared outer frames and
    inner frames that differ.
    """

    def __init__(self, rng: random.Random, depth: int) -> None:
        self.rng = rng
        self.frames = [
            {
                "filename": f"/home/user/project/part_{index % 40}.py",
                "line": 10 + index * 7,
                "name": f"function_{index}",
            }
            for index in range(404)
        ]
        self.stacks = [
            [rng.randrange(400) for _ in range(depth - 4 - i % 3)] + [400, 401, 402, 403]
            for i in range(300)
        ]
        self.clock = 1_748_732_496_203_737
        self.events: list[dict[str, Any]] = []
        self.memory = Memory()
        self.alive: dict[int, int] = {}
        for _ in range(400):  # parameters, from before the trace
            size = rng.choice((4096, 2 * MIB, 16 * MIB))
            self.alive[self.memory.take(size)[0]] = size

    def event(self, action: str, address: int, size: int, stack: int) -> None:
        self.clock += self.rng.randrange(1, 40)
        self.events.append(
            {
                "action": action, "addr": address, "size": size, "stream": 0,
                "time_us": self.clock, "compile_context": "N/A", "user_metadata": "",
                "pool_id": tuple(_DEFAULT_POOL),
                "frames": [self.frames[at] for at in self.stacks[stack]],
            }
        )  # fmt: skip

    def make(self, stack: int, size: int) -> tuple[int, int, int]:
        address, segment = self.memory.take(size)
        if segment:
            self.event("segment_alloc", *segment, stack)
        self.event("alloc", address, size, stack)
        self.alive[address] = size
        return address, size, stack

    def drop(self, address: int, size: int, stack: int) -> None:
        self.event("free_requested", address, size, stack)
        self.event("free_completed", address, size, stack)
        self.memory.give(address, size)
        del self.alive[address]

    def step(self) -> None:
        """One training step, with a block that leaks."""
        rng, kept = self.rng, []
        for layer in range(60):
            kept.append(self.make(layer, rng.choice((8 * MIB, 20 * MIB, 3000, 700_000))))
            for extra in range(3):
                size = rng.choice((2048, 100_000, 4 * MIB))
                self.drop(*self.make(60 + layer + 60 * extra, size))
        self.make(299, 1536)  # the leak
        for layer in reversed(range(60)):
            gradient = self.make(240 + layer % 59, rng.choice((2 * MIB, 1000)))
            self.drop(*kept.pop())
            self.drop(*gradient)


def snapshot(events: int, depth: int, seed: int) -> dict[str, Any]:
    trace = Trace(random.Random(seed), depth)
    while len(trace.events) < events - 1200:
        trace.step()
    while len(trace.events) < events:
        trace.drop(*trace.make(0, 1000))
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1,
        "garbage_collection_threshold": 0.0, "expandable_segments": False,
        "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
    }  # fmt: skip
    return {
        "device_traces": [trace.events],
        "segments": [
            segment(trace.alive, start, total, block)
            for start, (total, block) in sorted(trace.memory.segments.items())
        ],
        "allocator_settings": settings,
        "external_annotations": [],
    }


def segment(alive: dict[int, int], start: int, total: int, block: int) -> dict[str, Any]:
    """A segment of blocks of ``block`` bytes, as the snapshot lists it."""
    blocks = []
    for at in range(start, start + total, block):
        size = alive.get(at)
        block = min(block, start + total - at)  # what is left at the end
        state = "active_allocated" if size else "inactive"
        blocks.append({"address": at, "size": block, "requested_size": size or 0,
                       "state": state, "frames": []})  # fmt: skip
    used = sum(b["size"] for b in blocks if b["requested_size"])
    return {
        "device": 0, "address": start, "total_size": total, "allocated_size": used,
        "active_size": used, "requested_size": sum(b["requested_size"] for b in blocks),
        "stream": 0, "segment_type": "small" if block <= MIB else "large",
        "segment_pool_id": tuple(_DEFAULT_POOL),
        "is_expandable": False, "frames": [], "blocks": blocks,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("output", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--depth", type=int, default=28)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with args.output.open("wb") as out:
        pickle.dump(snapshot(args.events, args.depth, args.seed), out, protocol=4)
    print(f"{args.output}: {args.output.stat().st_size / 1e6:.0f} MB, {args.events} events")


if __name__ == "__main__":
    main()
