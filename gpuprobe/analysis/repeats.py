"""Rows that repeat, as one: groups by the names of `gpuprobe.analysis.repeated_names`.

Groups are presentation: documents contain the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from gpuprobe.analysis.repeated_names import line_names, module_names, numbered
from gpuprobe.model.plans.step_time import TimeShare
from gpuprobe.model.report import ShareRow

if TYPE_CHECKING:
    from gpuprobe.analysis.compare.diff import DiffRow

T = TypeVar("T")

REPEATING: Final = ("line", "module")
"""The breakdowns with rows that repeat."""


@dataclass(frozen=True, slots=True)
class Repeated(Generic[T]):
    """Rows under one name: ``members``, in the order in which they were. One member: a row that no
    other repeats, under its own name.
    """

    name: str
    members: tuple[T, ...]


@dataclass(frozen=True, slots=True)
class RepeatedShare(Repeated[ShareRow]):
    """Parts of an amount of memory under one name."""

    @property
    def sum(self) -> ShareRow:
        """All members as one row: the blocks are None if those of a member are."""
        blocks = [row.blocks for row in self.members]
        known = [number for number in blocks if number is not None]
        return ShareRow(
            self.name,
            sum(row.bytes for row in self.members),
            sum(known) if len(known) == len(blocks) else None,
        )


def share_groups(rows: Sequence[ShareRow], by: str) -> list[RepeatedShare]:
    """The rows of a complete table by line or by module (``by``, of `REPEATING`), those that repeat
    as one; the most bytes first. Rows of another ``by`` do not repeat.
    """
    held = {str(row.key): (row.bytes, row.blocks) for row in rows}
    names = {name: name for name in held}
    if by in REPEATING:
        names = module_names(held) if by == "module" else line_names(held)
    ordered = sorted(rows, key=lambda row: (-row.bytes, numbered(str(row.key))))
    groups = [
        RepeatedShare(found.name, found.members)
        for found in repeated(ordered, names, lambda row: str(row.key))
    ]
    return sorted(groups, key=lambda group: -group.sum.bytes)


def time_groups(rows: Sequence[TimeShare], by: str) -> list[Repeated[TimeShare]]:
    """The rows of a step's time by module, those of equal layers as one; the longest first. Rows of
    another ``by`` do not repeat.
    """
    names = {row.name: row.name for row in rows}
    if by == "module":
        names = module_names({row.name: row.calls for row in rows})
    ordered = sorted(rows, key=lambda row: (-row.ns, numbered(row.name)))
    groups = repeated(ordered, names, lambda row: row.name)
    return sorted(groups, key=lambda group: -sum(row.ns for row in group.members))


def change_groups(rows: Sequence[DiffRow], by: str) -> list[Repeated[DiffRow]]:
    """The changed rows of a diff by line or by module (``by``, of `REPEATING`), those that repeat
    as one; the largest changes first. Rows are together only if all grew, or all shrank, and all
    have one status; memory that moved from another name is alone.
    """
    if by not in REPEATING:
        return [Repeated(row.key, (row,)) for row in rows]
    kinds: dict[tuple[str, bool], list[DiffRow]] = {}
    found = []
    for row in rows:
        if row.moved_from:
            found.append(Repeated(row.key, (row,)))
        else:
            kinds.setdefault((row.status, row.delta > 0), []).append(row)
    for same in kinds.values():
        held = {row.key: (row.before, row.after) for row in same}
        names = module_names(held) if by == "module" else line_names(held)
        ordered = sorted(same, key=lambda row: (-abs(row.delta), numbered(row.key)))
        found += repeated(ordered, names, lambda row: row.key)
    return sorted(found, key=lambda group: -abs(sum(row.delta for row in group.members)))


def repeated(
    rows: Sequence[T], names: Mapping[str, str], key: Callable[[T], str]
) -> list[Repeated[T]]:
    """The rows by the name that ``names`` (from `module_names` or `line_names`) has for the ``key``
    of each, in the order of the first row of each name.
    """
    found: dict[str, list[T]] = {}
    for row in rows:
        found.setdefault(names[key(row)], []).append(row)
    return [Repeated(name, tuple(members)) for name, members in found.items()]
