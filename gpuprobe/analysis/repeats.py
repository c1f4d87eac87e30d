"""Rows that repeat: the modules of equal layers under one name, such as ``GPT.h.*.mlp.act``.

A name is a path of components. A *list* is what has components that are numbers: a
``ModuleList``, or a ``Sequential``. The numbers of a list are replaced by ``*`` if its items are
layers, not parts of one layer:

* names continue below an item (``h.0.attn``): then ``h.0`` and ``h.1`` are layers, and
  ``h.0.mlp.0`` (a ``Linear``) and ``h.0.mlp.1`` (its activation) are not; within layers this is
  decided for each number, because layers are alike;
* or nothing continues below any item, and most items, at least `_ALIKE`, hold the same:
  checkpointed layers, which keep only what enters them.

A number that is the same in all names of a group stays. Groups are presentation: documents contain
the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from gpuprobe.model.place import Place, parse_place
from gpuprobe.model.plans.step_time import TimeShare
from gpuprobe.model.report import ShareRow

if TYPE_CHECKING:
    from gpuprobe.analysis.compare.diff import DiffRow

T = TypeVar("T")

_ALIKE: Final = 4
"""The fewest items of a list without parts that are layers if they hold the same: a block such as
``Sequential(Linear, GELU, Linear)`` has fewer."""

_ANY = "*"


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


def numbered(name: str) -> list[tuple[int, str]]:
    """A key that sorts ``h.2`` before ``h.10``."""
    return [(int(part) if _is_number(part) else -1, part) for part in name.split(".")]


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


def module_names(held: Mapping[str, Hashable]) -> dict[str, str]:
    """The name of the group of each module, for modules with what they hold (any value that is
    equal for modules that hold the same). A module that no other repeats has its own name.
    """
    paths = {name: tuple(name.split(".")) for name in held}
    patterns = _patterns(paths, held)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, pattern in patterns.items():
        groups.setdefault(pattern, []).append(name)
    names: dict[str, str] = {}
    for pattern, members in groups.items():
        first = paths[members[0]]
        shown = ".".join(
            _ANY
            if part == _ANY and any(paths[name][i] != first[i] for name in members)
            else first[i]
            for i, part in enumerate(pattern)
        )
        names.update((name, shown if len(members) > 1 else name) for name in members)
    return names


def _patterns(
    paths: Mapping[str, tuple[str, ...]], held: Mapping[str, Hashable]
) -> dict[str, tuple[str, ...]]:
    """The path of each module, with ``*`` for the numbers of layers. One component of all paths at
    a time: whether a list has layers depends on the pattern above it.
    """
    done: dict[str, tuple[str, ...]] = dict.fromkeys(paths, ())
    for depth in range(max(map(len, paths.values()), default=0)):
        reaching = [name for name, path in paths.items() if len(path) > depth]
        lists: dict[tuple[str, ...], list[str]] = {}
        for name in reaching:
            if _is_number(paths[name][depth]):
                lists.setdefault(done[name], []).append(name)
        layers = {
            above: _layers(above, names, depth, paths, held) for above, names in lists.items()
        }
        for name in reaching:
            part = paths[name][depth]
            is_layer = _is_number(part) and part in layers[done[name]]
            done[name] += (_ANY if is_layer else part,)
    return done


def _layers(
    above: tuple[str, ...],
    names: Sequence[str],
    depth: int,
    paths: Mapping[str, tuple[str, ...]],
    held: Mapping[str, Hashable],
) -> set[str]:
    """The numbers that are layers, of the list at the pattern ``above`` with these modules."""
    numbers = {paths[name][depth] for name in names}
    continued = {paths[name][depth] for name in names if len(paths[name]) > depth + 1}
    if _ANY in above:
        return continued
    if continued:
        return numbers
    (_, alike), *_ = Counter(held[name] for name in names).most_common(1)
    return numbers if alike >= _ALIKE and 2 * alike > len(names) else set()


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit()


def line_names(lines: Iterable[str]) -> dict[str, str]:
    """The name of the group of each line of code: a line that runs in several functions (a
    comprehension or a lambda, and what is around it) has their file and number, without a function.
    """
    functions: dict[tuple[str, int], list[str]] = {}
    found = list(dict.fromkeys(lines))
    for line in found:
        place = parse_place(line)
        if isinstance(place, Place) and place.file:
            functions.setdefault((place.file, place.line), []).append(line)
    names = {line: line for line in found}
    for (file, number), same in functions.items():
        if len(same) > 1:
            names.update((line, f"{file}:{number}") for line in same)
    return names
