"""The cause of growth between two accounts: the line of the program to check first.

A change of one line often increases the memory of many: without an activation checkpoint, all lines
of a block keep what they allocate. So the lines' growth is followed from the training loop inwards,
as long as nearly all of it has the same path; the line where it splits is the cause.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from gpuprobe.analysis.blame.blame import Blame, GrowthPath, Suspect
from gpuprobe.analysis.blame.source import GAP, INDENTED
from gpuprobe.analysis.compare.accounts import Account, LineShare, changes_of, most_bytes
from gpuprobe.analysis.compare.diff import DiffRow
from gpuprobe.model.needs import Need
from gpuprobe.model.place import Place
from gpuprobe.model.text import amount_delta, human_bytes, human_delta

_NEARLY_ALL = 0.8
"""The share of an amount that must belong to one line for the search to follow it."""

_MOST = 0.5
"""The share of the growth that a rule must explain to be the cause."""

_ALIKE = 0.25
"""How far the growth factor of a line may be from that of the inputs: some of its memory does not
depend on them, and block sizes are rounded up."""

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
    """A cause of growth. ``place`` is a line, ``file:line in function``; empty if unknown.
    ``saved``: the bytes that a run without this change saved; None if there was no such run.
    """

    text: str
    place: Annotated[str, "file:line in function; empty if no line is known"] = ""
    saved: int | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """What the rules know in addition to the accounts.

    ``precision``: number formats before and after, if they changed. ``forward`` and ``backward``:
    the lines that call the model and that start the backward pass. ``freed_in_backward``: lines
    whose memory the backward pass freed before. ``growing``: lines that now leave more behind with
    each step. ``evaluation``: the account describes a phase without a backward pass. ``net``: the
    account's own change, the limit of each cause, since moved bytes cancel out.
    """

    precision: tuple[str, str] | None = None
    forward: str = ""
    backward: str = ""
    freed_in_backward: frozenset[str] = frozenset()
    growing: frozenset[str] = frozenset()
    evaluation: bool = False
    net: int = 0

    def amount(self, delta: int) -> str:
        """A change of bytes as text, at most the account's own."""
        return human_delta(min(delta, self.net) if self.net > 0 else delta)


def explain(
    rows: Sequence[DiffRow], before: Account, after: Account, context: Context, noun: str = ""
) -> Cause | None:
    """The cause of the growth in ``rows``, without regard to changes of the source; None if nothing
    grew. ``noun``: the name of what an account of counts counts, with ``{s}`` for its plural.
    """
    grown = [row for row in rows if row.delta > 0 and not row.key.startswith("(")]
    if not grown:
        rest = next((row for row in rows if row.delta > 0), None)
        return None if rest is None else Cause(f"{_amount(rest.delta, after, noun)} in {rest.key}")
    lines = {line.key: line for line in after.lines}
    if after.unit != "bytes":
        row = grown[0]
        return Cause(f"{_amount(row.delta, after, noun)} at {row.key}", row.key)
    old_lines = {line.key: line for line in before.lines}
    context = replace(context, net=after.total - before.total)
    tensors = [row for row in grown if _category(row, lines) != "workspace"]
    if _total(tensors) * 2 >= _total(grown):
        grown = tensors  # a library's workspace depends on the order of calls
    for rule in (_precision, _retained, _inputs):
        found = rule(grown, old_lines, lines, context)
        if found is not None:
            return found
    return _where_paths_split(grown, old_lines, lines, context)


def _amount(delta: int, account: Account, noun: str) -> str:
    things = noun.format(s="" if abs(delta) == 1 else "s") if account.unit == "count" else ""
    return f"{amount_delta(delta, account.unit)} {things}".rstrip()


def _total(rows: Iterable[DiffRow]) -> int:
    return sum(row.delta for row in rows)


def _precision(
    grown: Sequence[DiffRow],
    old_lines: Mapping[str, LineShare],
    lines: Mapping[str, LineShare],
    context: Context,
) -> Cause | None:
    """Other number formats: most of the growth is allocated by the model's own lines. The cause is
    at the line that calls the model.
    """
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
    old_lines: Mapping[str, LineShare],
    lines: Mapping[str, LineShare],
    context: Context,
) -> Cause | None:
    """Memory that the backward pass used to free, and that now outlives the step."""
    kept = [
        row
        for row in grown
        if row.key in lines
        and row.key not in context.growing
        and lines[row.key].until == "later"
        and lines[row.key].category in ("activation", "temporary", "autograd_detail")
        and (row.moved_from or row.key) in context.freed_in_backward
        and old_lines.get(row.moved_from or row.key, _NOTHING).until != "later"
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
    """A description of larger inputs: most lines have grown by one factor, and so has a line that
    copies inputs to the device. Empty if they are not larger.
    """
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
    old_lines: Mapping[str, LineShare],
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
    """The bytes that grew by the same factor as an input, the input, and the factor."""
    best: tuple[int, DiffRow, float] | None = None
    for row in grown:
        if row.before <= 0 or row.delta <= 0 or _category(row, lines) != "input":
            continue
        if row.blocks_before != row.blocks_after:
            continue  # not larger inputs, but more of them alive
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


def _where_paths_split(
    grown: Sequence[DiffRow],
    old_lines: Mapping[str, LineShare],
    lines: Mapping[str, LineShare],
    context: Context,
) -> Cause:
    """Follow the growth inwards, from the call with the most of it to the line where it splits."""
    paths = [(path, weight, row) for row in grown for path, weight in _weighted(row, lines)]
    depth = 0
    place = ""
    while True:
        groups: dict[str, int] = defaultdict(int)
        for path, weight, _ in paths:
            if len(path) > depth:
                groups[path[depth]] += weight
        if not groups:
            break
        best = min(groups, key=lambda key: (-groups[key], key))
        if place and groups[best] < _NEARLY_ALL * sum(weight for _, weight, _ in paths):
            break
        place = best
        paths = [item for item in paths if len(item[0]) > depth and item[0][depth] == best]
        depth += 1
    amount = sum(weight for _, weight, _ in paths)
    rows = {row.key: row for _, _, row in paths}
    text = f"{context.amount(amount)} at {place}"
    words = wording(list(rows.values()), old_lines, lines, context)
    if words:
        text += f": {'; '.join(words)}"
    first = max(rows.values(), key=lambda row: (row.delta, row.key))
    if first.key != place:
        text += f"; most of it allocated at {first.key}"
    return Cause(text, place)


def wording(
    rows: Sequence[DiffRow],
    old_lines: Mapping[str, LineShare],
    lines: Mapping[str, LineShare],
    context: Context,
) -> list[str]:
    """The kind of memory that grew in these lines, as phrases."""
    category = _grown_category(rows, old_lines, lines)
    words = _WORDS.get(category, category)
    if category == "activation" and all(
        row.key in lines and lines[row.key].until == "later" for row in rows
    ):
        words = "still alive at the end of the step"
    blocks = sum(row.blocks_after - row.blocks_before for row in rows)
    if context.evaluation and blocks > 0 and len(rows) > 1:
        words = "kept, but no backward pass follows (is torch.no_grad() missing?)"
    found = [words] if words else []
    found += _not_needed(rows, old_lines, lines)
    if blocks:
        more = "more" if blocks > 0 else "fewer"
        found.append(f"{abs(blocks)} {more} block{'s' * (abs(blocks) != 1)}")
    return found


def _not_needed(
    rows: Sequence[DiffRow], old_lines: Mapping[str, LineShare], lines: Mapping[str, LineShare]
) -> Iterator[str]:
    """How much more of the memory of these lines is never used again, or never: if it is most of
    the growth, and if the uses of memory were traced in both runs.
    """
    pairs = [
        (lines.get(row.key, _NOTHING), old_lines.get(row.moved_from or row.key, _NOTHING))
        for row in rows
    ]
    if not all(line.needs or not line.bytes for pair in pairs for line in pair):
        return
    more: Counter[str] = Counter()
    for line, old in pairs:
        more.update(dict(changes_of(line.needs, old.needs)))
    needless = {need: more[need.value] for need in Need if need.needless and more[need.value] > 0}
    if sum(needless.values()) >= _MOST * _total(rows):
        yield " and ".join(f"{human_delta(size)} {need.label}" for need, size in needless.items())


def _category(row: DiffRow, lines: Mapping[str, LineShare]) -> str:
    return lines[row.key].category if row.key in lines else ""


def _grown_category(
    rows: Sequence[DiffRow], old_lines: Mapping[str, LineShare], lines: Mapping[str, LineShare]
) -> str:
    """The category that grew most in these lines."""
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes.update(dict(lines.get(row.key, _NOTHING).categories))
        sizes.subtract(dict(old_lines.get(row.moved_from or row.key, _NOTHING).categories))
    return most_bytes(sizes)


def _weighted(
    row: DiffRow, lines: Mapping[str, LineShare]
) -> Iterable[tuple[tuple[str, ...], int]]:
    """The call paths to a line, outermost first, each with its part of the line's growth."""
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
"""The share of the growth that changed lines must explain together to be reported."""

_MOST_CAUSES = 3


def changed_lines(
    rows: Sequence[DiffRow], before: Account, after: Account, context: Context, blame: Blame
) -> tuple[Cause, ...]:
    """The changed lines that explain most of the growth in ``rows``, the best first; none if no
    change is related to it.
    """
    grown = [row for row in rows if row.delta > 0]
    lines = {line.key: line for line in after.lines}
    old_lines = {line.key: line for line in before.lines}
    pairs = [(row, path) for row in grown for path in growth_paths(row, lines)]
    tensors = [pair for pair in pairs if pair[1].category != "workspace"]
    if sum(path.bytes for _, path in tensors) * 2 >= sum(path.bytes for _, path in pairs):
        pairs = tensors  # a library's workspace depends on the order of calls
    found = blame.suspects(path for _, path in pairs)
    total = sum(path.bytes for _, path in pairs)
    if not found or sum(item.score for item in found) < _LEAST * total:
        return ()
    net = after.total - before.total
    factor = inputs(grown, lines)
    causes = []
    for suspect in found[:_MOST_CAUSES]:
        mine = list(dict.fromkeys(pairs[number][0] for number in suspect.paths))
        place = _place(suspect, blame)
        text = place
        if mine:
            amount = min(suspect.bytes, net) if net > 0 else suspect.bytes
            words = [_change_text(suspect)]
            if after.unit == "bytes":
                words += wording(mine, old_lines, lines, context)
            if factor and suspect.bytes * 2 > total and after.unit == "bytes":
                words.append(factor)
            first = max(mine, key=lambda row: (row.delta, row.key))
            if first.key != place:
                verb = "spent" if after.unit == "ns" else "allocated"
                words.append(f"{verb} at {first.key}")
            text = f"{amount_delta(amount, after.unit)} at {place}: {'; '.join(words)}"
        else:
            text = f"at {place}: {_change_text(suspect)}, which is related"
        causes.append(Cause(text, place))
    return tuple(causes)


def growth_paths(row: DiffRow, lines: Mapping[str, LineShare]) -> Iterator[GrowthPath]:
    """The full call paths to a line, each with its part of the line's growth."""
    line = lines.get(row.key)
    found = [] if line is None else [(path, n) for path, n in line.call_paths if n > 0]
    whole = sum(size for _, size in found)
    category = line.category if line is not None else ""
    if line is None or whole <= 0:
        yield GrowthPath((row.key,), row.delta, category)
        return
    left = row.delta
    for path, size in found[1:]:
        part = row.delta * size // whole
        left -= part
        yield GrowthPath(path[::-1], part, category)
    yield GrowthPath(found[0][0][::-1], left, category)


def _place(suspect: Suspect, blame: Blame) -> str:
    change = suspect.change
    facts = blame.program.facts.get((change.file, change.statement))
    function = (facts.opens or facts.scope) if facts is not None else ""
    return str(Place(change.file, change.line, function.rpartition(".")[2] or "<module>"))


def _change_text(suspect: Suspect) -> str:
    old = suspect.change.old_text
    shown = old if len(old) <= _LONGEST else f"{old[: _LONGEST - 1]}…"
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
"""Characters of a quoted line."""
