"""Sizes that depend on values which are not known: the largest that they can be.

What is allocated then is a bound on what would be, and the machine notes which line it is due to
(`Machine.bounded`), so that whoever wants to know more computes all values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.virtual.frames import where
from gpuprobe.virtual.machine import Machine

_empty: Final = torch.empty


def note(machine: Machine, what: str) -> None:
    """A size is the largest possible at the program's line."""
    place = where()
    machine.bounded = machine.bounded or place
    machine.assume(f"{place}: {what}, which is the most that can be")


def largest(
    machine: Machine, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """What makes the largest possible result of an operator, without values; None where there is
    no bound on it, or its size does not depend on values.
    """
    name = func._schema.name.removeprefix("aten::")
    tensor = args[0]
    if name == "nonzero":
        note(machine, "no element is zero")
        return lambda: _indices(tensor.numel(), tensor.dim())
    if name == "masked_select":
        note(machine, "a mask selects every element")
        count = math.prod(torch.broadcast_shapes(tensor.shape, args[1].shape))
        return lambda: _like(tensor, count)
    if name == "torchvision::nms":
        note(machine, "no box is suppressed")
        return lambda: _indices(tensor.size(0))
    if "unique" in name:
        note(machine, "all elements differ")
        given = {item.name: item.default_value for item in func._schema.arguments}
        given.update(zip(given, args, strict=False))
        return lambda: _unique({**given, **kwargs}, len(func._schema.returns))
    return None


def _unique(given: dict[str, Any], results: int) -> tuple[Any, ...]:
    """What finds unique elements, or rows, returns where all of them are: those, the index of
    each, and how many there are of each. What is not asked for is empty.
    """
    tensor, dim = given["self"], given.get("dim")
    count = tensor.numel() if dim is None else tensor.size(dim)
    found = _like(tensor, count) if dim is None else _like(tensor, *tensor.shape)
    whole = tensor.shape if dim is None else (count,)
    inverse = _indices(*whole) if given.get("return_inverse") else _indices(0)
    counts = _indices(count) if given.get("return_counts") else _indices(0)
    return (found, inverse, counts)[:results]


def all_positions(mask: Any) -> list[Any]:
    """What a mask selects that is true everywhere, as indices without values: one for each of its
    dimensions.
    """
    return [_indices(mask.numel()) for _ in range(mask.dim())]


def _indices(*shape: int) -> Any:
    return _empty(shape, dtype=torch.long, device="meta")


def _like(tensor: Any, *shape: int) -> Any:
    return _empty(shape, dtype=tensor.dtype, device="meta")
