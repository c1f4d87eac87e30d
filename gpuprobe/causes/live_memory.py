"""All blocks just after one event, with what operators do with their values."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from gpuprobe.analysis.peak.needs import Biographies
from gpuprobe.analysis.trace.categories import categories
from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import ProgramStacks
from gpuprobe.model.causes import Bound
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.run.holders import Holder
from gpuprobe.model.trace import Frame, Made
from gpuprobe.model.values import LineNumber
from gpuprobe.user_frames import Lines, is_user_frame

STATE = frozenset(
    {
        Category.PARAMETER,
        Category.GRADIENT,
        Category.OPTIMIZER_STATE,
        Category.BUFFER,
        Category.WORKSPACE,
    }
)
"""Categories of memory that stays from step to step."""


PRODUCTS = frozenset(("mm", "bmm", "addmm"))
_SMALL = 16
"""A matrix that many times smaller than what it is multiplied with is no second set of rows."""


Variable: TypeAlias = Callable[[Sequence[Frame]], str]
"""Returns the name that the code of a stack, innermost frame first, assigns its result to."""


@dataclass(frozen=True)
class Excess:
    """Memory that is larger than it must be. ``main``: the row whose line is named; ``rows``: those
    at the event, ``main`` among them or made of them.

    The effect: ``sizes`` (in bytes) and ``ends`` (events before which it is freed) that rows of the
    trace would have; ``assumed``: in words, what the program is assumed to do instead.
    """

    answer: Answer
    main: int
    rows: Sequence[int]
    assumed: str
    sizes: Mapping[int, int] = field(default_factory=dict)
    ends: Mapping[int, int] = field(default_factory=dict)
    kept_at: Place | None = None
    named: Sequence[int] = ()
    """Other rows whose holders the answer names."""
    bound: Bound = Bound.EXACT
    """Whether the changed program may need more or less than with these sizes and ends."""


class LiveMemory:
    """The blocks just after ``event``. ``holders``: what holds some of them, by row. ``variable``:
    the name of the variable that code on a stack assigns, "" if unknown.
    """

    def __init__(
        self,
        lives: Biographies,
        event: int,
        holders: Mapping[int, Holder] | None = None,
        variable: Variable = lambda frames: "",
    ) -> None:
        self.lives = lives
        self.event = event
        self.holders = holders or {}
        self.variable = variable
        self.ledger = lives.ledger
        self.size = lives.ledger.size
        self.now = lives.operator_at(event)
        self.needs = lives.needs(event)
        self.tensors = lives.tensors(event)
        self._lines = Lines(self.ledger.trace.stacks)
        self._columns: dict[str, list[int]] = {}
        self._categories: dict[int, int] = {}

    @property
    def rows(self) -> Iterable[int]:
        """The rows that are alive."""
        return self.needs

    def column(self, name: str) -> list[int]:
        """A column of the trace, by row."""
        if name not in self._columns:
            self._columns[name] = self.ledger.values(name, range(len(self.ledger)))
        return self._columns[name]

    def text(self, name: str, row: int) -> str:
        """A row's value of a column of names."""
        return self.ledger.trace.stacks.strings[self.column(name)[row]]

    def in_backward(self, row: int) -> bool:
        """Whether a backward pass made a row."""
        return self.text("made_phase", row).startswith("backward")

    def how(self, row: int) -> Made:
        return Made(self.column("how")[row])

    def source(self, row: int) -> int | None:
        """The row that another was mostly computed from."""
        return self.lives.row_of(self.column("source")[row])

    def sources(self, row: int) -> Iterator[int]:
        """The row that another was mostly computed from, the one that this was, and so on, each
        once: of tensors that are changed in place, one may come from the other and back.
        """
        passed = {row}
        source = self.source(row)
        while source is not None and source not in passed:
            yield source
            passed.add(source)
            source = self.source(source)

    def copied_to(self, row: int) -> int | None:
        """The row that a row's values were copied to."""
        return self.lives.row_of(self.column("copied_to")[row])

    @cached_property
    def made_by(self) -> Mapping[int, int]:
        """By the number of an operator, the row that it made; of several, the last one."""
        return {number: row for row, number in enumerate(self.lives.made) if number}

    @cached_property
    def _used_first_by(self) -> Mapping[int, list[int]]:
        """By the number of an operator, the rows that no operator has used before it."""
        used: dict[int, list[int]] = {}
        for row, number in enumerate(self.lives.first):
            if number:
                used.setdefault(number, []).append(row)
        return used

    def operands(self, row: int) -> set[int]:
        """The rows that a row was computed from; empty if they are unknown. The trace has one of
        them by row, and of each the first operator that used it.
        """
        source = self.source(row)
        known = {*self._used_first_by.get(self.lives.made[row], ())} - {row}
        if source is not None:
            known.add(source)
        read = sum(self.ledger.requested[operand] for operand in known)
        return known if read == self.column("inputs")[row] else set()

    @cached_property
    def products(self) -> Mapping[int, list[int]]:
        """By row, those that were mostly computed from it."""
        return self._referring("source")

    @cached_property
    def _parts(self) -> Mapping[int, list[int]]:
        return self._referring("copied_to")

    def _referring(self, column: str) -> Mapping[int, list[int]]:
        """By row, those whose value of a column refers to it."""
        referring: dict[int, list[int]] = {}
        for row, reference in enumerate(self.column(column)):
            to = self.lives.row_of(reference) if reference else None
            if to is not None:
                referring.setdefault(to, []).append(row)
        return referring

    def parts(self, row: int) -> Iterator[int]:
        """The rows of the trace whose values were copied to a row, last of all."""
        return (one for one in self._parts.get(row, ()) if one != row)

    def results(self, row: int) -> set[int]:
        """The rows that are mostly computed from a row, and what its last use makes: of two
        operands of one size, only one is the source.
        """
        last = self.made_by.get(self.lives.last[row])
        return {*self.products.get(row, ()), *([] if last is None else [last])} - {row}

    def category(self, row: int) -> Category:
        code = self._categories.get(row)
        if code is None:  # of a million rows, few are read
            (code,) = categories(self.ledger, (row,))
            self._categories[row] = code
        return Category.from_code(code)

    def place(self, row: int) -> Place | NoPlace:
        """The line that made a row."""
        return self._lines.place(self.ledger.stack[row], before=row >= self.ledger.made)

    def last_place(self, row: int) -> Place | NoPlace | None:
        """The line of a row's last use in the trace."""
        stack = self.column("last_stack")[row]
        return self._lines.place(stack, before=False) if stack else None

    def frames(self, row: int) -> Sequence[Frame]:
        """The frames that made a row, innermost first."""
        return self.ledger.trace.stacks.frames_of(self.ledger.stack[row])

    def called_at(self, rows: Iterable[int]) -> Place | None:
        """The innermost line of the program that all rows were made in a call from; None if they
        have none in common.
        """
        common: list[tuple[str, int, str]] | None = None
        for stack in {self.ledger.stack[row] for row in rows}:
            lines = [
                (one.filename, one.line, one.name)
                for one in reversed(self.ledger.trace.stacks.frames_of(stack))
                if is_user_frame(one)
            ]
            shared = lines if common is None else common
            common = [one for one, other in zip(shared, lines, strict=False) if one == other]
        if not common:
            return None
        file, line, function = common[-1]
        return Place(file, LineNumber(line), function)

    def files(self, row: int) -> list[str]:
        """The files of the frames that made a row, innermost first, with slashes."""
        return [one.filename.replace("\\", "/") for one in self.frames(row)]

    def functions(self, row: int, file: str) -> list[str]:
        """The functions of a file that made a row, innermost first."""
        named = zip(self.frames(row), self.files(row), strict=True)
        return [frame.name for frame, name in named if name.endswith(file)]

    def internals(self, rows: Collection[int]) -> set[int]:
        """Memory that the operators which made rows allocated in addition."""
        operator, start = self.lives.operator, self.ledger.start
        numbers = {self.lives.made[row] for row in rows} - {0}
        return {
            row
            for row in range(self.ledger.made)
            if not self.lives.made[row] and operator[start[row]] in numbers
        }

    def is_temporary(self, row: int) -> bool:
        """Whether a row is made and freed in the trace."""
        return self.ledger.start[row] >= 0 and not self.lives.survives(row)

    def multiplied(self, row: int, source: int) -> bool:
        """Whether a row is a product of the rows of ``source`` with a small matrix."""
        small = self.column("inputs")[row] - self.ledger.requested[source]
        by_small = _SMALL * small <= self.ledger.requested[source]
        return by_small and self.text("made_name", row) in PRODUCTS

    def gradients(self, rows: Iterable[int]) -> list[int]:
        """The rows of the trace that a backward pass makes as large as one of these is."""
        sizes = {self.ledger.requested[row] for row in rows}
        return [
            row
            for row, requested in enumerate(self.ledger.requested)
            if requested in sizes and self.in_backward(row)
        ]

    def is_new(self, row: int) -> bool:
        """Whether the operator that runs makes the row."""
        start = self.ledger.start[row]
        return start >= 0 and self.lives.operator[start] == self.now

    def for_backward(self, row: int) -> bool:
        """Whether the backward pass uses a row, after now."""
        return self.needs.get(row) in (Need.LATER, Need.IN_USE) and self.text(
            "last_phase", row
        ).startswith("backward")

    def bytes_of(self, rows: Iterable[int]) -> int:
        return sum(self.size[row] for row in rows)

    def largest(self, rows: Iterable[int]) -> int:
        """The first of the largest rows."""
        return max(rows, key=self.size.__getitem__)

    def of_most(self, rows: Collection[int]) -> int:
        """The first of the largest rows of the line that made the most."""
        lines: Counter[Place | NoPlace] = Counter()
        for row in rows:
            lines[self.place(row)] += self.size[row]
        line = lines.most_common(1)[0][0]
        return self.largest(row for row in rows if self.place(row) == line)

    @cached_property
    def kinds(self) -> list[tuple[tuple[object, ...], int]]:
        """By row, the lines of the program that made it, and the operator."""
        names, stacks = self.column("made_name"), ProgramStacks(self.ledger.trace.stacks)
        return [
            (stacks.lines(stack), name)
            for stack, name in zip(self.ledger.stack, names, strict=True)
        ]

    def alike(self, rows: Iterable[int]) -> list[int]:
        """The rows of the trace that are made as these are: on the same lines, by the same
        operator.
        """
        kinds = {self.kinds[row] for row in rows}
        return [row for row, kind in enumerate(self.kinds) if kind in kinds]

    def end_after(self, operator: int) -> int:
        """The first event after an operator."""
        return bisect_right(self.lives.operator, operator)
