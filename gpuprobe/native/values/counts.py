"""Operators whose kernels count elements: the size of the result depends on values.

The host reads the count that a kernel wrote. The CPU computes the result first, and the runtime
gives the count where the host reads it, so that the operator itself allocates what it would on a
GPU, temporary memory included. Sizes of the counts: what the operators of CUDA builds read, as
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from gpuprobe.native.values.arguments import Args
from gpuprobe.torch_support.version import installed

_CHUNK: Final = (1 << 31) - 1
"""Elements that ``nonzero_cuda_out_impl`` counts at once."""


_ROWS: Final = 8 if installed() >= (2, 15) else 4
"""Bytes of the count of slices: of ``unique_dim`` and ``unique_consecutive``."""


def _nonzero(given: Args, found: Any) -> Iterator[tuple[int, int]]:
    flat = given[0]
    if flat.numel() <= _CHUNK:
        yield found.size(0), 4
        return
    flat = flat.contiguous().view(-1)
    counts = [int(part.count_nonzero()) for part in flat.split(_CHUNK)]
    for count in counts:
        yield count, 4


def _unique(given: Args, found: Any) -> Iterator[tuple[int, int]]:
    if given[0].dtype is torch.bool:
        yield int(given[0].count_nonzero()), 4
    else:
        yield found[0].size(0), 8


def _unique_dim(given: Args, found: Any) -> Iterator[tuple[int, int]]:
    yield found[0].size(given[1]), _ROWS


def _consecutive(given: Args, found: Any) -> Iterator[tuple[int, int]]:
    dim = given[3] if len(given) > 3 else None
    if dim is None:
        yield found[0].size(0), 8
    else:
        yield found[0].size(dim), _ROWS


def _boxes(given: Args, found: Any) -> Iterator[tuple[int, int]]:
    yield found.size(0), 4  # by the ``masked_select`` that it ends with


def _coalesce(given: Args, found: Any) -> Iterator[tuple[int, int]]:
    yield found._nnz(), 4


COUNTS: Final[dict[str, Callable[[Args, Any], Iterator[tuple[int, int]]]]] = {
    "nonzero": _nonzero,
    "_unique": _unique,
    "_unique2": _unique,
    "unique_dim": _unique_dim,
    "unique_dim_consecutive": _unique_dim,
    "unique_consecutive": _consecutive,
    "_coalesce": _coalesce,
    "nms": _boxes,
}
"""By operator: the numbers that the host reads, with their sizes in bytes, from the operator's
arguments and its results on the CPU."""

COALESCING: Final = frozenset({"mm", "addmm", "_sparse_addmm", "bmm", "mv", "hspmm"})
"""Products that coalesce a sparse operand before they use it (``s_addmm_out_sparse_dense_cuda`` and
others in aten/src/ATen/native/sparse/cuda/SparseCUDATensorMath.cu): the host reads how many of its
indices differ, in four bytes, though the size of the result does not depend on it."""

_DIFFER: Final = "all elements differ"


def _every_element(given: Args) -> Iterator[tuple[int, int]]:
    left = given[0].numel()
    while True:
        yield min(left, _CHUNK), 4
        left -= _CHUNK
        if left <= 0:
            return


def _all_differ(given: Args) -> Iterator[tuple[int, int]]:
    if given[0].dtype is torch.bool:
        yield given[0].numel(), 4  # how many are true
    else:
        yield given[0].numel(), 8


def _rows_differ(given: Args) -> Iterator[tuple[int, int]]:
    yield given[0].size(given[1]), _ROWS


def _in_a_row_differ(given: Args) -> Iterator[tuple[int, int]]:
    dim = given[3] if len(given) > 3 else None
    yield (given[0].numel(), 8) if dim is None else (given[0].size(dim), _ROWS)


def _indices_differ(given: Args) -> Iterator[tuple[int, int]]:
    yield given[0]._nnz(), 4


def _every_box(given: Args) -> Iterator[tuple[int, int]]:
    yield given[0].size(0), 4


LARGEST: Final[dict[str, tuple[str, Callable[[Args], Iterator[tuple[int, int]]]]]] = {
    "nonzero": ("no element is zero", _every_element),
    "_unique": (_DIFFER, _all_differ),
    "_unique2": (_DIFFER, _all_differ),
    "unique_dim": (_DIFFER, _rows_differ),
    "unique_dim_consecutive": (_DIFFER, _rows_differ),
    "unique_consecutive": (_DIFFER, _in_a_row_differ),
    "_coalesce": ("all indices differ", _indices_differ),
    "nms": ("no box is suppressed", _every_box),
}
"""By operator: when its result is the largest possible, and the numbers that the host reads then,
from the operator's arguments."""
