"""Sorts and draws: what they take besides their inputs and outputs.

Source of `radix_sort_bytes`: ``dispatch_radix_sort.cuh`` (``InvokeOnesweep``,
``InvokeSingleTile``) and the policies of ``tuning_radix_sort.cuh`` for compute capability 8.0,
scaled to 8-byte keys; the sizes of a tile differ a little between architectures, the copies of
keys and values do not.
"""

from __future__ import annotations

from typing import Final

import torch

from gpuprobe.virtual.dispatch.calls import Call, OperatorRow

_SINGLE_TILE: Final = 256 * 19  # threads, keys of 4 bytes that each holds
_ONESWEEP_TILE: Final = 384 * 21
_DIGITS: Final = 256  # 8 bits a pass
_ALIGN: Final = 256  # alias_temporaries


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def radix_sort_bytes(count: int, bits: int, key: int, value: int) -> int:
    """Bytes of temporary storage for ``count`` pairs, whose keys differ in their lowest ``bits``.

    ``key``, ``value``: bytes of one of them. At least 1, as cub asks for.
    """
    widest = max(key, value, 4)
    if count <= _SINGLE_TILE * 4 // widest:
        return 1
    passes = max(1, -(-bits // 8))
    blocks = -(-count // (_ONESWEEP_TILE * 4 // widest))
    sizes = [passes * _DIGITS * 4, blocks * _DIGITS * 4, passes * 4]
    if passes > 1:
        sizes += [count * key, count * value]
    return sum(map(_aligned, sizes)) + _ALIGN - 1


def segmented_sort_bytes(count: int, key: int, value: int) -> int:
    """The same of ``DispatchSegmentedRadixSort`` in ``dispatch_radix_sort.cuh``: a copy of both."""
    return _aligned(count * key) + _aligned(count * value) + _ALIGN - 1


_SMALL_SORT: Final = 4096  # should_use_small_sort in Sort.h
_ONE_BY_ONE: Final = 1_000_000  # segments that are sorted one by one from this length on
_FULL_SORT: Final = 128  # segments, below which they are sorted together, then apart again
_INT64: Final = 8


def _sort(call: Call) -> None:
    """``sort_cuda_kernel`` and ``launch_stable_sort_kernel``."""
    tensor = call.args[0]
    rank, count = tensor.dim(), tensor.numel()
    dim = call.argument("dim", -1) % rank if rank else 0
    length = tensor.shape[dim] if rank else 1
    if not count or length <= _SMALL_SORT:
        return
    item = tensor.element_size()
    values, indices = call.result
    strides = tensor.stride()
    if tensor.stride(dim) != 1 or not _dense(tensor):
        call.scratch(count * item)  # the dimension in the last place
        strides = _last(tuple(tensor.shape), dim)
    if values.stride() != strides:
        call.scratch(count * item)
    if indices.stride() != strides:
        call.scratch(count * _INT64)
    segments = count // length
    if segments == 1 or length >= _ONE_BY_ONE:
        call.scratch(length * _INT64)
        call.passing(radix_sort_bytes(length, 8 * item, item, _INT64))
    elif segments < _FULL_SORT:
        call.scratch(count * _INT64)
        call.scratch(count * _INT64)
        with call.held(count * item):  # keys
            call.passing(radix_sort_bytes(count, 8 * item, item, _INT64))
        bits = max(1, (segments - 1).bit_length())
        call.passing(radix_sort_bytes(count, bits, _INT64, 0))
    else:
        call.scratch(count * _INT64)
        call.passing(segmented_sort_bytes(count, item, _INT64))


def _dense(tensor: torch.Tensor) -> bool:
    """Whether a permutation of the dimensions makes it contiguous."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _last(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Dense strides with ``dim`` innermost: ``infer_dense_strides_dim_last``."""
    order = [at for at in range(len(shape)) if at != dim] + [dim]
    strides = [1] * len(shape)
    step = 1
    for at in reversed(order):
        strides[at] = step
        step *= shape[at]
    return tuple(strides)


def _multinomial(call: Call) -> None:
    """Without replacement, or one draw: the largest of quotients by exponential numbers. With
    replacement: a copy, its rows made to sum to one, and their running sums.
    """
    weights = call.argument("self")
    size = weights.numel() * weights.element_size()
    several = call.argument("replacement", False) and call.argument("num_samples") > 1
    for _ in range(3 if several else 1):
        call.scratch(size)


ROWS: Final = (
    *(
        OperatorRow(
            name,
            "more than 4096 in a row: positions before sorting, copies that cub sorts between",
            "aten/src/ATen/native/cuda/Sort.cpp: sort_cuda_kernel; SortStable.cu: "
            "launch_stable_sort_kernel",
            after=_sort,
        )
        for name in ("sort", "sort.stable")
    ),
    OperatorRow(
        "multinomial",
        "quotients of the weights, or normalised weights and their running sums",
        "aten/src/ATen/native/Distributions.cpp: multinomial_out; cuda/MultinomialKernel.cu",
        before=_multinomial,
    ),
)
