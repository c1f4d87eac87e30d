"""Gradients that nothing reads, and what is kept to compute them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.live_memory import STATE, Excess, LiveMemory
from gpuprobe.causes.wording import owners_of, parameters_like, share_a_part
from gpuprobe.model.place import Place
from gpuprobe.model.text import human_bytes


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """What only serves gradients that neither an optimizer nor the program reads."""
    lives, wasted, useful = live.lives, live.column("wasted"), live.column("useful")
    if not any(wasted):
        return
    gradients = [row for row, value in enumerate(wasted) if value]
    if any(lives.survives(row) and lives.used_later(row) for row in gradients):
        return  # a later step reads them
    kept = {}
    for row in range(len(live.ledger)):
        if wasted[row] or not useful[row] < lives.last[row] or not live.is_temporary(row):
            continue
        if live.category(row) not in STATE:
            kept[row] = live.end_after(useful[row] or lives.made[row])
    saved = [row for row in live.rows if kept.get(row, live.event + 1) <= live.event]
    here = [row for row in live.rows if wasted[row]]
    rows = [*saved, *here]
    if not rows:
        return
    graph = [row for row in saved if not live.in_backward(row)]
    main = live.of_most(graph or saved or here)
    computed = live.largest(here or gradients)
    at = live.place(computed)
    size = human_bytes(live.bytes_of(rows))
    kept_by = (
        f": {human_bytes(live.bytes_of(graph))} of it is kept by the autograd graph, most from "
        f"{live.place(main)}"
        if graph
        else ""
    )
    final = [row for row in gradients if live.lives.survives(row)]
    shared = share_a_part(live, final)
    owners = [] if shared else owners_of(live, final)
    owner = f" of {' and '.join(owners)}" if owners else ""
    yield Excess(
        Answer(
            "unread-gradients",
            f"{size} are gradients{owner} that nothing reads, and what "
            f"their computation at {at} needs{kept_by}",
            *_remedy(owners, passed=shared or _is_passed(live, final)),
        ),
        main,
        rows,
        "without these gradients and their graph",
        sizes=dict.fromkeys((*gradients, *live.internals(gradients)), 0),
        ends=kept,
        kept_at=at if isinstance(at, Place) else None,
        named=parameters_like(live, final),
    )


def _remedy(owners: Collection[str], *, passed: bool) -> tuple[str, str, EditKind]:
    """The remedy in words, as code and as an edit. ``passed``: whether other gradients, which are
    read, pass through these parts of a model.
    """
    code = "; ".join(f"{one}.requires_grad_(False)" for one in owners)
    if passed:
        return (
            "do not compute them: gradients that are read pass through this part, so let its "
            "parameters have requires_grad_(False) for this computation, and True again before "
            "the one that trains them, if any does; or use torch.autograd.grad for the tensors "
            "whose gradients are read",
            code,
            EditKind.NONE,
        )
    return (
        "do not compute them: run this part under torch.no_grad() or detach its result; where "
        "gradients pass through it, requires_grad_(False) for its parameters, or "
        "torch.autograd.grad for the tensors whose gradients are used",
        code or "with torch.no_grad():",
        EditKind.NO_GRAD,
    )


def _is_passed(live: LiveMemory, gradients: Collection[int]) -> bool:
    """Whether backward passes compute gradients that are read from what the models that have these
    gradients saved.
    """
    models = {_model(live, row) for row in gradients} - {""}
    return any(
        live.column("useful")[row] == live.lives.last[row]
        and _model(live, row) in models
        and live.text("last_phase", row).startswith("backward")
        and not live.in_backward(row)
        for row in range(len(live.ledger))
        if live.column("useful")[row] and live.is_temporary(row)
    )


def _model(live: LiveMemory, row: int) -> str:
    return live.text("module", row).partition(".")[0]
