"""Indexing and embeddings: indices that are moved, made from masks, or sorted."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from gpuprobe.virtual.dispatch.calls import Call, OperatorRow
from gpuprobe.virtual.lowering.accumulate import into_first
from gpuprobe.virtual.lowering.sorting import radix_sort_bytes

_FEW_INDICES: Final = 3072  # up to which embedding_dense_backward_cuda does not sort
_ROWS_PER_THREAD: Final = 10  # NROWS_PER_THREAD
_INT64: Final = 8
_MASKS: Final = (torch.bool, torch.uint8)


def _sort(call: Call, count: int, highest: int, item: int) -> None:
    """Positions before sorting and what the sort takes; both gone when it is done."""
    with call.held(max(1, count * item)):  # range
        call.passing(radix_sort_bytes(count, max(1, highest.bit_length()), item, item))


def _embedding_sorted(call: Call) -> bool:
    few = call.argument("indices").numel() <= _FEW_INDICES
    return not few or bool(call.argument("scale_grad_by_freq", False))


def _embedding_before(call: Call) -> None:
    gradient, indices = call.argument("grad_output"), call.argument("indices")
    if not gradient.is_contiguous():
        call.scratch(gradient.numel() * gradient.element_size())
    if _embedding_sorted(call):
        _indices_sorted(call, indices)


def _indices_sorted(call: Call, indices: torch.Tensor) -> None:
    size = indices.numel() * indices.element_size()
    call.scratch(size)  # sorted_indices
    call.scratch(size)  # orig_indices
    _sort(call, indices.numel(), call.argument("num_weights"), indices.element_size())
    if call.argument("scale_grad_by_freq", False):
        call.scratch(size)  # count


def _embedding_after(call: Call) -> None:
    if _embedding_sorted(call):
        _sums_of_runs(call)


def _bag_is_sorted(call: Call) -> bool:
    sparse = bool(call.argument("sparse", False))
    return call.argument("indices").numel() > 0 and call.argument("mode") != _LARGEST and not sparse


def _bag_before(call: Call) -> None:
    call.contiguous("grad", "indices")
    if _bag_is_sorted(call):
        _indices_sorted(call, call.argument("indices"))


def _bag_after(call: Call) -> None:
    if _bag_is_sorted(call):
        _sums_of_runs(call)


_LARGEST: Final = 2  # EmbeddingBagMode::MAX


def _sums_of_runs(call: Call) -> None:
    """Segments of equal indices, split into runs of ten rows, and the sum of every run."""
    indices, result = call.argument("indices"), call.result
    count, item = indices.numel(), indices.element_size()
    segments = min(count, result.shape[0])
    partial = count // _ROWS_PER_THREAD + segments
    for nbytes in (
        count * item,  # segment_offsets
        _INT64,  # num_of_segments
        segments * item,  # partials_per_segment
        segments * item,  # partials_per_segment_offset
        _INT64,  # num_of_partial_segments
        partial * item,  # partial_segment_offset
        partial * result.shape[1] * max(4, result.element_size()),  # grad_weight_per_segment
    ):
        call.scratch(nbytes)


def _given(call: Call) -> list[torch.Tensor]:
    return [item for item in call.argument("indices") if isinstance(item, torch.Tensor)]


def _on_host(call: Call, tensor: torch.Tensor) -> bool:
    return call.machine.place_of(tensor) < 0


def _index_before(call: Call) -> None:
    """Indices on the host are copied to the device."""
    for index in _given(call):
        if _on_host(call, index) and index.dtype not in _MASKS:
            call.scratch(index.numel() * index.element_size())


def _index_after(call: Call) -> None:
    """A mask becomes the positions where it is true, a column for each of its dimensions."""
    masks = [index for index in _given(call) if index.dtype in _MASKS]
    source = call.argument("self")
    if len(masks) == 1 and len(_given(call)) == 1 and source.numel():
        count = call.result.numel() * masks[0].numel() // source.numel()
        call.scratch(count * masks[0].dim() * _INT64)


def _masked_select(call: Call) -> None:
    rank = max(call.argument("self").dim(), call.argument("mask").dim())
    call.scratch(call.result.numel() * rank * _INT64)


def _index_put(call: Call) -> None:
    """Accumulating: the linear index is computed, and sorted with its positions."""
    if not call.argument("accumulate", False):
        return
    target, values = call.argument("self"), call.argument("values")
    places: list[Any] = list(call.argument("indices"))
    used = [at for at, index in enumerate(places) if isinstance(index, torch.Tensor)]
    if not used or any(places[at].dtype in _MASKS for at in used):
        return
    shape = torch.broadcast_shapes(*(places[at].shape for at in used))
    count = math.prod(shape)
    if not count:
        return
    size = count * _INT64
    for number, at in enumerate(used):
        if number == 0 and _on_host(call, places[at]):
            call.scratch(size)  # computed on the host, then copied
            continue
        # remainder, then its product with the stride. The first product is the linear index,
        # which stays; the others are added to it.
        with call.held(size):
            if number == 0:
                call.scratch(size)
            else:
                call.passing(size)
    if values.numel() == 1 or not values.is_contiguous():
        rest = [target.shape[at] for at in range(target.dim()) if at not in used]
        call.scratch(count * math.prod(rest) * target.element_size())  # expandedValue
    indexed = math.prod(target.shape[at] for at in used)
    call.scratch(size)  # sorted_indices
    call.scratch(size)  # orig_indices
    call.scratch(size)  # range
    call.passing(radix_sort_bytes(count, max(1, indexed.bit_length()), _INT64, _INT64))


def _masked_scatter(call: Call) -> None:
    """A 64-bit count for each element; the mask and what comes in, if they are not contiguous."""
    target, mask, source = call.args[:3]
    count = target.numel()
    if not count:
        return
    call.scratch(count * _INT64)
    if mask.shape != target.shape or not mask.is_contiguous():
        call.scratch(count)
    if not source.is_contiguous():
        call.scratch(source.numel() * source.element_size())


_MASKED_SCATTER: Final = (
    "how many elements of the mask come before each, as int64; a mask that is expanded is copied "
    "(and what cub's sum takes, about a thousandth of that, is left out)"
)

ROWS: Final = (
    OperatorRow(
        "embedding_dense_backward",
        "more than 3072 indices: sorted with their positions, and the sums of runs of ten rows",
        "aten/src/ATen/native/cuda/Embedding.cu: embedding_dense_backward_cuda, "
        "EmbeddingBackwardKernel.cu: embedding_backward_cuda_kernel",
        before=_embedding_before,
        after=_embedding_after,
    ),
    *(
        OperatorRow(
            name,
            "of sums and means: indices sorted with their positions, and the sums of runs of ten "
            "rows",
            "aten/src/ATen/native/cuda/EmbeddingBag.cu: embedding_bag_backward_cuda_sum_avg, "
            "EmbeddingBackwardKernel.cu: embedding_backward_cuda_kernel",
            before=_bag_before,
            after=_bag_after,
        )
        for name in ("_embedding_bag_backward", "_embedding_bag_dense_backward")
    ),
    OperatorRow(
        "index.Tensor",
        "indices on the host are copied; a mask becomes int64 positions",
        "aten/src/ATen/native/TensorAdvancedIndexing.cpp: make_info; IndexingUtils.h: "
        "expandTensors",
        before=_index_before,
        after=_index_after,
    ),
    OperatorRow(
        "masked_select",
        "the mask becomes int64 positions",
        "aten/src/ATen/native/cuda/IndexKernel.cpp: masked_select_out_cuda_impl",
        after=_masked_select,
    ),
    OperatorRow(
        "masked_scatter_",
        _MASKED_SCATTER,
        "aten/src/ATen/native/cuda/IndexKernel.cpp: masked_scatter__cuda; IndexKernel.cu: "
        "launch_masked_scatter_kernel",
        after=_masked_scatter,
    ),
    OperatorRow(
        "masked_scatter",
        f"as masked_scatter_; in the backward pass into the zeros that were just made: "
        f"{_MASKED_SCATTER}",
        "torch/csrc/autograd/FunctionsManual.cpp: areAnyTensorSubclassLike; "
        "aten/src/ATen/native/cuda/IndexKernel.cpp: masked_scatter__cuda",
        after=_masked_scatter,
        reuse=into_first,
    ),
    *(
        OperatorRow(
            name,
            "accumulate=True: linear index, sorted indices, positions twice, as int64; values that "
            "are not contiguous are copied",
            "aten/src/ATen/native/cuda/Indexing.cu: index_put_with_sort_kernel",
            before=_index_put,
        )
        for name in ("index_put_", "_index_put_impl_")
    ),
    *(
        OperatorRow(
            name,
            "as index_put_; in the backward pass into the zeros that were just made",
            "torch/csrc/autograd/FunctionsManual.cpp: index_backward",
            before=_index_put,
            reuse=into_first,
        )
        for name in ("index_put", "_unsafe_index_put")
    ),
)
