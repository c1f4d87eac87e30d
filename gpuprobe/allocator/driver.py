"""A simulated CUDA driver: it allocates segments and chooses their addresses.

Among equal blocks, torch's allocator takes the one of the lowest address or of the oldest segment,
so the driver's choice of addresses can change which block serves a request. `DriverChunks` follows
the drivers on Linux; no document promises that order, and the process's earlier mappings are
unknown. A what-if is therefore run under several orders, and a result that depends on them is
reported as a range.
"""

from __future__ import annotations

import random
from typing import Protocol

from gpuprobe.allocator.rules import ROUND_LARGE, round_up

DRIVER_ORDERS = ("driver", "driver-ascending")
"""The orders of drivers that were observed: chunks descend on ordinary Linux, and ascend on a B200
in a cloud sandbox, where with ascending addresses 15 of 16 training runs have the measured peaks to
the byte.
"""

ADDRESS_ORDERS = (*DRIVER_ORDERS, "descending", "shuffled:1")
"""The orders a what-if is run under: those of drivers, an extreme, a shuffle with a fixed seed."""

_CHUNK = 32 << 20
_BASE = 0x7000_0000_0000
_SLOT = 1 << 42  # 4 TiB: more than any segment; slots are shuffled, not what is inside them
_MOST = 1 << 46  # 64 TiB: more than any device; no real program requests more
_SLOTS = 1 << 20  # at most half of them are used, so that a free one is found soon


class Driver(Protocol):
    """The device operations of the allocator. ``None`` and False mean "out of memory"."""

    def allocate(self, size: int, stream: int, pool: int) -> int | None:
        """``cudaMalloc``: the address of a new segment of ``size`` bytes."""

    def release(self, address: int, size: int) -> None:
        """``cudaFree`` of a whole segment."""

    def reserve(self, span: int, stream: int, pool: int) -> int | None:
        """``cuMemAddressReserve``: an address range without memory behind it. None if it would stay
        unused because the mapping that follows fails."""

    def map(self, address: int, size: int) -> bool:
        """``cuMemMap``: put memory behind part of a reserved range."""

    def unmap(self, address: int, size: int) -> None:
        """``cuMemUnmap``: remove the memory behind part of a range."""


class DriverChunks:
    """Addresses as drivers on Linux choose them for ``cudaMalloc``: observed on an H200 with driver
    580 (400 allocations and frees of random sizes) and in public snapshots of other GPUs.

    Address space is reserved in chunks of whole 32 MiB, each at the highest free addresses. A
    request goes into the newest chunk with a hole that fits, and there into the smallest such hole;
    an empty chunk is released. A context leaves 24 MiB of one chunk, and 2 MiB of a newer one.

    ``ascending``: each chunk is at the lowest free addresses instead (`DRIVER_ORDERS`).
    """

    def __init__(self, end: int, *, ascending: bool = False) -> None:
        self._end = end
        self._ascending = ascending
        self._low = end  # lowest address of any chunk; the order is mirrored when it ascends
        self._gaps: list[tuple[int, int]] = []  # between chunks: address and size, highest first
        self._chunks: dict[int, list[tuple[int, int]]] = {}  # base -> holes; the newest chunk last
        self._sizes: dict[int, int] = {}  # base -> size of the chunk
        self._bases: dict[int, int] = {}  # address of a segment -> base of its chunk
        for used in (_CHUNK // 4, _CHUNK - ROUND_LARGE):  # by the context
            base = self._new_chunk(_CHUNK)
            self._chunks[base] = [(base + used, _CHUNK - used)]

    def allocate(self, span: int) -> int:
        """Allocate ``span`` bytes, a multiple of 2 MiB, and return their address."""
        for base in reversed(self._chunks):
            fitting = [hole for hole in self._chunks[base] if hole[1] >= span]
            if fitting:
                hole = min(fitting, key=lambda hole: (hole[1], hole[0]))
                break
        else:
            base = self._new_chunk(round_up(span, _CHUNK))
            hole = base, self._sizes[base]
            self._chunks[base] = [hole]
        holes = self._chunks[base]
        holes.remove(hole)
        if hole[1] > span:
            holes.append((hole[0] + span, hole[1] - span))
        self._bases[hole[0]] = base
        return hole[0]

    def release(self, address: int, span: int) -> None:
        """Free the ``span`` bytes at an address that `allocate` returned."""
        base = self._bases.pop(address)
        merged: list[tuple[int, int]] = []
        for at, size in sorted([*self._chunks[base], (address, span)]):
            if merged and merged[-1][0] + merged[-1][1] == at:
                at, size = merged[-1][0], merged.pop()[1] + size
            merged.append((at, size))
        self._chunks[base] = merged
        if merged == [(base, self._sizes[base])]:
            del self._chunks[base]
            self._remove_chunk(base, self._sizes.pop(base))

    def _new_chunk(self, size: int) -> int:
        for index, (at, most) in enumerate(self._gaps):
            if most >= size:
                self._gaps[index : index + 1] = [(at, most - size)] if most > size else []
                base = at + most - size
                break
        else:
            self._low -= size
            base = self._low
        base = self._mirrored(base, size)
        self._sizes[base] = size
        return base

    def _mirrored(self, base: int, size: int) -> int:
        """The base of a chunk in the other direction, if the order ascends."""
        return self._end - (base - _BASE) - size if self._ascending else base

    def _remove_chunk(self, base: int, size: int) -> None:
        base = self._mirrored(base, size)
        gaps: list[tuple[int, int]] = []
        for at, most in sorted([*self._gaps, (base, size)], reverse=True):
            if gaps and at + most == gaps[-1][0]:
                at, most = at, most + gaps.pop()[1]
            gaps.append((at, most))
        if gaps and gaps[-1][0] == self._low:
            self._low += gaps.pop()[1]
        self._gaps = gaps


class SimulatedDriver:
    """A driver with ``capacity`` bytes (None: 64 TiB) and addresses in a chosen order, for segments
    of at most 4 TiB.

    Only the orders of drivers (`DRIVER_ORDERS`) reuse addresses. Those of the order ``driver`` are
    below ``end``.
    """

    def __init__(
        self, capacity: int | None = None, order: str = "driver", *, end: int = 2 * _BASE
    ) -> None:
        self.capacity = capacity
        self.used = 0
        self._next = 0
        name, _, seed = order.partition(":")
        if name not in (*DRIVER_ORDERS, "ascending", "descending", "shuffled"):
            raise ValueError(f"unknown address order {order!r}")
        self._order = name
        self._random = random.Random(int(seed or 0))
        self._taken: set[int] = set()
        self._chunks: DriverChunks | None = None
        if order in DRIVER_ORDERS:
            self._chunks = DriverChunks(end, ascending=name != "driver")

    def allocate(self, size: int, stream: int, pool: int) -> int | None:
        if not self._fits(size):
            return None
        span = round_up(size, ROUND_LARGE)
        if self._chunks is not None and span <= _SLOT:
            address: int | None = self._chunks.allocate(span)
        else:
            address = self._place(size)
        if address is not None:
            self.used += size
        return address

    def release(self, address: int, size: int) -> None:
        self.used -= size
        if self._chunks is not None:
            self._chunks.release(address, round_up(size, ROUND_LARGE))

    def reserve(self, span: int, stream: int, pool: int) -> int | None:
        return self._place(span)

    def map(self, address: int, size: int) -> bool:
        if not self._fits(size):
            return False
        self.used += size
        return True

    def unmap(self, address: int, size: int) -> None:
        self.used -= size

    def _fits(self, size: int) -> bool:
        return self.used + size <= (_MOST if self.capacity is None else self.capacity)

    def _place(self, size: int) -> int | None:
        span = round_up(size, ROUND_LARGE)
        if span > _SLOT:
            return None
        if self._order in (*DRIVER_ORDERS, "ascending"):
            self._next += span
            return _BASE + self._next - span
        if self._order == "descending":
            self._next += span
            return 2 * _BASE - self._next
        while len(self._taken) < _SLOTS // 2:
            slot = self._random.randrange(_SLOTS)
            if slot not in self._taken:
                self._taken.add(slot)
                return slot * _SLOT + _SLOT
        return None
