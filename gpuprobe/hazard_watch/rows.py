"""The rows of a tensor that an operator with an index touches, if the index's values are known.

Inference servers keep the caches of many requests in one tensor, and write the slots of some while
others are read. If the whole tensor counted as touched, each such pair would be a race.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from gpuprobe.hazard_watch.device import Cuda
from gpuprobe.hazards.footprint import Footprint, of_tensor

_MOST: Final = 4096
"""Positions that are checked; with more, the whole tensor counts as touched."""
_MOST_PIECES: Final = 256

# The argument with the index: a list with one for each dimension; the third argument, for the
# dimension in the second; or the second argument, for the first dimension.
_LIST, _BY_DIMENSION, _FIRST = "list", "dimension", "first"
_INDEXED: Final = {
    "index": _LIST,
    "index_put_": _LIST,
    "_index_put_impl_": _LIST,
    "index_select": _BY_DIMENSION,
    "index_copy_": _BY_DIMENSION,
    "index_add_": _BY_DIMENSION,
    "index_fill_": _BY_DIMENSION,
    "embedding": _FIRST,
}


def is_indexed(op: str) -> bool:
    """Whether an operator touches only the rows of its first argument that an index selects."""
    return op in _INDEXED


def pieces(machine: Cuda, op: str, args: Sequence[Any], whole: Footprint) -> list[Footprint] | None:
    """The touched parts of the first argument, whose bytes are ``whole``; None: possibly all."""
    tensor = args[0]
    indices = _indices(op, args)
    if not indices:
        return None
    known: dict[int, list[int]] = {}
    for dimension, index in indices.items():
        values = None
        if index.dtype in (torch.int64, torch.int32) and index.numel() <= _MOST:
            values = machine.known_integers(index)
        if values is None:
            return None
        known[dimension] = values
    count = max(map(len, known.values()))
    if count == 0:
        return []
    offsets = [0] * count
    sizes, strides = tensor.size(), tensor.stride()
    for dimension, values in known.items():
        if len(values) not in (1, count):
            return None  # broadcast: each index with each other
        for at in range(count):
            value = values[at if len(values) > 1 else 0]
            offsets[at] += (value % max(1, sizes[dimension])) * strides[dimension]
    rest = [at for at in range(tensor.dim()) if at not in known]
    return _pieces(
        sorted(set(offsets)),
        [sizes[at] for at in rest],
        [strides[at] for at in rest],
        whole.low,
        tensor.element_size(),
    )


def _indices(op: str, args: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Index tensors by the dimension that they index; none if it is unknown."""
    how = _INDEXED[op]
    if how == _LIST:
        found = {at: index for at, index in enumerate(args[1]) if index is not None}
    elif how == _BY_DIMENSION:
        found = {args[1] % max(1, args[0].dim()): args[2]}
    else:
        found = {0: args[1]}
    return found if all(isinstance(index, torch.Tensor) for index in found.values()) else {}


def _pieces(
    offsets: list[int], sizes: list[int], strides: list[int], low: int, item: int
) -> list[Footprint] | None:
    """One footprint for each evenly spaced series of positions."""
    found = []
    at = 0
    while at < len(offsets):
        end, step = at + 1, 0
        if end < len(offsets):
            step = offsets[end] - offsets[at]
            while end < len(offsets) and offsets[end] - offsets[end - 1] == step:
                end += 1
        where = of_tensor(low + offsets[at] * item, [end - at, *sizes], [step, *strides], item)
        if where is not None:
            found.append(where)
        if len(found) > _MOST_PIECES:
            return None
        at = end
    return found
