"""Log-probabilities of all classes, of which one for each row is picked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.causes.wording import of_names
from gpuprobe.model.text import human_bytes

SAVED = "saved-log-probabilities"
_NAMES: Final = frozenset(("_log_softmax", "_softmax"))
_PICKS: Final = frozenset(("gather", "index", "index_select", "take"))
_LEAST: Final = 4
"""A classification into two or three has no large rows."""
_CHUNKS: Final = 8


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Softmaxes of which the only operator of the forward pass that reads them picks a part."""
    yield from _without_backward(live)
    yield from _for_backward(live)


def _for_backward(live: LiveMemory) -> Iterator[Excess]:
    """Those that the backward pass needs, which makes as much again for the part that was picked.
    A loss function of torch picks by an operator that is not among these.
    """
    roots = []
    for row in range(len(live.ledger)):
        picked = live.made_by.get(live.lives.first[row])
        if (
            picked is not None
            and live.text("made_name", row) in _NAMES
            and live.text("last_name", row).endswith("_backward_data")
            and live.text("made_name", picked) in _PICKS
            and live.size[row] >= _LEAST * live.size[picked]
        ):
            roots.append(row)
    sizes = {live.ledger.requested[row] for row in roots}
    group = {*roots, *live.internals(roots)} | {
        row
        for row, size in enumerate(live.ledger.requested)
        if size in sizes and live.text("last_name", row).endswith("softmax_backward_data")
    }
    alive = [row for row in roots if row in live.needs and not live.needs[row].needless]
    rows = [row for row in live.rows if row in group]
    if not alive:
        return
    main = live.largest(alive)
    logits = [one for one in map(live.source, alive) if one is not None and one in live.needs]
    picked = live.made_by[live.lives.first[main]]
    times = live.ledger.requested[main] // max(1, live.ledger.requested[picked])
    yield Excess(
        Answer(
            SAVED,
            f"{human_bytes(live.bytes_of(rows))}{of_names(live, [*rows, *logits], ' for ')} from "
            f"{live.place(main)} are log-probabilities of all classes, and what their computation "
            f"and their backward pass need, of which {live.text('made_name', picked)} reads one in "
            f"{times:,}",
            "gather the logits and subtract their logsumexp, in chunks of the rows, each under "
            "torch.utils.checkpoint.checkpoint: one chunk of the probabilities exists at a time",
            code="checkpoint(lambda x, i: x.gather(-1, i) - x.logsumexp(-1, keepdim=True), x, i)",
        ),
        main,
        rows,
        f"in chunks of an eighth ({_CHUNKS} of them), none saved for the backward pass",
        sizes={row: live.size[row] // _CHUNKS for row in group},
        named=logits,
    )


def _without_backward(live: LiveMemory) -> Iterator[Excess]:
    """Those that no backward pass needs."""
    sizes = {}
    for row in range(len(live.ledger)):
        picked = live.made_by.get(live.lives.last[row])
        if (
            picked is not None
            and live.text("made_name", row) in _NAMES
            and live.lives.first[row] == live.lives.last[row]
            and live.text("last_name", row) in _PICKS
            and live.size[row] >= _LEAST * live.size[picked]
        ):
            sizes[row] = live.size[picked]
    rows = [row for row in live.rows if row in sizes and live.lives.last[row] >= live.now]
    if not rows:
        return
    main = live.largest(rows)
    times = live.ledger.requested[main] // max(
        1, live.ledger.requested[live.made_by[live.lives.last[main]]]
    )
    yield Excess(
        Answer(
            "log-probabilities-of-all",
            f"{human_bytes(live.bytes_of(rows))}{of_names(live, rows)} from "
            f"{live.place(main)} are log-probabilities of all classes, of which "
            f"{live.text('last_name', main)} reads one in {times:,}",
            "gather the logits and subtract their logsumexp, one sequence of the batch at a time: "
            "no tensor is as large as the logits then",
            code="logits.gather(-1, i).squeeze(-1) - torch.stack([x.logsumexp(-1) for x in logits])",  # noqa: E501
        ),
        main,
        rows,
        "without the log-probabilities that nothing reads",
        sizes=sizes,
    )
