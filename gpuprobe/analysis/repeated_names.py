"""The names of rows that repeat: modules of equal layers under one, such as ``GPT.h.*.mlp.act``.

A name is a path of components. A *list* is what has components that are numbers: a
``ModuleList``, or a ``Sequential``. The numbers of a list are replaced by ``*`` if its items are
layers, not parts of one layer:

* names continue below an item (``h.0.attn``): then ``h.0`` and ``h.1`` are layers, and
  ``h.0.mlp.0`` (a ``Linear``) and ``h.0.mlp.1`` (its activation) are not; within layers this is
  decided for each number, because layers are alike;
* or nothing continues below any item, and most items, at least `_ALIKE`, hold the same:
  checkpointed layers, which keep only what enters them.

A number that is the same in all names of a group stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final

from gpuprobe.model.place import Place, parse_place

_ALIKE: Final = 4
"""The fewest items of a list without parts that are layers if they hold the same: a block such as
``Sequential(Linear, GELU, Linear)`` has fewer."""

_ANY = "*"


def numbered(name: str) -> list[tuple[int, str]]:
    """A key that sorts ``h.2`` before ``h.10``."""
    return [(int(part) if _is_number(part) else -1, part) for part in name.split(".")]


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
