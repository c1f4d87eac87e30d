"""What optimizers add to a step: temporaries for all parameters at once, and gradients that are
zeroed instead of freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.causes.wording import of_owner, parameters_like
from gpuprobe.model.memory import Category
from gpuprobe.model.text import human_bytes


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Temporaries of foreach implementations, and zeroed gradients."""
    yield from _foreach(live)
    yield from _zeroed(live)


def _foreach(live: LiveMemory) -> Iterator[Excess]:
    rows = [
        row
        for row in live.rows
        if live.text("made_name", row).startswith("_foreach_")
        and not live.lives.survives(row)
        and live.text("made_phase", row).startswith("optimizer")
    ]
    if len(rows) < 2:
        return
    main = live.largest(rows)
    alike = live.alike(rows)
    yield Excess(
        Answer(
            "foreach-temporaries",
            f"{human_bytes(live.bytes_of(rows))} are temporaries of the optimizer at "
            f"{live.place(main)}, which computes all parameters at once",
            "create the optimizer with foreach=False, or fused=True where it has that",
            code="foreach=False",
            edit=EditKind.FOREACH,
        ),
        main,
        rows,
        "with the temporaries of one parameter at a time",
        sizes=dict.fromkeys(alike, 0) | _of_one_parameter(live, main, rows),
    )


def _of_one_parameter(live: LiveMemory, main: int, rows: Sequence[int]) -> dict[int, int]:
    """The bytes of rows if only the temporaries of the parameter of ``main`` exist."""
    left = _temporaries(live, main, rows) * live.size[main]
    sizes = {}
    for row in sorted(rows, key=lambda row: -live.size[row]):
        sizes[row] = min(live.size[row], left)
        left -= sizes[row]
    return sizes


def _temporaries(live: LiveMemory, main: int, rows: Sequence[int]) -> int:
    """How many temporaries for one parameter exist at once without foreach. Adam, AdamW, NAdam and
    RAdam of torch 2.13 divide the square root in place with foreach, and into a second temporary
    without it; so SGD adds Nesterov momentum to a gradient with weight decay. Other optimizers have
    no more than this.
    """
    names = {live.text("made_name", row) for row in rows}
    decayed = "_foreach_add" in names
    if "_foreach_sqrt" in names:
        return 2 + decayed
    nesterov = decayed and live.lives.first[main] != live.lives.last[main]
    return 1 + nesterov


def _zeroed(live: LiveMemory) -> Iterator[Excess]:
    filled, until = live.column("filled"), live.column("filled_until")
    rows = [
        row
        for row in live.rows
        if live.category(row) is Category.GRADIENT
        and 0 < filled[row] <= live.now
        and (until[row] > live.now or not until[row])
    ]
    if not rows:
        return
    main = live.largest(rows)
    yield Excess(
        Answer(
            "zeroed-gradients",
            f"{human_bytes(live.bytes_of(rows))} of gradients{of_owner(live, rows)} are zeros: "
            "they were set to zero, not freed, before the forward pass",
            "free them: optimizer.zero_grad(set_to_none=True), which is the default",
            code="optimizer.zero_grad(set_to_none=True)",
            edit=EditKind.SET_TO_NONE,
        ),
        main,
        rows,
        "without the zeros until the backward pass adds to them",
        sizes=dict.fromkeys(rows, 0),
        named=parameters_like(live, rows),
    )
