"""Norms of many tensors, as ``clip_grad_norm_`` and gradient scaling take them."""

from __future__ import annotations

from typing import Final

import torch

from gpuprobe.virtual.calls import Call, Row

__all__ = ["ROWS"]

_CHUNK: Final = 65536  # elements, kChunkSize in MultiTensorApply.cuh


def _foreach_norm(call: Call) -> None:
    """Partial norms: one for each chunk of each tensor."""
    tensors = call.args[0]
    floating = [tensor for tensor in tensors if tensor.dtype.is_floating_point]
    if not floating or len({tensor.dtype for tensor in floating}) > 1:
        return
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in floating)
    item = 8 if floating[0].dtype is torch.float64 else 4
    call.scratch(len(floating) * chunks * item)


ROWS: Final = (
    Row(
        "_foreach_norm",
        "a partial norm for every chunk of 65,536 elements of every tensor",
        "aten/src/ATen/native/cuda/ForeachReduceOp.cu: foreach_tensor_norm_cuda",
        before=_foreach_norm,
    ),
)
