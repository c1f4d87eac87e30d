"""What operators do with the values of memory: which block a block was computed from, what was
copied where, how much of it is read, and what nothing depends on.

`gpuprobe.sampler.tracing.uses` notes each tensor of each operator; here the notes of one trace
become columns of its blocks. That takes one pass over the notes, and one back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from gpuprobe.model.trace import COLUMNS, GRAPH_REPLAY, USE_COLUMNS, Made, MemoryTrace

USE, OVERWRITE, MADE, CHANGE = range(4)
"""Kinds of notes: values were read; all of them were replaced; a tensor was made; values were read
and changed."""
KINDS: Final = 4
_READS: Final = (USE, CHANGE)

COMPILED_GRAPH: Final = "compiled graph"
GRAPHS: Final = (COMPILED_GRAPH, GRAPH_REPLAY)
"""Names of what runs many operators at once: nothing they compute counts as waste."""

_FILL, _COPY, _OTHER = Made.FILL, Made.COPY, Made.OTHER  # looking one up is a function in Python

_MOST_PARTS: Final = 1 << 16
"""Different parts of one block that are counted. A block of which more are read counts as read."""
_BACKWARD: Final = "backward"
_SCATTER: Final = "scatter_"
_SUMS: Final = ("add", "add_", "sub", "sub_", "stack", "cat")
_ADDS: Final = ("add_", "_foreach_add_")


Note = tuple[int, int, int, int, int]
"""A tensor of an operator: the kind of note; its block, which is its row of the events,
complemented for the baseline; its number of different bytes; and in elements, from where on, and
how many bytes one has. A plain tuple: there are 15,000 in a step of GPT-2 XL.
"""


class Operator(NamedTuple):
    """An operator of the trace, by its number; ``how``: see `Made`. ``fills``: what it overwrites
    gets one value everywhere. ``grad``: whether gradients were on."""

    number: int
    name: str
    phase: str
    how: int
    fills: bool
    grad: int
    notes: Sequence[Note]

    def blocks(self, *kinds: int) -> set[int]:
        return {block for kind, block, _, _, _ in self.notes if kind in kinds}


class _Inputs:
    """What an operator reads, by block the bytes of all parts that it reads: of those that begin at
    one place the largest, and parts that begin elsewhere as if they did not overlap. Operators over
    all parameters of a model have hundreds of results, so what these are computed from is found
    once.
    """

    def __init__(self, notes: Iterable[Note], sizes: Sequence[int]) -> None:
        """``sizes``: the bytes of each block."""
        parts: dict[tuple[int, int], int] = {}
        for _, block, size, offset, _ in notes:
            part = block, offset
            if size > parts.get(part, -1):
                parts[part] = size
        read: dict[int, int] = {}
        for (block, _), count in parts.items():
            read[block] = read.get(block, 0) + count
        if len(parts) > len(read):
            read = {block: min(count, sizes[block]) for block, count in read.items()}
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


Origin = tuple[int, str, int, int, int, int]
"""How a block was made, for later traces: the columns ``made``, ``made_name``, ``how``, ``width``
and ``inputs``, and the address of the block ``source``. Python's collector skips plain tuples."""


class BlockColumns:
    """The columns of a trace's events and baseline, joined: at the index of a block (see `Note`) is
    its value, as the baseline comes last and backwards.
    """

    made: array[int]
    first_use: array[int]
    last_use: array[int]
    grad: array[int]
    made_name: array[int]
    made_phase: array[int]
    how: array[int]
    width: array[int]
    inputs: array[int]
    source: array[int]
    copied_to: array[int]
    read: array[int]
    useful: array[int]
    wasted: array[int]
    filled: array[int]
    filled_until: array[int]
    graph: array[int]

    def __init__(self, trace: MemoryTrace) -> None:
        self.size = trace.events.size + trace.baseline.size[::-1]
        self.address = trace.events.address + trace.baseline.address[::-1]
        for name in USE_COLUMNS:
            setattr(self, name, array(COLUMNS[name], bytes(len(self.size) * _bytes_of(name))))

    def store(self, trace: MemoryTrace) -> None:
        """Set the columns of uses of the trace, but for the operators of its events."""
        events = len(trace.events)
        for name in USE_COLUMNS - {"operator"}:
            column = getattr(self, name)
            setattr(trace.events, name, column[:events])
            setattr(trace.baseline, name, column[events:][::-1])
        trace.baseline.operator = array(COLUMNS["operator"], bytes(4 * len(trace.baseline)))


def _bytes_of(column: str) -> int:
    return array(COLUMNS[column]).itemsize


class Flow:
    """The columns of a trace, from its operators in the order in which they ended."""

    def __init__(
        self, trace: MemoryTrace, columns: BlockColumns, origins: Mapping[int, Origin]
    ) -> None:
        """``origins``: of blocks that are older than the trace, by address."""
        self._trace = trace
        self._columns = columns
        self._joined: dict[int, int] = {}
        self._leaves: dict[int, int] = {}
        self._events = len(trace.events)
        self._operators: list[Operator] = []
        self._parts: dict[int, set[tuple[int, int]]] = {}
        self._read: dict[int, int] = {}
        self._restore(origins)

    def _restore(self, origins: Mapping[int, Origin]) -> None:
        """Fill the columns of blocks that are older than the trace."""
        columns = self._columns
        rows = {address: row for row, address in enumerate(self._trace.baseline.address)}
        for address, row in rows.items():
            origin, block = origins.get(address), ~row
            if origin is None or origin[0] != columns.made[block]:
                continue
            _, name, columns.how[block], columns.width[block], inputs, source = origin
            columns.made_name[block] = self._trace.stacks.string(name)
            columns.inputs[block] = inputs
            if source in rows:
                columns.source[block] = self._name_of(~rows[source])

    def origins(self, alive: set[int]) -> dict[int, Origin]:
        """How the blocks that are alive at the end were made, by address."""
        of = self._columns
        strings = self._trace.stacks.strings
        return {
            of.address[block]: (
                of.made[block],
                strings[of.made_name[block]],
                of.how[block],
                of.width[block],
                of.inputs[block],
                self._address_of(of.source[block]),
            )
            for block in alive
        }

    def add(self, operator: Operator) -> None:
        """Note what the next operator does."""
        self._operators.append(operator)
        columns, bytes_read = self._columns, self._read
        made, first_use, last_use = columns.made, columns.first_use, columns.last_use
        sizes, filled, until = columns.size, columns.filled, columns.filled_until
        number = operator.number
        read = []
        writes = False
        for note in operator.notes:
            kind, block, size, offset, _ = note
            if kind == MADE or not made[block]:
                made[block], columns.grad[block] = number, operator.grad
            if kind == MADE:
                writes = True
                continue
            if last_use[block] < number:
                last_use[block] = number
            if kind == OVERWRITE:
                writes = True
                continue
            read.append(note)
            first_use[block] = first_use[block] or number
            if bytes_read.get(block, 0) < sizes[block]:
                if size >= sizes[block]:
                    bytes_read[block] = sizes[block]
                else:
                    self._note_part(block, size, offset)
            if filled[block] and not until[block]:
                until[block] = number
        if writes or operator.name == _SCATTER:
            self._write(operator, _Inputs(read, sizes))
        if not operator.phase.startswith(_BACKWARD):
            self._join(operator)

    def _write(self, operator: Operator, used: _Inputs) -> None:
        for kind, block, size, _, width in operator.notes:
            if kind == MADE:
                self._made(operator, block, width, used)
            elif kind == OVERWRITE:
                self._overwritten(operator, block, size, width, used)
            elif kind == CHANGE and operator.name == _SCATTER:
                self._scattered(operator, block, used)

    def _join(self, operator: Operator) -> None:
        """Note that the blocks of an operator are computed from one another. What is computed from
        no other block connects nothing, such as weights and inputs; nor does a sum of single
        numbers, each of which could have its own backward pass.
        """
        sums, inputs = operator.name in _SUMS, self._columns.inputs
        blocks = [
            block
            for kind, block, size, _, width in operator.notes
            if block >= 0
            and (kind == MADE or inputs[block])
            and not (sums and kind == USE and size <= max(width, 1))
        ]
        if not blocks:
            return
        for kind, block, _, _, _ in operator.notes:
            if kind == USE and block >= 0:
                self._leaves.setdefault(block, blocks[0])
        first = self._find(blocks[0])
        for block in blocks[1:]:
            second = self._find(block)
            if first != second:
                first, second = min(first, second), max(first, second)
                self._joined[second] = first

    def _find(self, block: int) -> int:
        while block in self._joined:
            above = self._joined[block]
            if above in self._joined:
                self._joined[block] = self._joined[above]
            block = above
        return block

    def _scattered(self, operator: Operator, block: int, used: _Inputs) -> None:
        """Values that are put into a constant make it what it is."""
        columns = self._columns
        if columns.how[block] == _FILL and not columns.source[block]:
            columns.made_name[block] = self._trace.stacks.string(operator.name)
            self._from(operator, block, used)

    def _name_of(self, block: int) -> int:
        """A block as a value of a column."""
        return block + 1 if block >= 0 else self._events - block

    def _address_of(self, name: int) -> int:
        """The address of a block that a column names; 0 for none."""
        # Behind the events, names count the baseline from its first row on.
        block = name - 1 if name <= self._events else self._events - name
        return self._columns.address[block] if name else 0

    def _made(self, operator: Operator, block: int, width: int, used: _Inputs) -> None:
        if block in used:
            return  # the operator returns memory of its arguments
        columns, string = self._columns, self._trace.stacks.string
        columns.made_name[block] = string(operator.name)
        columns.made_phase[block] = string(operator.phase)
        columns.how[block] = operator.how
        columns.width[block] = width
        self._from(operator, block, used)

    def _overwritten(
        self, operator: Operator, block: int, size: int, width: int, used: _Inputs
    ) -> None:
        columns = self._columns
        whole = size >= columns.size[block]
        if operator.fills and whole:
            columns.filled[block], columns.filled_until[block] = operator.number, 0
            if columns.how[block] == _COPY and not self._read.get(block):
                # A copy that was only made for its shape.
                columns.how[block], columns.inputs[block], columns.source[block] = _FILL, 0, 0
        if not used.any or not whole:
            return
        if columns.how[block] in (_FILL, _OTHER) and not columns.source[block]:
            # Memory that was only allocated before: what fills it makes it.
            columns.how[block] = _COPY
            columns.width[block] = columns.width[block] or width
            self._from(operator, block, used)

    def _from(self, operator: Operator, block: int, used: _Inputs) -> None:
        """Note what a tensor was computed from."""
        others = used.without(block)
        if others is None:
            return
        self._columns.inputs[block] = others[0]
        self._columns.source[block] = self._name_of(others[1])
        if operator.how == _COPY:
            name = self._name_of(block)
            for other in used.blocks(block):
                self._columns.copied_to[other] = name

    def _note_part(self, block: int, size: int, offset: int) -> None:
        """Note that a part of a block is read."""
        parts, whole = self._parts.setdefault(block, set()), self._columns.size[block]
        part = offset, size
        if part not in parts:
            parts.add(part)
            total = self._read.get(block, 0) + size
            self._read[block] = min(whole, total) if len(parts) < _MOST_PARTS else whole

    def finish(self, alive: set[int]) -> None:
        """Fill the columns that depend on what comes later. ``alive``: the blocks that are not
        freed in the trace.
        """
        columns = self._columns
        for block, read in self._read.items():
            columns.read[block] = read
        for block, first in self._leaves.items():
            columns.graph[block] = self._find(first) + 1
        for block in {*self._joined, *self._joined.values()}:
            columns.graph[block] = self._find(block) + 1
        gradients = self._gradients()
        needed = self._needed(alive, gradients)
        for block in () if needed is None else gradients - needed:
            columns.wasted[block] = 1

    def _gradients(self) -> set[int]:
        """What backward passes compute, or add to."""
        return {
            block
            for operator in self._operators
            if operator.phase.startswith(_BACKWARD)
            for block in operator.blocks(*((MADE, CHANGE) if operator.name in _ADDS else (MADE,)))
        }

    def _needed(self, alive: set[int], gradients: set[int]) -> set[int] | None:
        """The blocks that something depends on, with `useful` set; None if no gradient is read in
        this trace: then nothing is known of any.

        Of what a backward pass computes, that is what other operators read. What a backward pass
        itself changes, as it adds gradients, does not count as read.
        """
        read_outside = {
            block
            for operator in self._operators
            if not operator.phase.startswith(_BACKWARD)
            for kind, block, _, _, _ in operator.notes
            if block in gradients and kind in _READS
        }
        if not read_outside:
            return None
        needed, last = set(read_outside), self._columns.useful
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
            number = operator.number
            for kind, block, _, _, _ in operator.notes:
                needed.add(block)
                if last[block] < number and kind in _READS:
                    last[block] = number
        return needed
