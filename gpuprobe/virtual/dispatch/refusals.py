"""Calls that CUDA refuses for where their tensors lie, beyond tensors in two places.

By the name of the operator; each is given the tensors' places, and raises torch's error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

Place = Callable[[Any], int]
"""Place of a tensor: a device's index, or a negative number for the host."""


def name_of(place: int) -> str:
    return "cpu" if place < 0 else f"cuda:{place}"


def two_places(device: int, other: int, operator: str) -> RuntimeError:
    """The error of most kernels. ``device`` comes first, as torch lists them."""
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{name_of(device)} and {name_of(other)}! (when running {operator})"
    )


def _tensors(value: Any) -> list[Any]:
    return [item for item in value if isinstance(item, torch.Tensor)]


def _index(place: Place, name: str, args: tuple[Any, ...]) -> None:
    """Source: ``make_info`` in ``aten/src/ATen/native/TensorAdvancedIndexing.cpp``."""
    there = place(args[0])
    for index in _tensors(args[1]):
        if place(index) not in (there, -1, -2):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({name_of(there)})"
            )


def _index_put(place: Place, name: str, args: tuple[Any, ...]) -> None:
    """Source: the same, and the device check of ``TensorIterator`` for the values."""
    _index(place, name, args)
    there, values = place(args[0]), args[2]
    if place(values) == there or (values.dim() == 0 and place(values) < 0):
        return
    if max(there, place(values)) >= 0:
        raise two_places(max(there, place(values)), min(there, place(values)), name)


def _lengths(place: Place, name: str, args: tuple[Any, ...]) -> None:
    """Source: ``_pack_padded_sequence`` in ``aten/src/ATen/native/PackedSequence.cpp``."""
    lengths = args[1]
    if place(lengths) >= 0:
        raise RuntimeError(
            f"'lengths' argument should be a 1D CPU int64 tensor, but got {lengths.dim()}D "
            f"{name_of(place(lengths))} {lengths.type().rpartition('.')[2].removesuffix('Tensor')} "
            "tensor"
        )


def _stack(place: Place, name: str, args: tuple[Any, ...]) -> None:
    """Numbers too: each becomes a vector that is joined to the others."""
    places = {max(place(tensor), -1) for tensor in args[0]}
    if len(places) > 1:
        raise two_places(max(places), min(places), name)


def _foreach(place: Place, name: str, args: tuple[Any, ...]) -> None:
    """List by list, as the operator without ``foreach`` does: ``can_use_fast_route`` in
    ``aten/src/ATen/native/ForeachUtils.h`` sends tensors in two places there.
    """
    lists = [value for value in args if type(value) in (list, tuple) and _tensors(value)]
    for together in zip(*lists, strict=False):
        places = {max(place(tensor), -1) for tensor in _tensors(together)}
        if len(places) == 1:
            continue
        big = {max(place(tensor), -1) for tensor in _tensors(together) if tensor.dim()}
        if len(big | {place(together[0])}) > 1 or len(places - {-1}) > 1:
            raise two_places(max(places), min(places), name)


def recurrent(place: Place, args: tuple[Any, ...]) -> None:
    """The arguments of ``lstm`` and its kin: states and parameters, after the input, and after the
    sizes of its batches where it is packed. Source: ``check_attributes`` in
    ``aten/src/ATen/native/RNN.cpp``.
    """
    packed = isinstance(args[3], (list, tuple))
    states, parameters = args[2:4] if packed else args[1:3]
    for kind, given in (("hidden", states), ("parameter", parameters)):
        for tensor in (given,) if isinstance(given, torch.Tensor) else given:
            if place(tensor) != place(args[0]):
                raise RuntimeError(
                    f"Input and {kind} tensors are not at the same device, found input tensor at "
                    f"{name_of(place(args[0]))} and {kind} tensor at {name_of(place(tensor))}"
                )


_REFUSALS: Final[dict[str, Callable[[Place, str, tuple[Any, ...]], None]]] = {
    "index": _index,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "_pack_padded_sequence": _lengths,
    "stack": _stack,
}


def refusal(name: str) -> Callable[[Place, str, tuple[Any, ...]], None] | None:
    """The check of one operator, None for most."""
    if name.startswith("_foreach_") and not name.startswith("_foreach_copy"):
        return _foreach
    return _REFUSALS.get(name)
