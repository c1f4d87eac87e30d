"""How CUDA launches a reduction, and the buffers it takes for it.

A reduction with few outputs and many inputs is split over several blocks per output. Their
partial results meet in a buffer of global memory, guarded by semaphores. Source:
``setReduceConfig``, ``ReduceConfig`` and ``gpu_reduce_kernel`` in
``aten/src/ATen/native/cuda/Reduce.cuh``; the order of
dimensions: ``reorder_dimensions`` and ``coalesce_dimensions`` in ``TensorIterator.cpp``; what is
too large for one launch: ``can_use_32bit_indexing`` and ``SplitUntil32Bit``, there, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

_MAX_THREADS: Final = 512  # mnt_wrapper::MAX_NUM_THREADS
_MAX_THREADS_WIDE: Final = 256  # the same for complex double, 16 bytes
_WARP: Final = 32
_MIN_VALUES: Final = 16  # min_values_per_thread
_MAX_VALUES: Final = 256  # max_values_per_thread
_INDEXED: Final = 2**31 - 1  # bytes from the first element to the last, and numbers of elements
_VECTOR_FROM: Final = 128  # inputs of an output from which loads are vectorised


class Reduction(NamedTuple):
    """A tensor of ``shape`` and ``strides`` (elements) reduced over ``dims``.

    ``item``: bytes of an element of the input. ``accumulator``: bytes of a partial result.
    ``input_vector``: elements that a thread loads at once (``vt0`` of the kernel).
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dims: tuple[int, ...]
    item: int
    accumulator: int
    input_vector: int = 4


class _Axis(NamedTuple):
    """``out`` is 0 where the axis is reduced."""

    size: int
    out: int
    inside: int


def _last_pow2(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)


def _up(value: int, to: int) -> int:
    return -(-value // to)


def _order(first: _Axis, second: _Axis) -> int:
    """1 if ``second`` belongs before ``first``, -1 if not, 0 if nothing says so."""
    if (first.out == 0) != (second.out == 0):
        return 1 if second.out == 0 else -1
    for one, other in ((first.out, second.out), (first.inside, second.inside)):
        if one == 0 or other == 0:
            continue
        if one != other:
            return 1 if one > other else -1
        if first.size > second.size:
            return 1
    return 0


def _axes(reduction: Reduction) -> list[_Axis]:
    """Reduced axes first, each kind from the smallest stride, neighbours joined."""
    axes: list[_Axis] = []
    out = 1
    for at in reversed(range(len(reduction.shape))):
        reduced = at in reduction.dims
        axes.append(_Axis(reduction.shape[at], 0 if reduced else out, reduction.strides[at]))
        out *= 1 if reduced else reduction.shape[at]
    for start in range(1, len(axes)):
        moving = start
        for at in reversed(range(start)):
            order = _order(axes[at], axes[moving])
            if order > 0:
                axes[at], axes[moving] = axes[moving], axes[at]
                moving = at
            elif order < 0:
                break
    joined: list[_Axis] = []
    for axis in axes:
        last = joined[-1] if joined else None
        if last is None:
            joined.append(axis)
        elif axis.size == 1:
            continue
        elif last.size == 1:
            joined[-1] = axis
        elif last.size * last.inside == axis.inside and last.size * last.out == axis.out:
            joined[-1] = _Axis(last.size * axis.size, last.out, last.inside)
        else:
            joined.append(axis)
    return joined


def _output_vector(axes: Sequence[_Axis], reduced: int) -> int:
    """``get_output_vec_size``; the data are taken to be aligned, as the allocator's blocks are."""
    vector = 4
    for at, axis in enumerate(axes):
        number = axis.size if at == reduced else axis.inside
        while number % vector:
            vector //= 2
    return vector


def launches(
    reduction: Reduction, processors: int, threads_per_processor: int
) -> list[tuple[int, int]]:
    """`buffers` of each launch, one after the other: a reduction of more than 2 GiB is halved along
    its longest dimension until 32 bits are enough to index each part.
    """
    found = []
    waiting = [_axes(reduction)]
    while waiting:
        axes = waiting.pop()
        if _indexable(axes, reduction.item):
            found.append(_buffers(axes, reduction, processors, threads_per_processor))
            continue
        longest = max(range(len(axes)), key=lambda at: ((axes[at].size - 1) * axes[at].inside, at))
        half = axes[longest].size // 2
        for size in (axes[longest].size - half, half):
            part = axes[longest]._replace(size=size)
            waiting.append([*axes[:longest], part, *axes[longest + 1 :]])
    return found


def _indexable(axes: list[_Axis], item: int) -> bool:
    """Inputs are no smaller than outputs, so that their offsets decide."""
    count = math.prod(axis.size for axis in axes)
    reach = 1 + sum((axis.size - 1) * axis.inside * item for axis in axes)
    return not count or (count <= _INDEXED and reach <= _INDEXED)


def buffers(reduction: Reduction, processors: int, threads_per_processor: int) -> tuple[int, int]:
    """Bytes of the buffer and of the semaphores; (0, 0) where no output is split.

    ``processors``: streaming multiprocessors of the GPU; ``threads_per_processor``: threads that
    one of them holds at most.
    """
    return _buffers(_axes(reduction), reduction, processors, threads_per_processor)


def _buffers(
    axes: list[_Axis], reduction: Reduction, processors: int, threads_per_processor: int
) -> tuple[int, int]:
    reduced = sum(1 for axis in axes if axis.out == 0)
    inputs = outputs = 1
    for axis in axes:
        if axis.out == 0:
            inputs *= axis.size
        else:
            outputs *= axis.size
    if not inputs * outputs or not reduced:
        return 0, 0
    along_inputs = reduced == len(axes) or axes[0].inside < axes[reduced].inside
    dim0, dim1 = (inputs, outputs) if along_inputs else (outputs, inputs)
    vector = 1
    if (axes[0] if along_inputs else axes[reduced]).inside == 1:
        if not along_inputs:
            vector = _output_vector(axes, reduced)
            dim0 //= vector
        elif dim0 >= _VECTOR_FROM and reduced == 1:
            dim0 //= reduction.input_vector
    most = (_MAX_THREADS_WIDE if reduction.item == 16 else _MAX_THREADS) // vector
    dim0, dim1 = (_last_pow2(dim) if dim < most else most for dim in (dim0, dim1))
    width = min(dim0, _WARP)
    height = min(dim1, most // width)
    width = min(dim0, most // height)

    step_input, step_output = (width, 1) if along_inputs else (1, width)
    if _up(inputs, step_input) < min(height * 16, _MAX_VALUES):
        return 0, 0  # a warp of its own for every output
    step_input *= height
    target = processors * (threads_per_processor // (width * height))
    grid = _up(outputs // vector, step_output)
    per_thread = _up(inputs, step_input)
    if per_thread < _MAX_VALUES or grid > target:
        return 0, 0
    blocks = max(min(_up(target, grid), _up(per_thread, _MIN_VALUES)), _up(per_thread, _MAX_VALUES))
    if blocks <= 1:
        return 0, 0
    size = reduction.accumulator * outputs * blocks
    if not along_inputs:
        size *= width * vector
    return size, 4 * grid
