"""What changed between two states of a program's source."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Final, NamedTuple

from gpuprobe.analysis.blame.source import DECORATED, Source, Statement, source_of

NEW: Final = "new"  # nothing like it was there
GAP: Final = "gap"  # what stood next to it is gone
INDENTED: Final = "indented"  # it is in another block
RENAMED: Final = "renamed"  # the same with other names
MOVED: Final = "moved"  # it was elsewhere before

_MOST_STATEMENTS: Final = 20_000
"""Of both sides of one file: larger ones are not aligned (it takes their product)."""

_ALIKE: Final = 0.5
"""Of the statements of a file: what it must share with one of another name to be it."""


_NO_SOURCE: Final = Source((), 0)


@dataclass(frozen=True, slots=True)
class ChangedLine:
    """A changed line: ``line`` is what a diff shows as changed, in ``statement`` (its number in the
    file). ``removed``: the lines before that are gone, ``(first, last)``; None where none are.
    ``was``: their text where there is one line of them, and it is known."""

    file: str
    line: int
    statement: int
    kind: str
    removed: tuple[int, int] | None = None
    was: str = ""


def changes(before: Mapping[str, Source], after: Mapping[str, Source]) -> tuple[ChangedLine, ...]:
    """The changed lines of ``after``, by file and line. Files that only one side knows are taken
    for new, or for another's new name."""
    pairs = _paired(before, after)
    gone: Counter[str] = Counter()
    come: Counter[str] = Counter()
    aligned = {}
    for name, source in after.items():
        old = before.get(pairs.get(name, ""))
        aligned[name] = blocks = list(_aligned(old, source))
        for block in blocks:
            if not block.equal:
                gone.update(item.exact for item in block.before)
                come.update(item.exact for _, item in block.after)
    for name in before.keys() - set(pairs.values()):
        gone.update(item.exact for item in before[name].statements)
    found: list[ChangedLine] = []
    for name, blocks in aligned.items():
        old = before.get(pairs.get(name, ""))
        for block in blocks:
            if block.equal:
                found += _reindented(name, block)
            else:
                changed = _of_block(name, after[name], block, gone, come)
                found += (replace(change, was=_text_of(old, change)) for change in changed)
    # What lost the block that it was in stands for the header that is gone.
    indented = {(change.file, change.statement) for change in found if change.kind == INDENTED}
    kept = [
        change
        for change in found
        if change.kind != GAP
        or not indented & {(change.file, change.statement + next_) for next_ in (0, 1)}
    ]
    return tuple(sorted(kept, key=lambda change: (change.file, change.line, change.kind)))


def renamed_files(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """The names of ``after`` to the names that the same files have in ``before``, given as
    texts."""
    alone = {name for name in (*before, *after) if name not in before or name not in after}
    if not before.keys() - after.keys() or not after.keys() - before.keys():
        return {name: name for name in after if name in before}
    sides = [
        {name: source_of(text) if name in alone else _NO_SOURCE for name, text in side.items()}
        for side in (before, after)
    ]
    return _paired(*sides)


def _text_of(old: Source | None, change: ChangedLine) -> str:
    """The line that a change took away; "" where it took none or several, or nobody has it."""
    if old is None or change.removed is None or change.removed[0] != change.removed[1]:
        return ""
    number = change.removed[0]
    return old.lines[number - 1].strip() if number <= len(old.lines) else ""


def _paired(before: Mapping[str, Source], after: Mapping[str, Source]) -> dict[str, str]:
    """Names after to names before."""
    pairs = {name: name for name in after if name in before}
    left = [name for name in before if name not in after]
    for name in after:
        if name in pairs:
            continue
        ours = Counter(item.exact for item in after[name].statements)
        best, most = "", 0.0
        for other in left:
            theirs = Counter(item.exact for item in before[other].statements)
            alike = (ours & theirs).total() / max(1, ours.total(), theirs.total())
            alike += 0.01 * (posixpath.basename(name) == posixpath.basename(other))
            if alike > most:
                best, most = other, alike
        if most >= _ALIKE:
            pairs[name] = best
            left.remove(best)
    return pairs


class _Block(NamedTuple):
    """A stretch of both sides. ``after``: statements with their numbers, from ``at`` on."""

    equal: bool
    before: list[Statement]
    at: int
    after: list[tuple[int, Statement]]


def _aligned(before: Source | None, after: Source) -> Iterator[_Block]:
    two = list(enumerate(after.statements))
    if before is None:
        yield _Block(False, [], 0, two)
        return
    one = list(before.statements)
    if len(one) + len(two) > _MOST_STATEMENTS:
        return
    matcher = SequenceMatcher(
        None, [item.exact for item in one], [item.exact for _, item in two], autojunk=False
    )
    for tag, i, i2, j, j2 in matcher.get_opcodes():
        yield _Block(tag == "equal", one[i:i2], j, two[j:j2])


def _reindented(name: str, block: _Block) -> Iterator[ChangedLine]:
    for one, (number, two) in zip(block.before, block.after, strict=True):
        if one.indent != two.indent:
            yield ChangedLine(name, two.start, number, INDENTED)


def _of_block(
    name: str, after: Source, block: _Block, gone: Counter[str], come: Counter[str]
) -> Iterator[ChangedLine]:
    """The changes of one stretch that is not equal."""
    shapes = Counter(item.shape for item in block.before)
    is_new = False
    for number, item in block.after:
        removed = None
        if gone[item.exact] > 0:
            gone[item.exact] -= 1
            kind = MOVED
        elif shapes[item.shape] > 0:
            shapes[item.shape] -= 1
            kind = RENAMED
        else:
            kind, is_new = NEW, True
            if block.before:
                removed = (block.before[0].start, block.before[-1].end)
        yield ChangedLine(name, _changed_line(item, block.before), number, kind, removed)
    if is_new:
        return
    # What is gone without anything in its place, and is not elsewhere now.
    renamed = Counter(item.shape for _, item in block.after)
    lost = []
    for item in block.before:
        if come[item.exact] > 0:
            come[item.exact] -= 1
        elif renamed[item.shape] > 0:
            renamed[item.shape] -= 1
        else:
            lost.append(item)
    if lost:
        yield _gap(name, after, lost, block.at + len(block.after))


def _changed_line(item: Statement, ones: Iterable[Statement]) -> int:
    """The first line of a statement that the old text does not have."""
    if len(item.parts) == 1:
        return item.start
    known = {part for one in ones for part in one.parts}
    lines = (item.start + at for at, part in enumerate(item.parts) if part not in known)
    return next(lines, item.start)


def _gap(name: str, after: Source, lost: list[Statement], at: int) -> ChangedLine:
    """Statements that are gone from before number ``at``: named is the statement next to them that
    is in the same block, the one before where both are. Behind a block's header it is the first of
    the block; what a decorator was on is named for it."""
    statements = after.statements
    indent = min(item.indent for item in lost)
    number = max(0, at - 1)
    if at < len(statements):
        here = statements[at]
        is_before = bool(at) and statements[at - 1].indent >= indent
        if (
            not is_before or any(item.shape.startswith(DECORATED) for item in lost)
        ) and here.indent >= indent:
            number = at
    removed = (lost[0].start, lost[-1].end)
    if not statements:
        return ChangedLine(name, 1, 0, GAP, removed)
    return ChangedLine(name, statements[number].start, number, GAP, removed)
