"""Log-probabilities of all classes, of which one for each row is picked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.causes.wording import of_names
from gpuprobe.model.text import human_bytes

_NAMES: Final = frozenset(("_log_softmax", "_softmax"))
_PICKS: Final = frozenset(("gather", "index", "index_select", "take"))
_LEAST: Final = 4
"""A classification into two or three has no large rows."""


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Softmaxes that one operator uses, which picks a part; no backward pass needs them."""
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
