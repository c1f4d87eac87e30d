"""Lines of a stream that differ in their numbers only, read without making objects of them.

Nearly all steps of a run have the same keys and the same texts in the same order: the same
*shape*. The first two lines of a shape are decoded and checked as any other. From then on one
regular expression recognises the shape, and its groups are the numbers that columns hold. A line
that it matches is valid, because the line that it was made from was: they differ in whole numbers
of at most 15 digits only, which all figures of a step may be (`gpuprobe.model.values`). Any other
line is decoded as before.

Matching takes 6 µs for a line of 3 KB, in which ``json.loads`` alone takes 22 µs.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections.abc import Sequence
from typing import Final

from gpuprobe.errors import DataError
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.run.columns import Key, StepColumns, figures, marks
from gpuprobe.model.run.session import Step
from gpuprobe.model.values import Unavailable

_NUMBERS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|([0-9]+)')

# Possessive, where Python can (3.11): a number is not tried again with fewer digits. JSON has no
# numbers like 007.
_NUMBER: Final = b"(?!0[0-9])[0-9]{1,15}" + (b"+" if sys.version_info >= (3, 11) else b"")

_DIGITS: Final = b"0123456789"

MAX_SHAPES: Final = 512
"""Shapes that are recognised. Making one takes 3 ms: a file of lines that all differ must not cost
more than decoding them does."""

_MAX_LINE: Final = 64 * 1024
"""Bytes of a line of which a shape is made."""

_ALIKE: Final = 16
"""Shapes that differ in digits within texts only, such as the names of devices."""


class Shape:
    """Lines that differ in their numbers only."""

    def __init__(self, pattern: bytes, layout: Step) -> None:
        """``layout`` is a step whose numbers are the numbers of the groups of ``pattern``, negative
        where a minus sign comes before the group, and 0 where a line has no number.
        """
        self.windows = frozenset(window.device for window in layout.windows)
        self.marks = marks(layout)
        found = figures(layout)
        captured = sorted({abs(term) for terms in found.values() for term in terms if term})
        place = {number: at for at, number in enumerate(captured)}
        self._single = [
            (key, place[terms[0]])
            for key, terms in found.items()
            if len(terms) == 1 and terms[0] > 0
        ]
        single = {key for key, _ in self._single}
        self._sums = [
            (key, [(1 if term > 0 else -1, place[abs(term)]) for term in terms if term])
            for key, terms in found.items()
            if key not in single
        ]
        self.match = re.compile(_with_groups(pattern, captured)).fullmatch

    @classmethod
    def of(cls, line: bytes) -> Shape:
        """The shape of a line that is a valid step. Raises DataError for one that has none."""
        parts: list[bytes] = []
        numbered: list[bytes] = []
        at = count = 0
        for found in _NUMBERS.finditer(line):
            if found[1] is None:  # a text
                continue
            count += 1
            between = line[at : found.start()]
            if between[-1:] in b".eE+" or line[found.end() : found.end() + 1] in (b".", b"e", b"E"):
                raise DataError("a number that is not whole")
            parts += (re.escape(between), b"\0")
            numbered += (between, str(count).encode())
            at = found.end()
        parts.append(re.escape(line[at:]))
        numbered.append(line[at:])
        layout = from_plain(Step, json.loads(b"".join(numbered)))
        return cls(b"".join(parts), layout)

    def append(self, columns: StepColumns, rows: Sequence[tuple[bytes, ...]]) -> None:
        """Add the rows of groups of lines that matched."""
        groups = [array("q", map(int, group)) for group in zip(*rows, strict=True)]
        numbers: dict[Key, array[int]] = {key: groups[at] for key, at in self._single}
        for key, terms in self._sums:
            total = array("q", bytes(8 * len(rows)))
            for sign, at in terms:
                total = array(
                    "q", (one + sign * two for one, two in zip(total, groups[at], strict=True))
                )
            numbers[key] = total
        columns.extend(numbers, self.marks, len(rows))


def _with_groups(pattern: bytes, captured: Sequence[int]) -> bytes:
    """The pattern, which has a zero byte for each number, with groups for the captured ones."""
    named = set(captured)
    first, *others = pattern.split(b"\0")
    parts = [first]
    for number, part in enumerate(others, 1):
        parts.append(b"(" + _NUMBER + b")" if number in named else _NUMBER)
        parts.append(part)
    return b"".join(parts)


class Shapes:
    """The shapes of a recording: of all its ranks, which run the same program."""

    def __init__(self) -> None:
        self._known: dict[bytes, list[Shape]] = {}
        self._once: set[int] = set()  # hashes of the digitless lines that came once
        self._count = 0

    def find(self, line: bytes) -> tuple[Shape, tuple[bytes, ...]] | None:
        """The shape of a line and its captured numbers; None if the shape is unknown."""
        for shape in self._known.get(line.translate(None, _DIGITS), ()):
            matched = shape.match(line)
            if matched is not None:
                return shape, matched.groups()
        return None

    def learn(self, line: bytes, step: Step) -> None:
        """Make a shape of a line that was decoded to ``step``, if others like it have come."""
        # The names of traces have numbers in them that no other step has.
        if self._count >= MAX_SHAPES or step.traces or len(line) > _MAX_LINE or b"\0" in line:
            return
        if not isinstance(step.launches, Unavailable):  # numbers that have to fit one another
            return
        key = line.translate(None, _DIGITS)
        if hash(key) not in self._once:
            if len(self._once) < 4 * MAX_SHAPES:
                self._once.add(hash(key))
            return
        alike = self._known.setdefault(key, [])
        if len(alike) < _ALIKE:
            try:
                alike.append(Shape.of(line))
                self._count += 1
            except (DataError, ValueError, RecursionError):
                self._once.discard(hash(key))
