"""Write a synthetic torch memory snapshot, true to the schema, of any number of events.

    python benchmarks/make_snapshot.py out.pickle [--events 1000000] [--depth 28] [--seed 0]

The expensive form: every event has a separate list of frames (frame dictionaries shared), all
nine keys of torch 2.10, pool ids included. It is written opcode by opcode in the form that
``pickle.dump(snapshot, file, protocol=4)`` gives, so a million events need no gigabytes here.

The program it shows trains a model: parameters alive from before the trace; then, in each
step, activations in the forward pass, gradients and temporaries in the backward pass, and
frees in reverse order. Small blocks come from 2 MiB segments, large ones have a separate
segment that is cached and used again. One list that grows is a leak.
"""

from __future__ import annotations

import argparse
import random
import struct
from pathlib import Path
from typing import BinaryIO

MIB = 1024 * 1024


class Writer:
    """Emits pickle opcodes, and numbers what it memoizes as pickle does."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._parts: list[bytes] = []
        self._held = 0
        self.memo = 0
        self.names: dict[str, int] = {}

    def emit(self, data: bytes) -> None:
        self._parts.append(data)
        self._held += len(data)
        if self._held > 1 << 16:
            self.flush()

    def flush(self) -> None:
        """Write what is held as one frame, of the size that pickle makes them."""
        self._out.write(b"\x95" + struct.pack("<Q", self._held))
        self._out.write(b"".join(self._parts))
        self._parts.clear()
        self._held = 0

    def get(self, index: int) -> bytes:
        return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)

    def memoized(self) -> int:
        self.memo += 1
        return self.memo - 1

    def text(self, text: str) -> bytes:
        known = self.names.get(text)
        if known is not None:
            return self.get(known)
        self.names[text] = self.memoized()
        raw = text.encode()
        return b"\x8c" + bytes([len(raw)]) + raw + b"\x94"


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(raw)]) + raw


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


class Stacks:
    """The frames of 300 stacks: a few shared outer frames, inner frames that differ."""

    def __init__(self, w: Writer, rng: random.Random, depth: int) -> None:
        self.w = w
        self.stacks = [
            [rng.randrange(400) for _ in range(depth - 4 - i % 3)] + [400, 401, 402, 403]
            for i in range(300)
        ]
        self.frames: dict[int, int] = {}
        self.compiled: dict[int, bytes] = {}

    def frame(self, index: int) -> bytes:
        w = self.w
        known = self.frames.get(index)
        if known is not None:
            return w.get(known)
        self.frames[index] = w.memoized()
        head = b"}\x94("
        body = w.text("filename") + w.text(f"/home/user/project/part_{index % 40}.py")
        body += w.text("line") + number(10 + index * 7) + w.text("name")
        return head + body + w.text(f"function_{index}") + b"u"

    def frame_list(self, stack: int) -> bytes:
        body = self.compiled.get(stack)
        if body is None:
            new = [i for i in self.stacks[stack] if i not in self.frames]
            self.w.memoized()
            body = b"".join(map(self.frame, self.stacks[stack]))
            if not new:
                self.compiled[stack] = body
            return b"]\x94(" + body + b"e"
        self.w.memoized()
        return b"]\x94(" + body + b"e"


class Trace:
    """The events of a training run, written as they happen."""

    def __init__(self, w: Writer, rng: random.Random, depth: int) -> None:
        self.w, self.rng = w, rng
        self.stacks = Stacks(w, rng, depth)
        self.clock = 1_748_732_496_203_737
        self.written = 0
        self.memory = Memory()
        self.alive: dict[int, int] = {}
        for _ in range(400):  # parameters, from before the trace
            size = rng.choice((4096, 2 * MIB, 16 * MIB))
            self.alive[self.memory.take(size)[0]] = size

    def event(self, action: str, address: int, size: int, stack: int) -> None:
        w = self.w
        if self.written % 1000 == 0:
            w.emit(b"e(" if self.written else b"(")
        self.written += 1
        self.clock += self.rng.randrange(1, 40)
        w.memoized()  # the dictionary
        parts = [
            b"}\x94(", w.text("action"), w.text(action), w.text("addr"), number(address),
            w.text("size"), number(size), w.text("stream"), b"K\x00", w.text("time_us"),
            number(self.clock), w.text("compile_context"), w.text("N/A"), w.text("user_metadata"),
            w.text(""), w.text("pool_id"), b"K\x00K\x00\x86\x94",
        ]  # fmt: skip
        w.memoized()  # the pool id
        parts += [w.text("frames"), self.stacks.frame_list(stack), b"u"]
        w.emit(b"".join(parts))

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


def write(out: BinaryIO, events: int, depth: int, seed: int) -> None:
    rng = random.Random(seed)
    w = Writer(out)
    out.write(b"\x80\x04")
    w.emit(b"}")
    w.memoized()
    w.emit(b"\x94(" + w.text("device_traces") + b"]\x94(]\x94")
    w.memoized(), w.memoized()
    trace = Trace(w, rng, depth)
    while trace.written < events - 1200:
        trace.step()
    while trace.written < events:
        trace.drop(*trace.make(0, 1000))
    w.emit(b"ee" + w.text("segments") + b"]\x94")
    w.memoized()
    for start, (total, block) in sorted(trace.memory.segments.items()):
        w.emit(segment(w, trace.alive, start, total, block) + b"a")
    divisions = {str(1 << i): 0 for i in range(16)}
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1,
        "garbage_collection_threshold": 0.0, "expandable_segments": False,
        "roundup_power2_divisions": divisions,
    }  # fmt: skip
    w.emit(w.text("allocator_settings") + plain(w, settings))
    w.emit(w.text("external_annotations") + plain(w, []) + b"u.")
    w.flush()


def segment(w: Writer, alive: dict[int, int], start: int, total: int, block: int) -> bytes:
    """A segment of blocks of ``block`` bytes, as the snapshot lists it."""
    blocks = []
    for at in range(start, start + total, block):
        size = alive.get(at)
        block = min(block, start + total - at)  # what is left at the end
        state = "active_allocated" if size else "inactive"
        blocks.append({"address": at, "size": block, "requested_size": size or 0,
                       "state": state, "frames": []})  # fmt: skip
    used = sum(b["size"] for b in blocks if b["requested_size"])
    return plain(
        w,
        {
            "device": 0, "address": start, "total_size": total, "allocated_size": used,
            "active_size": used, "requested_size": sum(b["requested_size"] for b in blocks),
            "stream": 0, "segment_type": "small" if block <= MIB else "large",
            "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
            "blocks": blocks,
        },
    )  # fmt: skip


def plain(w: Writer, value: object) -> bytes:
    """Any plain value, the way pickle writes it."""
    if value is True or value is False:
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return number(value) if value >= 0 else b"J" + struct.pack("<i", value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return w.text(value)
    if isinstance(value, tuple):
        data = b"".join(plain(w, item) for item in value) + b"\x86\x94"
        w.memoized()
        return data
    w.memoized()
    if isinstance(value, list):
        return b"]\x94(" + b"".join(plain(w, item) for item in value) + b"e"
    assert isinstance(value, dict)
    return b"}\x94(" + b"".join(plain(w, k) + plain(w, v) for k, v in value.items()) + b"u"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("output", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--depth", type=int, default=28)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with args.output.open("wb") as out:
        write(out, args.events, args.depth, args.seed)
    print(f"{args.output}: {args.output.stat().st_size / 1e6:.0f} MB, {args.events} events")


if __name__ == "__main__":
    main()
