"""Scaled dot product attention: which kernel CUDA picks, and what it needs."""

from __future__ import annotations

from typing import Any, Final

import torch

from gpuprobe.virtual.calls import Call, Row

__all__ = ["EFFICIENT", "FLASH", "MATH", "ROWS", "laid_out", "pick"]

FLASH, EFFICIENT, MATH = "flash", "efficient", "math"
_HALF: Final = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM: Final = 256


def laid_out(kernel: str, like: Any, values: Any) -> Any:
    """The values in memory as the kernel leaves them: what follows copies them, or need not.

    ``like`` is the query, or what the values are the gradient of. Flash attention keeps its order
    of dimensions (``empty_like``), the memory-efficient kernel makes (batch, sequence, heads, head
    dim). Sources: ``mha_fwd`` and ``mha_bwd`` in
    ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``;
    ``_efficient_attention_forward`` in ``attention.cu``, ``_efficient_attention_backward`` in
    ``attention_backward.cu``.
    """
    if kernel == FLASH and like.shape == values.shape:
        made = torch.ops.aten.empty_like.default(like)
    else:
        batch, heads, length, width = values.shape
        made = values.new_empty((batch, length, heads, width)).transpose(1, 2)
    return made.copy_(values)


def pick(
    capability: tuple[int, int],
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    *,
    enable_gqa: bool,
) -> str:
    """The kernel that ``scaled_dot_product_attention`` takes for tensors of shape (batch,
    heads, sequence, head dim), and others.

    Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``: use_flash_attention and
    use_mem_efficient_attention with their lists of constraints. cuDNN's kernel, which newer
    versions prefer on Hopper and Blackwell, saves what flash saves and is counted as it.
    """
    if query.dim() != 4 or not query.numel() or not key.numel():
        return MATH
    head_dims = (query.size(-1), key.size(-1), value.size(-1))
    same_heads = query.size(1) == key.size(1) == value.size(1)
    backends = torch.backends.cuda
    if (
        backends.flash_sdp_enabled()
        and capability >= (8, 0)
        and query.dtype in _HALF
        and query.dtype == key.dtype == value.dtype
        and mask is None
        and len(set(head_dims)) == 1
        and head_dims[0] <= _MAX_HEAD_DIM
        and (same_heads or enable_gqa)
    ):
        return FLASH
    alignment = 8 if query.dtype in _HALF else 4
    if (
        backends.mem_efficient_sdp_enabled()
        and capability >= (5, 0)
        and query.dtype in (*_HALF, torch.float32)
        and (query.dtype is not torch.bfloat16 or capability >= (8, 0))
        and query.dtype == key.dtype == value.dtype
        and same_heads
        and head_dims[0] == head_dims[1]
        and all(dim % alignment == 0 for dim in head_dims)
        and not (mask is not None and mask.requires_grad)
    ):
        return EFFICIENT
    return MATH


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


def flash_backward_scratch(query: Any) -> tuple[int, int]:
    """Bytes of ``softmax_d`` and ``dq_accum``. Source: ``mha_bwd`` in
    ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``.
    """
    batch, heads, length, dim = query.shape
    rows = _up(length, 128)
    dim = _up(dim, 32) if dim <= 128 else _up(dim, 64)
    return batch * heads * rows * 4, batch * rows * heads * dim * 4


def _flash_backward(call: Call) -> None:
    for size in flash_backward_scratch(call.argument("query")):
        call.scratch(size)


def efficient_backward_scratch(query: Any, key: Any) -> tuple[int, ...]:
    """Bytes of ``delta``, and of the float accumulators that half precision needs. Source:
    ``_efficient_attention_backward`` in
    ``aten/src/ATen/native/transformers/cuda/attention_backward.cu``.
    """
    batch, heads, length, dim = query.shape
    delta = batch * heads * _up(length, 32) * 4
    if query.dtype is torch.float32:
        return (delta,)
    return (delta, batch * heads * length * dim * 4)


def _efficient_backward(call: Call) -> None:
    query, key = call.argument("query"), call.argument("key")
    for size in efficient_backward_scratch(query, key):
        call.scratch(size)


ROWS: Final = (
    Row(
        "_scaled_dot_product_flash_attention_backward",
        "softmax_d and the float accumulator of dQ",
        "aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: mha_bwd",
        after=_flash_backward,
    ),
    Row(
        "_scaled_dot_product_efficient_attention_backward",
        "delta, and an accumulator of dQ in half precision",
        "aten/src/ATen/native/transformers/cuda/attention_backward.cu",
        after=_efficient_backward,
    ),
)
