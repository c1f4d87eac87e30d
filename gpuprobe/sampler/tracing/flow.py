"""What operators do with the values of memory: which block a block was computed from, what was
copied where, how much of it is read, and what nothing depends on.

`gpuprobe.sampler.tracing.uses` notes each tensor of each operator; here the notes of one trace
become columns of its blocks. That takes one pass over the notes, and one back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from gpuprobe.model.trace import GRAPH_REPLAY, EventColumns, Made, MemoryTrace

USE, OVERWRITE, MADE, CHANGE = range(4)
"""Kinds of notes: values were read; all of them were replaced; a tensor was made; values were read
and changed."""
KINDS: Final = 4

COMPILED_GRAPH: Final = "compiled graph"
GRAPHS: Final = (COMPILED_GRAPH, GRAPH_REPLAY)
"""Names of what runs many operators at once: nothing they compute counts as waste."""

_MOST_PARTS: Final = 1 << 16
"""Different parts of one block that are counted. A block of which more are read counts as read."""
_BACKWARD: Final = "backward"
_SCATTER: Final = "scatter_"
_SUMS: Final = ("add", "add_", "sub", "sub_", "stack", "cat")
_ADDS: Final = ("add_", "_foreach_add_")


class Note(NamedTuple):
    """A tensor of an operator: of ``bytes`` different bytes from ``offset`` (in elements) on, with
    elements of ``width`` bytes. ``block``: its row of the events, complemented for the baseline.
    """

    kind: int
    block: int
    bytes: int
    offset: int
    width: int


class Operator(NamedTuple):
    """An operator of the trace, by its number; ``how``: see `Made`. ``fills``: what it overwrites
    gets one value everywhere."""

    number: int
    name: str
    phase: str
    how: int
    fills: bool
    notes: Sequence[Note]

    def blocks(self, *kinds: int) -> set[int]:
        return {note.block for note in self.notes if note.kind in kinds}


def _is_number(note: Note) -> bool:
    return note.bytes <= max(note.width, 1)


class _Inputs:
    """What an operator reads, by block the bytes of all parts that it reads: of those that begin at
    one place the largest, and parts that begin elsewhere as if they did not overlap. Operators over
    all parameters of a model have hundreds of results, so what these are computed from is found
    once.
    """

    def __init__(self, notes: Iterable[Note], size: Callable[[int], int]) -> None:
        """``size``: the bytes of a block."""
        parts: dict[tuple[int, int], int] = {}
        for note in notes:
            part = note.block, note.offset
            parts[part] = max(note.bytes, parts.get(part, 0))
        read: dict[int, int] = {}
        for (block, _), count in parts.items():
            read[block] = read.get(block, 0) + count
        if len(parts) > len(read):
            read = {block: min(count, size(block)) for block, count in read.items()}
        self._bytes = read
        self._total = sum(self._bytes.values())
        self._sources: list[int] = []

    def __contains__(self, block: int) -> bool:
        return block in self._bytes

    @property
    def any(self) -> bool:
        return bool(self._bytes)

    def without(self, block: int) -> tuple[int, int] | None:
        """Of all other blocks, the bytes and the first one with the most; None without others."""
        own = self._bytes.get(block)
        if own is None:
            return (self._total, self._source(0)) if self._bytes else None
        if len(self._bytes) == 1:
            return None
        return self._total - own, self._source(self._source(0) == block)

    def blocks(self, block: int) -> Iterator[int]:
        """All other blocks."""
        return (one for one in self._bytes if one != block)

    def _source(self, at: int) -> int:
        """The first block with the most bytes, and for 1 that of the others."""
        read, sources = self._bytes, self._sources
        while len(sources) <= at:
            left = (one for one in read if one not in sources)
            sources.append(max(left, key=read.__getitem__))
        return sources[at]


class Origin(NamedTuple):
    """How a block was made, for later traces: the columns of the same names. ``made``: the number
    of the operator; ``source``: the address of the block there."""

    made: int
    made_name: str
    how: int
    width: int
    inputs: int
    source: int


class Flow:
    """The columns of a trace, from its operators in the order in which they ended."""

    def __init__(self, trace: MemoryTrace, origins: Mapping[int, Origin]) -> None:
        """``origins``: of blocks that are older than the trace, by address."""
        self._trace = trace
        self._joined: dict[int, int] = {}
        self._leaves: dict[int, int] = {}
        self._events = len(trace.events)
        self._operators: list[Operator] = []
        self._parts: dict[int, set[tuple[int, int]]] = {}
        self._read: dict[int, int] = {}
        self._restore(origins)

    def _restore(self, origins: Mapping[int, Origin]) -> None:
        """Fill the columns of blocks that are older than the trace."""
        old = self._trace.baseline
        rows = {address: row for row, address in enumerate(old.address)}
        for row, address in enumerate(old.address):
            origin = origins.get(address)
            if origin is None or origin.made != old.made[row]:
                continue
            old.made_name[row] = self._trace.stacks.string(origin.made_name)
            old.how[row], old.width[row] = origin.how, origin.width
            old.inputs[row] = origin.inputs
            if origin.source in rows:
                old.source[row] = self._name_of(~rows[origin.source])

    def origins(self, alive: set[int]) -> dict[int, Origin]:
        """How the blocks that are alive at the end were made, by address."""
        found = {}
        strings = self._trace.stacks.strings
        for block in alive:
            at, of = self._row(block)
            source = of.source[at]
            address = 0
            if source:
                row, columns = self._row(
                    source - 1 if source <= self._events else ~(source - 1 - self._events)
                )
                address = columns.address[row]
            found[of.address[at]] = Origin(
                of.made[at],
                strings[of.made_name[at]],
                of.how[at],
                of.width[at],
                of.inputs[at],
                address,
            )
        return found

    def add(self, operator: Operator) -> None:
        """Note what the next operator does."""
        self._operators.append(operator)
        read = [note for note in operator.notes if note.kind in (USE, CHANGE)]
        for note in read:
            at, columns = self._row(note.block)
            if self._read.get(note.block, 0) < columns.size[at]:
                self._note_read(note, columns.size[at])
            if columns.filled[at] and not columns.filled_until[at]:
                columns.filled_until[at] = operator.number
        used = _Inputs(read, self._size)
        for note in operator.notes:
            if note.kind == MADE:
                self._made(operator, note, used)
            elif note.kind == OVERWRITE:
                self._overwritten(operator, note, used)
            elif note.kind == CHANGE and operator.name == _SCATTER:
                self._scattered(operator, note, used)
        if not operator.phase.startswith(_BACKWARD):
            self._join(operator)

    def _join(self, operator: Operator) -> None:
        """Note that the blocks of an operator are computed from one another. What is computed from
        no other block connects nothing, such as weights and inputs; nor does a sum of single
        numbers, each of which could have its own backward pass.
        """
        sums = operator.name in _SUMS
        blocks = [
            note.block
            for note in operator.notes
            if note.block >= 0
            and (note.kind == MADE or self._trace.events.inputs[note.block])
            and not (sums and note.kind == USE and _is_number(note))
        ]
        for note in operator.notes:
            if note.kind == USE and note.block >= 0 and blocks:
                self._leaves.setdefault(note.block, blocks[0])
        for block in blocks[1:]:
            first, second = self._find(blocks[0]), self._find(block)
            if first != second:
                self._joined[max(first, second)] = min(first, second)

    def _find(self, block: int) -> int:
        while block in self._joined:
            above = self._joined[block]
            if above in self._joined:
                self._joined[block] = self._joined[above]
            block = above
        return block

    def _scattered(self, operator: Operator, note: Note, used: _Inputs) -> None:
        """Values that are put into a constant make it what it is."""
        at, columns = self._row(note.block)
        if columns.how[at] == Made.FILL and not columns.source[at]:
            columns.made_name[at] = self._trace.stacks.string(operator.name)
            self._from(operator, note, used)

    def _row(self, block: int) -> tuple[int, EventColumns]:
        return (block, self._trace.events) if block >= 0 else (~block, self._trace.baseline)

    def _size(self, block: int) -> int:
        at, columns = self._row(block)
        return columns.size[at]

    def _name_of(self, block: int) -> int:
        """A block as a value of a column."""
        return block + 1 if block >= 0 else self._events - block

    def _made(self, operator: Operator, note: Note, used: _Inputs) -> None:
        if note.block in used:
            return  # the operator returns memory of its arguments
        at, columns = self._row(note.block)
        columns.made_name[at] = self._trace.stacks.string(operator.name)
        columns.made_phase[at] = self._trace.stacks.string(operator.phase)
        columns.how[at] = operator.how
        columns.width[at] = note.width
        self._from(operator, note, used)

    def _overwritten(self, operator: Operator, note: Note, used: _Inputs) -> None:
        at, columns = self._row(note.block)
        if operator.fills and note.bytes >= columns.size[at]:
            columns.filled[at], columns.filled_until[at] = operator.number, 0
            if columns.how[at] == Made.COPY and not self._read.get(note.block):
                # A copy that was only made for its shape.
                columns.how[at], columns.inputs[at], columns.source[at] = Made.FILL, 0, 0
        if not used.any or note.bytes < columns.size[at]:
            return
        if columns.how[at] in (Made.FILL, Made.OTHER) and not columns.source[at]:
            # Memory that was only allocated before: what fills it makes it.
            columns.how[at] = Made.COPY
            columns.width[at] = columns.width[at] or note.width
            self._from(operator, note, used)

    def _from(self, operator: Operator, note: Note, used: _Inputs) -> None:
        """Note what a tensor was computed from."""
        others = used.without(note.block)
        if others is None:
            return
        at, columns = self._row(note.block)
        columns.inputs[at] = others[0]
        columns.source[at] = self._name_of(others[1])
        if operator.how == Made.COPY:
            name = self._name_of(note.block)
            for block in used.blocks(note.block):
                row, of = self._row(block)
                of.copied_to[row] = name

    def _note_read(self, note: Note, size: int) -> None:
        if note.bytes >= size:
            self._read[note.block] = size
            self._parts.pop(note.block, None)
            return
        parts = self._parts.setdefault(note.block, set())
        part = note.offset, note.bytes
        if part not in parts:
            parts.add(part)
            total = self._read.get(note.block, 0) + note.bytes
            self._read[note.block] = min(size, total) if len(parts) < _MOST_PARTS else size

    def finish(self, alive: set[int]) -> None:
        """Fill the columns that depend on what comes later. ``alive``: the blocks that are not
        freed in the trace.
        """
        for block, read in self._read.items():
            at, columns = self._row(block)
            columns.read[at] = read
        events = self._trace.events
        for block, first in self._leaves.items():
            events.graph[block] = self._find(first) + 1
        for block in {*self._joined, *self._joined.values()}:
            events.graph[block] = self._find(block) + 1
        needed = self._needed(alive)
        if needed is None:
            return
        for block in self._gradients():
            if block not in needed:
                at, columns = self._row(block)
                columns.wasted[at] = 1

    def _gradients(self) -> set[int]:
        """What backward passes compute, or add to."""
        return {
            block
            for operator in self._operators
            if operator.phase.startswith(_BACKWARD)
            for block in operator.blocks(*((MADE, CHANGE) if operator.name in _ADDS else (MADE,)))
        }

    def _needed(self, alive: set[int]) -> set[int] | None:
        """The blocks that something depends on, with `useful` set; None if no gradient is read in
        this trace: then nothing is known of any.

        Of what a backward pass computes, that is what other operators read. What a backward pass
        itself changes, as it adds gradients, does not count as read.
        """
        gradients = self._gradients()
        read_outside = {
            block
            for operator in self._operators
            if not operator.phase.startswith(_BACKWARD)
            for block in operator.blocks(USE, CHANGE) & gradients
        }
        if not read_outside:
            return None
        needed = set(read_outside)
        for operator in reversed(self._operators):
            useful = True
            if operator.phase.startswith(_BACKWARD) and operator.name not in GRAPHS:
                results = operator.blocks(MADE, CHANGE, OVERWRITE)
                useful = not results or any(
                    block in needed or (block not in gradients and block in alive)
                    for block in results
                )
            if not useful:
                continue
            for note in operator.notes:
                needed.add(note.block)
                if note.kind in (USE, CHANGE):
                    at, columns = self._row(note.block)
                    columns.useful[at] = max(columns.useful[at], operator.number)
        return needed
