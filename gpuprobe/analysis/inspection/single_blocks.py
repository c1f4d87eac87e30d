"""The largest blocks of a trace one by one, for a timeline in which each can be chosen.

A block is allocated at position ``start`` of its track and no longer at position ``end``. Stacks
are kept as a tree from the outermost frame inwards, which most of them share.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuprobe.analysis.trace.frames import is_plumbing, short_name
from gpuprobe.analysis.trace.ledger import Ledger
from gpuprobe.model.trace import Frame

MOST_BLOCKS = 20_000
"""Blocks of a track that are kept; torch's viewer draws 15,000."""

MOST_NODES = 30_000
"""Frames of all stacks together; beyond them a stack ends early, with its outermost frames."""


@dataclass(slots=True)
class SingleBlocks:
    """Columns of equal length, by ``start``; ``size`` in bytes, ``category`` is a
    `Category.code`. ``total`` counts all blocks of the track.

    ``stack`` is a node of the tree: ``parents`` and ``frames`` (an index of ``names``) per node,
    node 0 is the empty stack. ``plumbing`` tells which names are of native code or PyTorch itself.
    ``module`` and ``phase`` are indices of ``strings``.
    """

    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    size: array[int] = field(default_factory=lambda: array("q"))
    category: array[int] = field(default_factory=lambda: array("q"))
    stack: array[int] = field(default_factory=lambda: array("q"))
    module: array[int] = field(default_factory=lambda: array("q"))
    phase: array[int] = field(default_factory=lambda: array("q"))
    total: int = 0
    parents: list[int] = field(default_factory=lambda: [-1])
    frames: list[int] = field(default_factory=lambda: [0])
    names: list[str] = field(default_factory=lambda: [""])
    plumbing: list[bool] = field(default_factory=lambda: [False])
    strings: list[str] = field(default_factory=lambda: [""])
    _nodes: dict[tuple[int, int], int] = field(default_factory=dict)
    _names: dict[Frame, int] = field(default_factory=dict)
    _strings: dict[str, int] = field(default_factory=lambda: {"": 0})

    def __len__(self) -> int:
        return len(self.start)

    def add(self, ledger: Ledger, codes: Sequence[int], first: int) -> None:
        """Put the blocks of a trace at the end. ``codes``: the category of each of its rows;
        ``first``: the position of the track before its first event.
        """
        alive = [
            row
            for row in range(len(ledger))
            # A row of the baseline that was pending is active, not allocated.
            if ledger.freed[row] > ledger.start[row]
        ]
        self.total += len(alive)
        size = ledger.size
        if len(alive) > MOST_BLOCKS:
            alive = heapq.nlargest(MOST_BLOCKS, alive, key=size.__getitem__)
        alive.sort(key=ledger.start.__getitem__)
        known: dict[int, int] = {}
        texts = ledger.trace.stacks.strings
        modules, phases = ledger.values("module", alive), ledger.values("phase", alive)
        for row, module, phase in zip(alive, modules, phases, strict=True):
            stack = ledger.stack[row]
            if stack not in known:
                known[stack] = self._node(ledger.trace.stacks.frames_of(stack))
            self.start.append(first + ledger.start[row] + 1)
            self.end.append(first + ledger.freed[row] + 1)
            self.size.append(size[row])
            self.category.append(codes[row])
            self.stack.append(known[stack])
            self.module.append(self._string(texts[module]))
            self.phase.append(self._string(texts[phase]))

    def largest(self, most: int) -> None:
        """Keep the ``most`` largest blocks."""
        if len(self) <= most:
            return
        keep = sorted(heapq.nlargest(most, range(len(self)), key=self.size.__getitem__))
        for name in ("start", "end", "size", "category", "stack", "module", "phase"):
            column = getattr(self, name)
            setattr(self, name, array("q", map(column.__getitem__, keep)))

    def frames_of(self, node: int) -> list[str]:
        """The frames of a stack, innermost first."""
        found = []
        while node > 0:
            found.append(self.names[self.frames[node]])
            node = self.parents[node]
        return found

    def _node(self, frames: Sequence[Frame]) -> int:
        node = 0
        for frame in reversed(frames):
            name = self._names.get(frame)
            if name is None:
                name = self._names[frame] = len(self.names)
                self.names.append(short_name(frame))
                self.plumbing.append(is_plumbing(frame))
            found = self._nodes.get((node, name))
            if found is None:
                if len(self.parents) >= MOST_NODES:
                    return node
                found = self._nodes[node, name] = len(self.parents)
                self.parents.append(node)
                self.frames.append(name)
            node = found
        return node

    def _string(self, text: str) -> int:
        found = self._strings.get(text)
        if found is None:
            found = self._strings[text] = len(self.strings)
            self.strings.append(text)
        return found
