"""Blocks, free lists and pools.

A free list holds the free blocks of one pool and stream, ordered by size, equal ones by a
`TieRule`. The key is one integer per block, ``size << 128 | tie``, so that a sorted list and
``bisect`` do the work.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Literal

from gpuprobe.errors import InternalError

TieRule = Literal["address", "block", "segment"]
"""Which of several free blocks of one size is taken. ``address``: the lowest address (torch up to
2.11, ``BlockComparatorSize``). ``block``: the block that was created first (2.12,
``BlockComparatorRegistrationCounter``). ``segment``: the lowest address in the segment that was
created first (2.13 and later: the parts of a block keep its counter). The versions are those that
`benchmarks/allocator_against_torch.py` was run with.
"""


def tie_rule_of(torch: str) -> TieRule | None:
    """The rule of a version of torch, such as ``"2.13.0+cu130"``; None for other text."""
    found = re.match(r"(\d+)\.(\d+)", torch)
    if found is None:
        return None
    version = int(found[1]), int(found[2])
    if version < (2, 12):
        return "address"
    return "block" if version == (2, 12) else "segment"


KEY_SHIFT = 128
_ORDER_SHIFT = 64


class PoolBlock:
    """A part of a segment, linked to its neighbours. Sizes and addresses in bytes.

    ``active`` is allocated or waiting for a stream.
    """

    __slots__ = (
        "active",
        "address",
        "allocated",
        "expandable",
        "free_list",
        "gc_base",
        "mapped",
        "next",
        "order",
        "prev",
        "requested",
        "size",
    )

    def __init__(self, address: int, size: int, free_list: FreeList, order: int) -> None:
        self.address = address
        self.size = size
        self.free_list = free_list
        self.order = order
        self.requested = 0
        self.allocated = False
        self.active = False
        self.mapped = True
        self.prev: PoolBlock | None = None
        self.next: PoolBlock | None = None
        self.expandable: ExpandableRange | None = None
        self.gc_base = 0

    def __repr__(self) -> str:
        state = "allocated" if self.allocated else "pending" if self.active else "free"
        return f"<Block {self.address:#x} {self.size} {state if self.mapped else 'unmapped'}>"


class FreeList:
    """The free blocks of one pool and stream: sorted keys, and the block of each key."""

    __slots__ = ("blocks", "by_address", "keys", "pool", "stream", "unmapped")

    def __init__(self, pool: BlockPool, stream: int, tie_rule: TieRule) -> None:
        self.pool = pool
        self.stream = stream
        self.by_address = tie_rule == "address"
        self.keys: list[int] = []
        self.blocks: dict[int, PoolBlock] = {}
        self.unmapped: list[PoolBlock] = []  # of expandable segments, by address

    def key(self, block: PoolBlock) -> int:
        if self.by_address:
            return block.size << KEY_SHIFT | block.address
        return block.size << KEY_SHIFT | block.order << _ORDER_SHIFT | block.address

    def add(self, block: PoolBlock) -> None:
        """Add a free block; its age counts from now."""
        block.gc_base = self.pool.searches
        key = self.key(block)
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: PoolBlock) -> None:
        """Remove a free block. Raises InternalError if it is not in the list."""
        key = self.key(block)
        at = bisect_left(self.keys, key)
        if at == len(self.keys) or self.keys[at] != key:
            raise InternalError(f"{block!r} is not in its free list")
        del self.keys[at]
        del self.blocks[key]

    def add_unmapped(self, block: PoolBlock) -> None:
        insort(self.unmapped, block, key=_address)

    def remove_unmapped(self, block: PoolBlock) -> None:
        del self.unmapped[bisect_left(self.unmapped, block.address, key=_address)]

    def __iter__(self) -> Iterator[PoolBlock]:
        """Smallest first. A copy: the list may change while it is walked."""
        blocks = self.blocks
        return iter([blocks[key] for key in self.keys])


def _address(block: PoolBlock) -> int:
    return block.address


class BlockPool:
    """The small or the large half of a pool; a free list per stream.

    ``searches`` counts the searches since the start, the clock of garbage collection
    (``get_free_blocks_call_count``).
    """

    __slots__ = ("owner", "searches", "small", "streams", "tie_rule")

    def __init__(self, small: bool, owner: PrivatePool, tie_rule: TieRule) -> None:
        self.small = small
        self.owner = owner
        self.tie_rule = tie_rule
        self.searches = 0
        self.streams: dict[int, FreeList] = {}

    def stream(self, stream: int) -> FreeList:
        """The free list of a stream, created on first use."""
        found = self.streams.get(stream)
        if found is None:
            found = self.streams[stream] = FreeList(self, stream, self.tie_rule)
        return found

    def free_blocks(self) -> list[PoolBlock]:
        """All free blocks in the order of torch's set: by stream, size and tie."""
        return [block for stream in sorted(self.streams) for block in self.streams[stream]]


class PrivatePool:
    """The two halves of a pool: the default one (index 0), a CUDA graph's, or a ``MemPool``.

    ``own_allocator``: created with a custom allocator, which never uses expandable segments.
    ``freeable``: no graph and no ``MemPool`` holds it any more, so its cache may be returned.
    """

    __slots__ = (
        "freeable",
        "index",
        "large",
        "no_split",
        "own_allocator",
        "small",
        "use_on_oom",
    )

    def __init__(self, index: int, tie_rule: TieRule) -> None:
        self.index = index
        self.small = BlockPool(True, self, tie_rule)
        self.large = BlockPool(False, self, tie_rule)
        self.own_allocator = False
        self.no_split = False
        self.use_on_oom = False
        self.freeable = False


class ExpandableRange:
    """The address range of one expandable segment; pages are at ``base + n * page``."""

    __slots__ = ("base", "page", "span")

    def __init__(self, base: int, span: int, page: int) -> None:
        self.base = base
        self.span = span
        self.page = page
