"""Weights in a packed type that are unpacked for each use, and saved for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.model.causes import Bound
from gpuprobe.model.memory import Category
from gpuprobe.model.place import Place
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_WEIGHTS: Final = (Category.PARAMETER, Category.BUFFER)
_ELEMENTWISE: Final = (Made.POINTWISE, Made.COPY)
_PACKED: Final = 1  # byte: integers and float8, of which some hold two numbers each


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """What is computed element by element from quantized weights, and saved."""
    packed = {}
    for row in live.rows:
        weight = _weight(live, row) if live.for_backward(row) else None
        if weight is not None:
            packed[row] = weight
    if not packed:
        return
    main = live.largest(packed)
    used = next((live.place(one) for one in live.products.get(main, ())), None)
    yield Excess(
        Answer(
            "unpacked-weights",
            f"{human_bytes(live.bytes_of(packed))} from {live.place(main)} are weights, unpacked "
            f"from {human_bytes(live.bytes_of(set(packed.values())))} of quantized ones, which the "
            "autograd graph keeps for the backward pass: the products that read them save them",
            "compute the product in a torch.autograd.Function that saves the quantized weight, and "
            "unpacks it again in its backward pass; or checkpoint each layer",
        ),
        main,
        list(packed),
        "without the unpacked weights",
        sizes=dict.fromkeys(live.alike(packed), 0),
        kept_at=used if isinstance(used, Place) else None,
        bound=Bound.OR_MORE,  # the backward pass unpacks them again, one at a time
    )


def _weight(live: LiveMemory, row: int) -> int | None:
    """The quantized weight that a wider tensor is computed from element by element; None if it is
    not.
    """
    widths = live.column("width")
    at = row
    for source in live.sources(row):
        if live.how(at) not in _ELEMENTWISE or not live.is_temporary(at):
            return None
        if live.category(source) in _WEIGHTS and live.lives.survives(source):
            return source if widths[source] == _PACKED < widths[row] else None
        at = source
    return None
