"""Pairs the lines and modules of two runs whose code differs.

A shifted line or a renamed module is the same memory under another name. Two rows, one removed and
one added, would hide the real changes.

Lines of different functions are paired only if stack shape and bytes are equal as well. Unpaired
lines stay as they are: conservation does not depend on the pairing.
"""

from __future__ import annotations

import posixpath
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_MOST_CELLS = 250_000  # larger alignments use the order only
_MOST_FILES = 2_500  # pairs of files; with more, renamed files are not detected
_DEEPEST = 64  # levels of nested modules


@dataclass(frozen=True, slots=True)
class LineInfo:
    """A source line with memory. ``shape``: the functions that it called in its largest stack,
    innermost first; they stay the same when lines shift.
    """

    key: str
    file: str
    line: int
    function: str
    shape: tuple[str, ...]
    bytes: int


def match_lines(before: Sequence[LineInfo], after: Sequence[LineInfo]) -> dict[str, str]:
    """Map keys of ``before`` to the keys of ``after`` for the same place in the code.

    Within one function of one file, lines are aligned in order, favouring equal stack shapes,
    equal bytes and equal line numbers; only `_credible` pairs count. The other lines of a file are
    paired if shape and bytes are equal (a renamed function). A file is renamed if most of its lines
    are the same (`_renamed_files`).
    """
    files = _match_files({i.file for i in before}, {i.file for i in after})
    files |= _renamed_files(before, after, files)
    ours: dict[tuple[str, str], list[LineInfo]] = defaultdict(list)
    theirs: dict[tuple[str, str], list[LineInfo]] = defaultdict(list)
    for info in before:
        ours[files.get(info.file, info.file), info.function].append(info)
    for info in after:
        theirs[info.file, info.function].append(info)
    found: dict[str, str] = {}
    for place, lines in ours.items():
        one = sorted(lines, key=lambda i: i.line)
        two = sorted(theirs.get(place, ()), key=lambda i: i.line)
        pairs = [(one[i], two[j]) for i, j in _align(one, two)]
        found.update((a.key, b.key) for a, b in _credible(pairs, len(one) == len(two)))
    taken = set(found.values())
    left: dict[tuple[object, ...], list[LineInfo]] = defaultdict(list)
    for info in sorted(after, key=lambda i: i.line):
        if info.key not in taken:
            left[info.file, info.shape, info.bytes].append(info)
    for info in sorted(before, key=lambda i: i.line):
        same = left.get((files.get(info.file, info.file), info.shape, info.bytes))
        if info.key not in found and same:
            found[info.key] = same.pop(0).key
    return found


def _match_files(before: Iterable[str], after: Iterable[str]) -> dict[str, str]:
    """Pair files that moved (another checkout, another machine): the only ones of that name in
    either run. Files with more of their path in common are paired first.
    """
    gone, new = set(before) - set(after), set(after) - set(before)
    found: dict[str, str] = {}
    longest = max((len(_parts(f)) for f in gone | new), default=0)
    for depth in range(longest, 0, -1):
        tails: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
        for side, names in enumerate((gone, new)):
            for name in names:
                tail = _parts(name)[-depth:]
                if len(tail) == depth:
                    tails.setdefault(tail, ([], []))[side].append(name)
        for ours, theirs in tails.values():
            if len(ours) == len(theirs) == 1:
                found[ours[0]] = theirs[0]
                gone.discard(ours[0])
                new.discard(theirs[0])
    return found


def _renamed_files(
    before: Sequence[LineInfo], after: Sequence[LineInfo], paired: Mapping[str, str]
) -> dict[str, str]:
    """Pair files with different names and the same code: at least half of the lines of either
    have the function and shape, and the number or the bytes, of a line of the other. A single such
    line must have the same bytes. If two files are equally similar to a third, none is paired.
    """
    gone, new = _lines_by_file(before), _lines_by_file(after)
    both = gone.keys() & new.keys()
    for files, known in ((gone, {*both, *paired}), (new, {*both, *paired.values()})):
        for file in known & files.keys():
            del files[file]
    if len(gone) * len(new) > _MOST_FILES:
        return {}
    likeness: dict[tuple[str, str], int] = {}
    for old, ours in gone.items():
        for name, theirs in new.items():
            by_number = sum((_numbers(ours) & _numbers(theirs)).values())
            by_bytes = sum((_sizes(ours) & _sizes(theirs)).values())
            alike = max(by_number, by_bytes)
            if 2 * alike >= max(len(ours), len(theirs)) and (alike > 1 or by_bytes):
                likeness[old, name] = alike
    found: dict[str, str] = {}
    for (old, name), alike in likeness.items():
        rivals = [n for (o, w), n in likeness.items() if (o == old) != (w == name)]
        if all(n < alike for n in rivals):
            found[old] = name
    return found


def _lines_by_file(lines: Sequence[LineInfo]) -> dict[str, list[LineInfo]]:
    found: dict[str, list[LineInfo]] = defaultdict(list)
    for info in lines:
        found[info.file].append(info)
    return found


def _numbers(lines: Sequence[LineInfo]) -> Counter[tuple[object, ...]]:
    return Counter((i.function, i.shape, i.line) for i in lines)


def _sizes(lines: Sequence[LineInfo]) -> Counter[tuple[object, ...]]:
    return Counter((i.function, i.shape, i.bytes) for i in lines)


def _parts(path: str) -> tuple[str, ...]:
    plain = posixpath.normpath(path.replace("\\", "/"))
    return tuple(part for part in plain.split("/") if part)


def _align(one: Sequence[LineInfo], two: Sequence[LineInfo]) -> list[tuple[int, int]]:
    """Pairs of indices, both rising: the best alignment of two lists of lines."""
    if not one or not two:
        return []
    if len(one) * len(two) > _MOST_CELLS:
        return list(zip(range(len(one)), range(len(two)), strict=False))
    # score[i][j]: the best of the first i and the first j lines.
    score = [[0.0] * (len(two) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one, 1):
        row, above = score[i], score[i - 1]
        for j, b in enumerate(two, 1):
            row[j] = max(above[j], row[j - 1], above[j - 1] + _likeness(a, b))
    pairs = []
    i, j = len(one), len(two)
    while i and j:
        here = score[i][j]
        if here == score[i - 1][j - 1] + _likeness(one[i - 1], two[j - 1]):
            pairs.append((i - 1, j - 1))
            i, j = i - 1, j - 1
        elif here == score[i - 1][j]:
            i -= 1
        else:
            j -= 1
    pairs.reverse()
    return pairs


def _likeness(a: LineInfo, b: LineInfo) -> float:
    """The similarity of two lines of one function; always above 0, since the order of lines is
    evidence too. Sums of quarters: exact in floating point.
    """
    return 0.25 + 4.0 * (a.shape == b.shape) + 2.0 * (a.bytes == b.bytes) + (a.line == b.line)


def _credible(
    pairs: Sequence[tuple[LineInfo, LineInfo]], same_count: bool
) -> list[tuple[LineInfo, LineInfo]]:
    """The pairs with evidence beyond their order. Order alone would pair a removed line with any
    added one (also of another class: a frame only has the method's name).

    Evidence is the same line number; or the same shape together with the same bytes, with the same
    shift as an accepted neighbour, or with an equal number of lines of which all moved.
    """
    counts = [a.line == b.line or (a.shape == b.shape and a.bytes == b.bytes) for a, b in pairs]
    if not any(counts) and same_count:
        return [(a, b) for a, b in pairs if a.shape == b.shape]
    shifts = [b.line - a.line for a, b in pairs]
    # Once down and once up: an accepted shift spreads to its neighbours.
    order = [*zip(range(1, len(pairs)), range(len(pairs) - 1), strict=True)]
    for here, near in [*order, *((near, here) for here, near in reversed(order))]:
        a, b = pairs[here]
        if counts[near] and shifts[here] == shifts[near] and a.shape == b.shape:
            counts[here] = True
    return [pair for pair, counted in zip(pairs, counts, strict=True) if counted]


def match_modules(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, str]:
    """Map dotted module paths (with their bytes) of ``before`` to those of ``after``.

    Equal paths are pairs. Below a common parent, a removed child is paired with an added one that
    has the same submodules (``encoder.0``, ``encoder.1`` → ``backbone.0``, …): one with equal
    bytes, else the only one.
    """
    found = {key: key for key in before if key in after}
    # Paths come from files: one with a hundred thousand dots is not a module.
    ours, theirs = (
        {key: size for key, size in side.items() if key.count(".") < _DEEPEST}
        for side in (before, after)
    )
    _match_children(_Tree(ours), _Tree(theirs), found)
    return found


class _Tree:
    """Module paths as a tree: each node has the names below it and the bytes of all of them."""

    def __init__(self, paths: Mapping[str, int]) -> None:
        self.children: dict[str, _Tree] = {}
        self.key: str | None = None
        self.bytes = sum(paths.values())
        below: dict[str, dict[str, int]] = defaultdict(dict)
        for path, size in paths.items():
            head, _, rest = path.partition(".")
            below[head][rest] = size
        self._below = below
        self._prefix = ""

    def grow(self) -> dict[str, _Tree]:
        """The children, created on first use: the depth comes from a file, so no recursion."""
        if not self.children:
            for head, rest in self._below.items():
                child = _Tree({path: size for path, size in rest.items() if path})
                child.bytes = sum(rest.values())
                child._prefix = f"{self._prefix}.{head}" if self._prefix else head
                child.key = child._prefix if "" in rest else None
                self.children[head] = child
        return self.children

    def shape(self) -> frozenset[str]:
        """The relative paths below the node, and an empty one for the node itself."""
        below = {f"{h}.{r}" if r else h for h, rest in self._below.items() for r in rest}
        return frozenset(below | ({""} if self.key is not None else set()))


def _match_children(one: _Tree, two: _Tree, found: dict[str, str]) -> None:
    pending = [(one, two)]
    while pending:
        ours, theirs = pending.pop()
        if ours.key is not None and theirs.key is not None:
            found[ours.key] = theirs.key
        a, b = ours.grow(), theirs.grow()
        pending += [(a[name], b[name]) for name in a if name in b]
        gone = [a[name] for name in a if name not in b]
        new = [b[name] for name in b if name not in a]
        pending += _renamed(gone, new)


def _renamed(gone: list[_Tree], new: list[_Tree]) -> list[tuple[_Tree, _Tree]]:
    """Pair removed and added siblings with the same structure."""
    shapes: dict[frozenset[str], tuple[list[_Tree], list[_Tree]]] = {}
    for side, trees in enumerate((gone, new)):
        for tree in trees:
            shapes.setdefault(tree.shape(), ([], []))[side].append(tree)
    pairs = []
    for ours, theirs in shapes.values():
        for tree in list(ours):
            same = next((t for t in theirs if t.bytes == tree.bytes), None)
            if same is not None:
                pairs.append((tree, same))
                ours.remove(tree)
                theirs.remove(same)
        if len(ours) == len(theirs) == 1:
            pairs.append((ours[0], theirs[0]))
    return pairs
