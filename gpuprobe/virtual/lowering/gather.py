"""Indexing, embeddings and sorting: the buffers that their kernels need."""

from __future__ import annotations

from typing import Final

import torch

from gpuprobe.virtual.calls import Call, Row

__all__ = ["ROWS"]

_FEW_INDICES: Final = 3072
_INT64: Final = 8


def _embedding(call: Call) -> None:
    """Few indices: one kernel. Many: they are sorted, with their positions."""
    indices = call.argument("indices")
    count = indices.numel()
    if count <= _FEW_INDICES and not call.argument("scale_grad_by_freq", False):
        return
    size = count * indices.element_size()
    call.scratch(size)  # sorted_indices
    call.scratch(size)  # orig_indices
    call.scratch(size)  # range, the positions before sorting


def _index_put(call: Call) -> None:
    """Accumulating: the linear index, sorted, with its positions."""
    if not call.argument("accumulate", False):
        return
    indices = [item for item in call.argument("indices") if isinstance(item, torch.Tensor)]
    if not indices:
        return
    count = max(item.numel() for item in indices)
    for _ in range(4):  # linearIndex, sorted_indices, range, orig_indices
        call.scratch(count * _INT64)


ROWS: Final = (
    Row(
        "embedding_dense_backward",
        "more than 3072 indices: sorted indices, their positions and the positions before",
        "aten/src/ATen/native/cuda/Embedding.cu: embedding_dense_backward_cuda",
        before=_embedding,
    ),
    *(
        Row(
            name,
            "accumulate=True: linear index, sorted indices, positions twice, as int64",
            "aten/src/ATen/native/cuda/Indexing.cu: index_put_with_sort_kernel",
            after=_index_put,
        )
        for name in ("index_put_", "_index_put_impl_")
    ),
)
