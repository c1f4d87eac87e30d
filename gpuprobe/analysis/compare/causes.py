"""Which change of the program made an amount grow: the first thing to look at.

A change of one line often grows the memory of many: without an activation checkpoint, every line
of a block keeps what it made. So the lines' growth is followed from the training loop inwards, as
long as nearly all of it goes the same way; where it parts is the line to look at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuprobe.analysis.blame.blame import Blame, GrowthPath, Suspect
from gpuprobe.analysis.blame.source import GAP, INDENTED
from gpuprobe.analysis.compare.accounts import Account, LineShare, most_bytes
from gpuprobe.analysis.compare.diff import DiffRow
from gpuprobe.model.place import Place
from gpuprobe.model.text import human_bytes, human_delta

_NEARLY_ALL = 0.8
"""Of an amount: what must go on to one line for it to be followed."""

_MOST = 0.5
"""Of the growth: what a rule must explain to be the cause."""

_ALIKE = 0.25
"""How far a line's own factor may be from that of the inputs: some of what a line makes does not
depend on them, and blocks are rounded up."""

_NOTHING = LineShare("", 0, 0)

_WORDS = {
    "activation": "activations saved for backward",
    "temporary": "",
    "autograd_detail": "temporary, in the backward pass",
    "optimizer_state": "optimizer state",
    "gradient_bucket": "gradient buckets",
    "gathered_parameter": "parameters gathered from their shards",
    "kv_cache": "kept from one call of the model to the next",
    "unknown": "",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """``place`` is a line, ``file:line in function``; "" where none is known. ``saved``: what the
    program took less in a run without this change; None where that was not run."""

    text: str
    place: str = ""
    saved: int | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """What is known apart from one account: ``precision`` before and after, where that changed; the
    lines that call the model and that start the backward pass; the lines of which that freed
    something before; those that leave more behind with every step now."""

    precision: tuple[str, str] | None = None
    forward: str = ""
    backward: str = ""
    freed_in_backward: frozenset[str] = frozenset()
    growing: frozenset[str] = frozenset()
    evaluation: bool = False  # it is the account of a phase without a backward pass
    net: int = 0  # what the account has more: no cause has more of it, since what moved cancels out

    def amount(self, delta: int) -> str:
        """In words, at most the account's own change."""
        return human_delta(min(delta, self.net) if self.net > 0 else delta)


def explain(
    rows: Sequence[DiffRow], before: Account, after: Account, context: Context, noun: str = ""
) -> Cause | None:
    """The cause of what grew in ``rows``, where no change of the source is known to have to do with
    it; None where nothing grew. ``noun``: what a count counts."""
    grown = [row for row in rows if row.delta > 0 and not row.key.startswith("(")]
    if not grown:
        rest = next((row for row in rows if row.delta > 0), None)
        return None if rest is None else Cause(f"{_amount(rest.delta, after, noun)} in {rest.key}")
    lines = {line.key: line for line in after.lines}
    if after.unit == "count":
        row = grown[0]
        return Cause(f"{_amount(row.delta, after, noun)} at {row.key}", row.key)
    was = {line.key: line for line in before.lines}
    context = replace(context, net=after.total - before.total)
    tensors = [row for row in grown if _category(row, lines) != "workspace"]
    if _total(tensors) * 2 >= _total(grown):
        grown = tensors  # a library's workspace comes and goes with the order of calls
    for rule in (_precision, _retained, _inputs):
        found = rule(grown, was, lines, context)
        if found is not None:
            return found
    return _where_it_parts(grown, was, lines, context)


def _amount(delta: int, account: Account, noun: str) -> str:
    return f"{delta:+d} {noun}".rstrip() if account.unit == "count" else human_delta(delta)


def _total(rows: Iterable[DiffRow]) -> int:
    return sum(row.delta for row in rows)


def _precision(
    grown: Sequence[DiffRow],
    was: Mapping[str, LineShare],
    lines: Mapping[str, LineShare],
    context: Context,
) -> Cause | None:
    """Other number formats: most of what grew is made by the model's own lines, no more blocks
    than before. Look where the model is called."""
    if context.precision is None:
        return None
    computed = [row for row in grown if _category(row, lines) not in ("parameter", "input")]
    if _total(computed) < _MOST * _total(grown) or not context.forward:
        return None
    old, new = context.precision
    text = f"{context.amount(_total(computed))} at {context.forward}: {new}, before {old}"
    return Cause(f"{text}; most of it allocated at {computed[0].key}", context.forward)


def _retained(
    grown: Sequence[DiffRow],
    was: Mapping[str, LineShare],
    lines: Mapping[str, LineShare],
    context: Context,
) -> Cause | None:
    """What the backward pass freed in its step, and now outlives it."""
    kept = [
        row
        for row in grown
        if row.key in lines
        and row.key not in context.growing
        and lines[row.key].until == "later"
        and lines[row.key].category in ("activation", "temporary", "autograd_detail")
        and (row.moved_from or row.key) in context.freed_in_backward
        and was.get(row.moved_from or row.key, _NOTHING).until != "later"
    ]
    if not context.backward or _total(kept) < _MOST * _total(grown):
        return None
    return Cause(
        f"{context.amount(_total(kept))} at {context.backward}: activations are kept after the "
        "backward pass (retain_graph, or a live reference to the graph)"
        f"; most of them allocated at {kept[0].key}",
        context.backward,
    )


def inputs(grown: Sequence[DiffRow], lines: Mapping[str, LineShare]) -> str:
    """Whether the inputs are larger, in words: most lines have grown by one factor, and so has a
    line that brings inputs to the device. "" where they are not."""
    found = _factor(grown, lines)
    if found is None:
        return ""
    _, row, factor = found
    return (
        f"the inputs at {row.key} are {factor:.2f} times as large ({human_bytes(row.before)} "
        f"before, {human_bytes(row.after)} now)"
    )


def _inputs(
    grown: Sequence[DiffRow],
    was: Mapping[str, LineShare],
    lines: Mapping[str, LineShare],
    context: Context,
) -> Cause | None:
    """A larger batch, or longer inputs."""
    found = _factor(grown, lines)
    if found is None:
        return None
    amount, row, factor = found
    return Cause(
        f"{context.amount(amount)} with inputs {factor:.2f} times as large at {row.key}: "
        f"{human_bytes(row.before)} before, {human_bytes(row.after)} now",
        row.key,
    )


def _factor(
    grown: Sequence[DiffRow], lines: Mapping[str, LineShare]
) -> tuple[int, DiffRow, float] | None:
    """The bytes that grew by the factor of an input, the input, and the factor."""
    best: tuple[int, DiffRow, float] | None = None
    for row in grown:
        if row.before <= 0 or row.delta <= 0 or _category(row, lines) != "input":
            continue
        if row.blocks_before != row.blocks_after:
            continue  # of the same size, and more of them alive
        factor = row.after / row.before
        alike = sum(
            other.delta
            for other in grown
            if other.before > 0 and abs(other.after / other.before / factor - 1) <= _ALIKE
        )
        if best is None or (alike, row.delta) > (best[0], best[1].delta):
            best = alike, row, factor
    if best is None or best[0] < _MOST * _total(grown) or best[0] == best[1].delta:
        return None
    return best


def _where_it_parts(
    grown: Sequence[DiffRow],
    was: Mapping[str, LineShare],
    lines: Mapping[str, LineShare],
    context: Context,
) -> Cause:
    """Follow the growth inwards, from the call that has most of it."""
    ways = [(path, weight, row) for row in grown for path, weight in _weighted(row, lines)]
    depth = 0
    place = ""
    while True:
        groups: dict[str, int] = defaultdict(int)
        for path, weight, _ in ways:
            if len(path) > depth:
                groups[path[depth]] += weight
        if not groups:
            break
        best = min(groups, key=lambda key: (-groups[key], key))
        if place and groups[best] < _NEARLY_ALL * sum(weight for _, weight, _ in ways):
            break
        place = best
        ways = [way for way in ways if len(way[0]) > depth and way[0][depth] == best]
        depth += 1
    amount = sum(weight for _, weight, _ in ways)
    rows = {row.key: row for _, _, row in ways}
    text = f"{context.amount(amount)} at {place}"
    words = wording(list(rows.values()), was, lines, context)
    if words:
        text += f": {'; '.join(words)}"
    first = max(rows.values(), key=lambda row: (row.delta, row.key))
    if first.key != place:
        text += f"; most of it allocated at {first.key}"
    return Cause(text, place)


def wording(
    rows: Sequence[DiffRow],
    was: Mapping[str, LineShare],
    lines: Mapping[str, LineShare],
    context: Context,
) -> list[str]:
    """What grew in these lines, in words."""
    category = _grown_category(rows, was, lines)
    words = _WORDS.get(category, category)
    if category == "activation" and all(
        row.key in lines and lines[row.key].until == "later" for row in rows
    ):
        words = "still alive at the end of the step"
    blocks = sum(row.blocks_after - row.blocks_before for row in rows)
    if context.evaluation and blocks > 0 and len(rows) > 1:
        words = "kept, but no backward pass follows (is torch.no_grad() missing?)"
    found = [words] if words else []
    if blocks:
        more = "more" if blocks > 0 else "fewer"
        found.append(f"{abs(blocks)} {more} block{'s' * (abs(blocks) != 1)}")
    return found


def _category(row: DiffRow, lines: Mapping[str, LineShare]) -> str:
    return lines[row.key].category if row.key in lines else ""


def _grown_category(
    rows: Sequence[DiffRow], was: Mapping[str, LineShare], lines: Mapping[str, LineShare]
) -> str:
    """The category that grew most in these lines."""
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes.update(dict(lines.get(row.key, _NOTHING).categories))
        sizes.subtract(dict(was.get(row.moved_from or row.key, _NOTHING).categories))
    return most_bytes(sizes)


def _weighted(
    row: DiffRow, lines: Mapping[str, LineShare]
) -> Iterable[tuple[tuple[str, ...], int]]:
    """The ways to a line, outermost first, each with its part of the line's growth."""
    paths = lines[row.key].paths if row.key in lines else ()
    whole = sum(size for _, size in paths)
    if whole <= 0:
        yield (row.key,), row.delta
        return
    left = row.delta
    for path, size in paths[1:]:
        part = row.delta * size // whole
        left -= part
        yield path[::-1], part
    yield paths[0][0][::-1], left


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
