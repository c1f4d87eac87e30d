"""Columns of numbers, from one stretch after the other of a snapshot's list of events."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from gpuprobe.model.bounds import NewestMicroseconds
from gpuprobe.model.trace import COLUMNS


class PartSink:
    """Passes columns on, part by part; one that is zero throughout is never begun."""

    def __init__(self, append: Callable[[str, array[int]], None]) -> None:
        self._append = append
        self._rows = 0  # in the parts before this one
        self._part = 0
        self._begun: dict[str, int] = {}  # rows passed on

    def begin(self, rows: int) -> None:
        self._rows += self._part
        self._part = rows

    def put(self, column: str, values: array[int] | None) -> None:
        """The part of a column, None for zeros."""
        if values is None:
            return
        self._fill(column, self._rows)
        self._append(column, values)
        self._begun[column] += len(values)

    def end(self) -> None:
        for column in self._begun:
            self._fill(column, self._rows + self._part)

    def _fill(self, column: str, rows: int) -> None:
        """Add the zeros that were left out."""
        missing = rows - self._begun.setdefault(column, 0)
        if missing:
            typecode = COLUMNS[column]
            self._append(column, array(typecode, bytes(missing * array(typecode).itemsize)))
            self._begun[column] = rows


class InternedColumn:
    """A column of indices of values that repeat; ``index`` is called once per value."""

    def __init__(self, key: str, index: Callable[[Any], int]) -> None:
        self._key = key
        self._index = index
        self._table: dict[Any, int] = {None: 0}  # None: the event has no such key
        self._zeros = True

    def column(self, events: list[Any]) -> array[int] | None:
        try:
            values = list(map(itemgetter(self._key), events))
        except KeyError:
            values = [event.get(self._key) for event in events]
        return self.of(values)

    def of(self, values: list[Any], different: set[Any] | None = None) -> array[int] | None:
        """The column of these values, of which there are so many different ones; None for zeros."""
        table = self._table
        try:
            if self._zeros:
                if different is None:
                    # Comparing is quicker than hashing, and most often there is but one.
                    one = values.count(values[0]) == len(values)
                    different = set(values[:1] if one else values)
                if table.keys() >= different:
                    return None
                raise KeyError
            return array("I", map(table.__getitem__, values))
        except KeyError:
            for value in dict.fromkeys(values):
                if value not in table:
                    table[value] = self._index(value)
            self._zeros = not any(table.values())
            return None if self._zeros else array("I", map(table.__getitem__, values))


_HIGHEST_BYTES = slice(7 if sys.byteorder == "little" else 0, None, 8)


def are_times(column: array[int]) -> bool:
    """Whether all are times, in microseconds. Below 2**56, in the year 4253, all are: then no
    number has to be looked at.
    """
    if column.tobytes()[_HIGHEST_BYTES].count(0) == len(column):
        return True
    return 0 <= min(column) <= max(column) <= NewestMicroseconds


def column_of(typecode: str, name: str, events: list[Any]) -> array[int] | None:
    """A column of numbers that older snapshots lack; None where no event has it."""
    try:
        return array(typecode, map(itemgetter(name), events))
    except KeyError:
        if not any(name in event for event in events):
            return None
        return array(typecode, [event.get(name, 0) for event in events])
