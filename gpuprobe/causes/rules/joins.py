"""Tensors that are joined while their parts are alive, and tensors that grow by joining."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.causes.wording import of_names
from gpuprobe.model.causes import Bound
from gpuprobe.model.text import human_bytes

GROWN = "grown-by-joining"
_JOINS = ("cat", "stack")
_REDUCTIONS = frozenset(("mean", "sum", "amax", "amin", "max", "min", "prod"))
_TRAINER: Final = "/transformers/trainer.py"
"""transformers' Trainer joins what the batches of an evaluation predict, and moves it to the CPU
only every ``eval_accumulation_steps`` batches (None, by default: at the end)."""
_REDUCED = 2  # two parts at least
_PASSES: Final = 2
"""The joins of a line that each have the one before as a part, from which it is a loop."""


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Results of cat and stack that are alive together with their parts."""
    joined: set[int] = set()
    for row in sorted(live.rows, key=lambda row: -live.size[row]):
        if row in joined or live.text("made_name", row) not in _JOINS:
            continue
        parts = [one for one in live.parts(row) if one in live.needs]
        both = min(live.size[row], live.bytes_of(parts))
        if not parts or 2 * both < live.size[row]:
            continue
        if live.for_backward(row):
            continue  # the backward pass needs it, as a skip connection of a U-Net
        if _grows(live, row):
            yield _grown(live, row, joined)
        elif len(parts) > 1:
            yield _joined(live, row, parts)
        joined.add(row)


def _grows(live: LiveMemory, row: int) -> bool:
    """Whether the same line joined the largest part, and the largest part of that: a line may also
    have one join within another.
    """
    for _ in range(_PASSES):
        parts = [one for one in live.parts(row) if live.text("made_name", one) in _JOINS]
        largest = max(parts, key=live.size.__getitem__, default=None)
        if largest is None or live.ledger.stack[largest] != live.ledger.stack[row]:
            return False
        if largest >= live.ledger.made:
            return True  # it is older than the trace
        row = largest
    return True


def _grown(live: LiveMemory, row: int, joined: set[int]) -> Excess:
    """A tensor that is joined with a new part in each pass of a loop."""
    names = live.column("made_name")
    lines = {live.ledger.stack[row]}
    now = [one for one in live.rows if live.text("made_name", one) in _JOINS]
    for one in now:  # keys, and values on the next line
        source = live.source(one)
        if source is not None and live.ledger.stack[source] == live.ledger.stack[one]:
            lines.add(live.ledger.stack[one])
    rows = [one for one in now if live.ledger.stack[one] in lines]
    joined.update(rows)
    ends = {}
    read = False
    for one in range(len(live.ledger)):
        if live.ledger.stack[one] in lines and names[one]:
            to = live.copied_to(one)
            if to is not None:
                ends[one] = live.ledger.start[to]
                read = read or live.lives.first[one] != live.lives.last[one]
    size = human_bytes(live.bytes_of(rows))
    return Excess(
        Answer(
            GROWN,
            f"{size}{of_names(live, rows)} grow by {live.text('made_name', row)} at "
            f"{live.place(row)}: at each call the whole exists twice, and blocks of every size "
            "stay in the cache",
            *_remedy_of_growth(live, row, read=read),
        ),
        row,
        rows,
        "with each part written into memory that is allocated once",
        ends=ends,
        sizes={} if not ends else {r: live.size[r] for r in rows if r not in ends},
        bound=Bound.OR_LESS,  # if only a part is read later
    )


def _remedy_of_growth(live: LiveMemory, row: int, *, read: bool) -> tuple[str, str, EditKind]:
    """The remedy in words and as code, and the edit."""
    if any(frame.filename.endswith(_TRAINER) for frame in live.frames(row)):
        text = (
            "let the Trainer move them to the CPU after each batch: eval_accumulation_steps=1 of "
            "its arguments; or keep less of each: its preprocess_logits_for_metrics"
        )
        return text, "eval_accumulation_steps=1", EditKind.EVALUATE_TO_CPU
    if read:
        text = "preallocate it with its final size, and write each part into it"
    else:
        text = (
            "keep only what is read of it later, such as an argmax, or move each part to the CPU "
            "before keeping it in a list; or preallocate it"
        )
    return text, "", EditKind.NONE


def _reduced_by(live: LiveMemory, row: int) -> str:
    """The operator that makes a much smaller result of a joined tensor, if all that is computed
    from it is.
    """
    name = live.text("last_name", row)
    results = live.results(row)
    small = bool(results) and all(_REDUCED * live.size[one] <= live.size[row] for one in results)
    return name if small and name in _REDUCTIONS else ""


def _collected(live: LiveMemory, parts: list[int]) -> bool:
    """Whether a container has most of the parts, such as the results of all batches."""
    holders = [live.holders.get(one) for one in parts]
    inside = sum(one is not None and one.container is not None for one in holders)
    return 2 * inside > len(parts)


def _joined(live: LiveMemory, row: int, parts: list[int]) -> Excess:
    kept = all(live.lives.last[one] > live.now for one in parts)
    remedy = (
        "work on the parts, or on one bounded bucket of them after the other"
        if kept
        else "write each part into a preallocated result as soon as it is computed"
    )
    if not kept and _collected(live, parts):
        remedy += "; or keep the parts on the CPU (.cpu()), and join them there"
    reduced = _reduced_by(live, row)
    if reduced:
        remedy = (
            f"only {reduced} reads the result: reduce as the parts are computed (for a mean, add "
            "each to a running sum), so that neither the parts nor the joined tensor are needed"
        )
    return Excess(
        Answer(
            "joined-with-parts",
            f"{human_bytes(live.size[row])}{of_names(live, [row])} are joined by "
            f"{live.text('made_name', row)} at {live.place(row)} while the parts are alive"
            f"{of_names(live, parts, ' in ')}: the same values twice",
            remedy,
        ),
        row,
        [row, *parts],
        "without the second copy",
        sizes={
            **dict.fromkeys(live.alike([row]), 0),
            **{one: live.size[one] for one in parts},
        },
        # With a running sum the parts go as well; otherwise a part, or a bucket, exists twice.
        bound=Bound.OR_LESS if reduced else Bound.OR_MORE,
    )
