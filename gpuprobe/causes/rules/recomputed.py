"""One checkpoint over many layers: the backward pass recomputes all their activations at once."""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.model.causes import Bound
from gpuprobe.model.text import human_bytes

_CHECKPOINT = "torch/utils/checkpoint.py"
_LEAST_LAYERS = 2


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Activations of several layers that one recomputation made. Other recomputations of the trace
    have other layers, if the program has a checkpoint for each block.
    """
    recomputed = [row for row in range(len(live.ledger)) if _is_recomputed(live, row)]
    rows = [row for row in recomputed if row in live.needs and live.for_backward(row)]
    layers: dict[str, list[int]] = {}
    for row in rows:
        name = _layer(live.text("module", row))
        if name:
            layers.setdefault(name, []).append(row)
    every = {_layer(live.text("module", row)) for row in recomputed} - {""}
    if len(layers) < _LEAST_LAYERS or 2 * len(layers) <= len(every):
        return
    largest = max(map(live.bytes_of, layers.values()))
    main = live.largest(rows)
    keep = largest / live.bytes_of(rows)
    yield Excess(
        Answer(
            "whole-checkpoint",
            f"{human_bytes(live.bytes_of(rows))} from {live.place(main)} are the activations "
            f"of {len(layers)} layers, recomputed at once by one checkpoint and kept by its "
            "autograd graph",
            "checkpoint each block instead of the whole: torch.utils.checkpoint.checkpoint for "
            "each block inside of the loop over them",
            code="x = checkpoint(block, x, use_reentrant=False)",
        ),
        main,
        rows,
        "with the activations of one layer at a time",
        sizes={row: int(live.size[row] * keep) for row in rows},
        bound=Bound.OR_MORE,  # each block's input is saved
    )


def _is_recomputed(live: LiveMemory, row: int) -> bool:
    backward = live.in_backward(row)
    return backward and bool(live.functions(row, _CHECKPOINT))


def _layer(module: str) -> str:
    """The name up to its first number: ``encoder.layers.3`` of ``encoder.layers.3.fc1``; "" without
    one."""
    parts = module.split(".")
    return next((".".join(parts[: at + 1]) for at, part in enumerate(parts) if part.isdigit()), "")
