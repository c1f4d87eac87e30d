"""Ties between equal free blocks whose order of registration is not recorded.

Where torch breaks ties by the order in which blocks came to be, a trace that begins in the
middle does not tell that order for the blocks that are older. What the trace does with them
tells it, piece by piece: the one it takes came first. The pieces must not contradict each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gpuprobe.allocator.blocks import KEY_SHIFT, BlockPool, FreeList, PoolBlock


class TieEvidence:
    """What a trace shows of the order of older blocks.

    ``unknown``: blocks with an order up to this are older than the trace, 0 for none.
    ``learnt``: how many ties were decided by the trace.
    """

    def __init__(self) -> None:
        self.unknown = 0
        self.learnt = 0
        self._earlier: dict[int, set[int]] = {}

    def first_of(self, free_list: FreeList, block: PoolBlock, address: int) -> PoolBlock:
        """Of the older blocks that are as large as ``block``, the one at ``address`` (which
        the trace takes), unless that contradicts what it took before; else ``block``."""
        at = bisect_left(free_list.keys, block.size << KEY_SHIFT)
        tied = []
        for key in free_list.keys[at:]:
            other = free_list.blocks[key]
            if other.size != block.size or other.order > self.unknown:
                break
            tied.append(other)
        for wanted in tied:
            if wanted.address == address:
                rest = {other.order for other in tied} - {wanted.order}
                if rest and not any(self._known_before(o, wanted.order) for o in rest):
                    self._earlier.setdefault(wanted.order, set()).update(rest)
                    self.learnt += 1
                    return wanted
        return block

    def _known_before(self, first: int, second: int) -> bool:
        """Whether the trace has shown that ``first`` was registered before ``second``."""
        seen = {first}
        todo = [first]
        while todo:
            for later in self._earlier.get(todo.pop(), ()):
                if later == second:
                    return True
                if later not in seen:
                    seen.add(later)
                    todo.append(later)
        return False

    def order_by(self, halves: Sequence[BlockPool], addresses: Sequence[int]) -> None:
        """Put equal older blocks into the order in which ``addresses`` names them: the order
        in which the trace releases them. The order is not evidence for later ties, since the
        released blocks are gone."""
        place = {address: at for at, address in enumerate(addresses)}
        for half in halves:
            for free_list in half.streams.values():
                sizes: dict[int, list[PoolBlock]] = {}
                for block in free_list:
                    if block.order <= self.unknown and block.address in place:
                        sizes.setdefault(block.size, []).append(block)
                for blocks in sizes.values():
                    orders = sorted(block.order for block in blocks)
                    for block in blocks:
                        free_list.remove(block)
                    blocks.sort(key=lambda block: place[block.address])
                    for block, order in zip(blocks, orders, strict=True):
                        block.order = order
                        free_list.add(block)
