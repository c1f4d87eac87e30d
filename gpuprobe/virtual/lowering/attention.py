"""Scaled dot product attention: which kernel CUDA picks, and what it needs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from gpuprobe.torch_support.version import installed
from gpuprobe.virtual.dispatch.calls import Call, OperatorRow

FLASH, EFFICIENT, CUDNN, MATH = "flash", "efficient", "cudnn", "math"
_HALF: Final = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM: Final = 256


class Attention(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``."""

    query: Any
    key: Any
    value: Any
    mask: Any
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def pick(
    capability: tuple[int, int], call: Attention, version: tuple[int, int] | None = None
) -> str:
    """The kernel that CUDA takes for tensors of shape (batch, heads, sequence, head dim), and
    others, in torch's ``version`` (the installed one). Raises torch's error, after its warnings,
    where the program allows none that could.

    Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``: select_sdp_backend, and
    can_use_flash_attention and its like with their lists of constraints.
    """
    backends = torch.backends.cuda
    cudnn = not_cudnn(capability, call)
    if not cudnn and prefers_cudnn(capability, version or installed()):
        return CUDNN
    flash, efficient = not_flash(capability, call), not_efficient(capability, call)
    if not flash:
        return FLASH
    if not efficient:
        return EFFICIENT
    if backends.math_sdp_enabled():
        return MATH
    if not cudnn:
        return CUDNN
    enabled = (
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
    )
    if not any(enabled):
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")
    for kernel, reason in (
        ("Memory efficient kernel", efficient),
        ("Flash attention kernel", flash),
        ("cuDNN attention kernel", cudnn),
    ):
        warnings.warn(f"{kernel} not used because: {reason}", UserWarning, stacklevel=2)
    raise RuntimeError("No available kernel. Aborting execution.")


def prefers_cudnn(capability: tuple[int, int], version: tuple[int, int]) -> bool:
    """Whether cuDNN's kernel is the first choice: with a cuDNN newer than 9.15.0, as torch has from
    2.11 on. Source: ``check_prefer_cudnn_attention`` in ``sdp_utils.cpp``.
    """
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    return version >= (2, 11) and capability in ((9, 0), (10, 0), (10, 3))


def _not_for_all(call: Attention, enabled: bool, dtypes: Sequence[torch.dtype]) -> str:
    """Why none of the fused kernels can run; "" where they may."""
    tensors = call[:3]
    if not enabled:
        return "it has been runtime disabled."
    if any(tensor.dim() != 4 for tensor in tensors):
        return "it requires query, key and value to be 4 dimensional."
    if len({tensor.dtype for tensor in tensors}) > 1 or call.query.dtype not in dtypes:
        return f"it expects query, key and value of one dtype, one of {list(dtypes)}."
    if not call.query.is_nested and not (call.query.numel() and call.key.numel()):
        return "it does not support zero sequence lengths."
    return ""


def _same_heads(call: Attention) -> bool:
    return call.query.size(1) == call.key.size(1) == call.value.size(1)


def not_flash(capability: tuple[int, int], call: Attention) -> str:
    low = _HALF if capability >= (8, 0) else _HALF[:1]
    if reason := _not_for_all(call, torch.backends.cuda.flash_sdp_enabled(), low):
        return reason
    width = call.query.size(-1)
    if call.mask is not None:
        return "it does not support non-null attn_mask."
    if not width == call.key.size(-1) == call.value.size(-1) or width > _MAX_HEAD_DIM:
        return "it requires q,k,v to have the same last dimension of at most 256."
    if capability < (8, 0):
        return "it only supports gpu architectures from sm80 on."
    if call.is_causal and not call.query.is_nested and call.query.size(-2) != call.key.size(-2):
        return "it does not support the is_causal flag when seqlen_q != seqlen_k."
    if not _same_heads(call) and not call.enable_gqa:
        return "it requires as many heads of the key and the value as of the query."
    return ""


def not_efficient(capability: tuple[int, int], call: Attention) -> str:
    dtypes = (*(_HALF if capability >= (8, 0) else _HALF[:1]), torch.float32)
    if reason := _not_for_all(call, torch.backends.cuda.mem_efficient_sdp_enabled(), dtypes):
        return reason
    width = call.query.size(-1)
    alignment = 8 if call.query.dtype in _HALF else 4
    if width != call.key.size(-1) or width % alignment or call.value.size(-1) % alignment:
        return f"it requires a last dimension of inputs divisible by {alignment}."
    if not _same_heads(call):
        return "it requires as many heads of the key and the value as of the query."
    return ""


def not_cudnn(capability: tuple[int, int], call: Attention) -> str:
    """Why cuDNN's kernel cannot run; "" where it may. Source: ``can_use_cudnn_attention``; that the
    mask must not need a gradient was found with torch 2.13.
    """
    if reason := _not_for_all(call, torch.backends.cuda.cudnn_sdp_enabled(), _HALF):
        return reason
    if not (8, 0) <= capability <= (12, 1):
        return "it only supports gpu architectures from sm80 to sm121."
    if call.query.is_nested:
        return "nested tensors are not enabled."
    if (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        return "it is not deterministic."
    if call.mask is not None and call.mask.requires_grad:
        return "it does not support an attn_mask that needs a gradient."
    if call.dropout_p * 16 % 1:
        return "its dropout probability is a multiple of 1/16."
    widths = call.query.size(-1), call.value.size(-1)
    limit = 256 if capability == (9, 0) else 128
    if capability[0] == 10 and widths == (192, 128):
        limit = 192
    if max(widths) > limit or any(width % 8 for width in widths):
        return f"head_dim should be a multiple of 8 and no more than {limit}."
    if call.key.size(-2) == 1 or (call.query.size(-2) == 1 and call.dropout_p):
        return "it does not support a sequence length of 1."
    if not _same_heads(call) and not call.enable_gqa:
        return "it requires as many heads of the key and the value as of the query."
    return ""


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


def _flash_forward(call: Call) -> None:
    if call.argument("dropout_p"):
        call.passing(16)  # the random state, which is copied


def _flash_contiguous(call: Call) -> None:
    """Source: ``_flash_attention_backward`` in ``attention_backward.cu``."""
    for name in ("grad_out", "out"):
        _contiguous(call, call.argument(name).transpose(1, 2))


def _contiguous(call: Call, tensor: Any) -> None:
    if not tensor.is_contiguous():
        call.scratch(tensor.numel() * tensor.element_size())


def _flash_backward(call: Call) -> None:
    query, key = call.argument("query"), call.argument("key")
    for size in flash_backward_scratch(query):
        call.scratch(size)
    if query.size(1) != key.size(1):  # dk_expanded and dv_expanded, of all heads of the query
        batch, heads, _, dim = query.shape
        for _ in range(2):
            call.scratch(batch * heads * key.size(2) * dim * query.element_size())


class EfficientKernel(NamedTuple):
    """A backward kernel of memory-efficient attention: the tile of rows of the query
    (``queries``) and of the key (``keys``) that a block of threads works on, and whether gradients
    of key and value stay in registers.
    """

    queries: int
    keys: int
    in_registers: bool


def efficient_backward_kernel(
    capability: tuple[int, int], half: bool, width: int, dropout: bool
) -> EfficientKernel:
    """The kernel that CUDA takes for heads of ``width`` elements: the first in torch's list whose
    shared memory the GPU has. Source: ``mem_eff_attention/kernels/cutlassB.h``.
    """
    small = capability[0] in (8, 12) and capability not in ((8, 0), (8, 7))  # 100 KiB a block
    if width <= 64:
        return EfficientKernel(64, 64, half)
    if not half:
        return EfficientKernel(64 if small or capability < (8, 0) else 128, 64, False)
    if width > 128:
        return EfficientKernel(128, 64, False)
    if capability < (8, 0) or (width <= 96 and capability in ((8, 6), (8, 9)) and not dropout):
        return EfficientKernel(128, 64, True)
    return EfficientKernel(64, 64, False) if small else EfficientKernel(128, 128, True)


def efficient_backward_scratch(
    capability: tuple[int, int], query: Any, key: Any, value: Any, dropout: bool
) -> tuple[int, int]:
    """Bytes of ``delta``, and of the workspace: accumulators of dQ in tiles, each with a lock, and
    those of dK and dV of kernels in half precision that cannot keep them in registers. Source:
    ``_efficient_attention_backward`` in
    ``aten/src/ATen/native/transformers/cuda/attention_backward.cu``, and ``workspace_size`` in
    ``mem_eff_attention/kernel_backward.h``.
    """
    batch, heads, length, width = query.shape
    half = query.dtype in _HALF
    kernel = efficient_backward_kernel(capability, half, max(width, value.size(-1)), dropout)
    lock = 4  # in elements of float32, as all that follows
    tiles = -(-length // kernel.queries) * -(-width // kernel.keys)
    elements = tiles * (kernel.queries * kernel.keys + lock)
    if half and not kernel.in_registers:
        splits = min(-(-key.size(2) // kernel.keys), 200 // max(batch * heads, 1))
        if torch.are_deterministic_algorithms_enabled():
            splits = 1
        for wide in (width, value.size(-1)):
            elements += max(splits, 1) * kernel.keys * _up(wide, kernel.queries)
    return batch * heads * length * 4, batch * heads * elements * 4


def _efficient_backward(call: Call) -> None:
    """Of tensors of shape (batch, heads, sequence, head dim)."""
    names = ("query", "key", "value")
    _efficient_backward_kernel(call, *(call.argument(name) for name in names))


def _efficient_backward_of_sequences(call: Call) -> None:
    """Of tensors of shape (batch, sequence, heads, head dim)."""
    names = ("query", "key", "value")
    _efficient_backward_kernel(call, *(call.argument(name).transpose(1, 2) for name in names))


def _efficient_backward_kernel(call: Call, query: Any, key: Any, value: Any) -> None:
    delta, workspace = efficient_backward_scratch(
        call.device.model.capability, query, key, value, bool(call.argument("dropout_p", 0.0))
    )
    batch, heads, length, _ = query.shape
    product = total = 0
    if query.dtype not in _HALF:
        # The kernel does not compute delta: it is (grad_out * out).sum(-1).transpose(-2, -1), made
        # contiguous.
        product = batch * heads * length * value.size(-1) * 4
        total = delta if heads > 1 and length > 1 else 0
    with call.held(product), call.held(total):
        call.scratch(delta)
    call.scratch(workspace)


def _efficient_forward(call: Call) -> None:
    """An accumulator of the result for wide heads in half precision. Source:
    ``kNeedsOutputAccumulatorBuffer`` in ``mem_eff_attention/kernel_forward.h``.
    """
    query, value = call.argument("query"), call.argument("value")
    if query.dtype in _HALF and max(query.size(-1), value.size(-1)) > 128:
        call.passing(query.numel() // query.size(-1) * value.size(-1) * 4)


def _efficient_contiguous(call: Call) -> None:
    _contiguous(call, call.argument("grad_out_").transpose(1, 2))


CUDNN_WORKSPACE: Final = 256
"""Bytes of an engine of cuDNN's attention, measured on an H200, as the native engine counts it."""


def _cudnn_gradient(call: Call) -> None:
    """Source: ``run_cudnn_SDP_bprop`` in ``aten/src/ATen/native/cudnn/MHA.cpp``."""
    gradient = call.argument("grad_out")
    if gradient.stride(-1) != 1:
        call.scratch(gradient.numel() * gradient.element_size())


def _cudnn_backward(call: Call) -> None:
    """The workspace has the sums of rows, and an accumulator of dQ in float32."""
    batch, heads, length, width = call.argument("query").shape
    call.scratch(batch * heads * length * (1 + width) * 4 + CUDNN_WORKSPACE)


ROWS: Final = (
    OperatorRow(
        "_scaled_dot_product_cudnn_attention",
        "a workspace",
        "aten/src/ATen/native/cudnn/MHA.cpp",
        after=lambda call: call.passing(CUDNN_WORKSPACE),
    ),
    OperatorRow(
        "_scaled_dot_product_cudnn_attention_backward",
        "a workspace with sums of rows and an accumulator of dQ",
        "aten/src/ATen/native/cudnn/MHA.cpp; torch 2.13 on the native engine",
        before=_cudnn_gradient,
        after=_cudnn_backward,
    ),
    OperatorRow(
        "_scaled_dot_product_flash_attention",
        "a second random state with dropout",
        "torch 2.13 on the native engine",
        after=_flash_forward,
    ),
    OperatorRow(
        "_scaled_dot_product_flash_attention_backward",
        "a contiguous gradient and result; softmax_d and the float accumulator of dQ",
        "aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: mha_bwd",
        before=_flash_contiguous,
        after=_flash_backward,
    ),
    *(
        OperatorRow(
            name,
            "an accumulator of the result for wide heads in half precision",
            "aten/src/ATen/native/transformers/cuda/attention.cu: _efficient_attention_forward",
            after=_efficient_forward,
        )
        for name in ("_scaled_dot_product_efficient_attention", "_efficient_attention_forward")
    ),
    OperatorRow(
        "_scaled_dot_product_efficient_attention_backward",
        "a contiguous gradient; delta, in float32 with the product that it is the sum of; "
        "accumulators of dQ, in half precision of dK and dV too",
        "aten/src/ATen/native/transformers/cuda/attention_backward.cu",
        before=_efficient_contiguous,
        after=_efficient_backward,
    ),
    OperatorRow(
        "_efficient_attention_backward",
        "the same",
        "aten/src/ATen/native/transformers/cuda/attention_backward.cu",
        before=lambda call: call.contiguous("grad_out_"),
        after=_efficient_backward_of_sequences,
    ),
)
