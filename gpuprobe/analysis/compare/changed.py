"""The changed lines that made an amount grow, as causes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpuprobe.analysis.blame.blame import Blame, GrowthPath, Suspect
from gpuprobe.analysis.blame.changes import GAP, INDENTED
from gpuprobe.analysis.compare.accounts import Account, LineShare
from gpuprobe.analysis.compare.causes import Cause, Context, inputs, wording
from gpuprobe.analysis.compare.diff import DiffRow
from gpuprobe.model.place import Place
from gpuprobe.model.text import human_delta

_LEAST = 0.02
"""Of the growth: what changed lines must explain together to be named at all."""

_MOST_CAUSES = 3


def changed_lines(
    rows: Sequence[DiffRow], before: Account, after: Account, context: Context, blame: Blame
) -> tuple[Cause, ...]:
    """The changed lines that explain most of what grew in ``rows``, the best first; none where no
    change has to do with it."""
    grown = [row for row in rows if row.delta > 0]
    lines = {line.key: line for line in after.lines}
    was = {line.key: line for line in before.lines}
    ways, of = [], []
    for row in grown:
        for way in ways_of(row, lines):
            ways.append(way)
            of.append(row)
    tensors = [way for way in ways if way.category != "workspace"]
    if sum(way.bytes for way in tensors) * 2 >= sum(way.bytes for way in ways):
        # A library's workspace comes and goes with the order of calls.
        of = [row for row, way in zip(of, ways, strict=True) if way.category != "workspace"]
        ways = tensors
    found = blame.suspects(ways)
    total = sum(way.bytes for way in ways)
    if not found or sum(item.score for item in found) < _LEAST * total:
        return ()
    net = after.total - before.total
    factor = inputs(grown, lines)
    causes = []
    for suspect in found[:_MOST_CAUSES]:
        mine = list(dict.fromkeys(of[number] for number in suspect.ways))
        place = _place(suspect, blame)
        text = place
        if mine:
            amount = min(suspect.bytes, net) if net > 0 else suspect.bytes
            words = [_how(suspect), *wording(mine, was, lines, context)]
            if factor and suspect.bytes * 2 > total:
                words.append(factor)
            first = max(mine, key=lambda row: (row.delta, row.key))
            if first.key != place:
                words.append(f"allocated at {first.key}")
            text = f"{human_delta(amount)} at {place}: {'; '.join(words)}"
        else:
            text = f"at {place}: {_how(suspect)}, which is related"
        causes.append(Cause(text, place))
    return tuple(causes)


def ways_of(row: DiffRow, lines: Mapping[str, LineShare]) -> Iterator[GrowthPath]:
    """The paths to a line, each with its part of the line's growth."""
    line = lines.get(row.key)
    found = [(way, size) for way, size in line.ways if size > 0] if line is not None else []
    whole = sum(size for _, size in found)
    category = line.category if line is not None else ""
    if line is None or whole <= 0:
        yield GrowthPath((row.key,), row.delta, category)
        return
    left = row.delta
    for way, size in found[1:]:
        part = row.delta * size // whole
        left -= part
        yield GrowthPath(way[::-1], part, category)
    yield GrowthPath(found[0][0][::-1], left, category)


def _place(suspect: Suspect, blame: Blame) -> str:
    change = suspect.change
    facts = blame.program.facts.get((change.file, change.statement))
    function = (facts.opens or facts.scope) if facts is not None else ""
    return str(Place(change.file, change.line, function.rpartition(".")[2] or "<module>"))


def _how(suspect: Suspect) -> str:
    was = suspect.change.was
    shown = was if len(was) <= _LONGEST else f"{was[: _LONGEST - 1]}…"
    if suspect.change.kind == GAP:
        return (
            f"{shown!r} was removed next to this line"
            if shown
            else ("code next to this line was removed")
        )
    if suspect.change.kind == INDENTED:
        return "this line was moved into another block"
    return f"this line was changed, from {shown!r}" if shown else "this line was changed"


_LONGEST = 100
"""Of a line that is quoted, in characters."""
