"""Composite functions that CUDA runs as one kernel: their kernels on the device key.

With values the result is computed by the CPU's own path, out of the virtual machine's sight, so
that it is what a CPU run gives; what is allocated and saved is CUDA's. Without values torch's
meta kernels of the CUDA operators are called.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gpuprobe.patching import Patches
from gpuprobe.virtual.dispatch.refusals import two_places
from gpuprobe.virtual.generators import drawn
from gpuprobe.virtual.lowering import attention
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.reads.known import is_known, values_of
from gpuprobe.virtual.torch_patches.keys import DEVICE, Kernels, below, transformed
from gpuprobe.virtual.unknown import refuse

_aten = torch.ops.aten
APART = (
    "dropout and recurrent networks within torch.func are counted as the operators "
    "that they are made of"
)


def install(machine: Machine, kernels: Kernels, patches: Patches) -> None:
    kernels.add("dropout", _dropout(machine), DEVICE)
    kernels.add("scaled_dot_product_attention", _attention(machine), DEVICE)
    kernels.add("one_hot", _one_hot(machine), DEVICE)
    for name in ("ctc_loss.IntList", "ctc_loss.Tensor"):
        kernels.add(name, _ctc_loss(machine), DEVICE)
    for name in _aten.linalg_matrix_rank.overloads():
        if "out" not in name:
            kernel = _matrix_rank(machine, getattr(_aten.linalg_matrix_rank, name))
            full = "linalg_matrix_rank" + ("" if name == "default" else f".{name}")
            kernels.add(full, kernel, DEVICE)
    kernels.add("tensor_split.tensor_indices_or_sections", _tensor_split(machine), DEVICE)
    _choices(machine, patches)


def place_of(machine: Machine, tensor: Any) -> int:
    """`Machine.place_of`, of tensors that wrap others too (DTensor, jagged ones)."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return machine.place_of(tensor)
    device = tensor.device
    return device.index or 0 if device.type == "cuda" else machine.place_of(tensor)


@contextmanager
def uncharged(machine: Machine) -> Iterator[None]:
    """Operators within are not charged to the device."""
    local = machine.local
    before, local.paused = local.paused, True
    try:
        with below():
            yield
    finally:
        local.paused = before


def charge(machine: Machine, place: int, *tensors: Any) -> None:
    """Put tensors that were made out of sight on the device."""
    for tensor in tensors:
        machine.track(tensor.untyped_storage(), place)


def notify_kernel(machine: Machine, place: int, name: str, reads: Any, writes: Any) -> None:
    """Report a kernel that did its work out of sight."""
    machine.queued(place)
    if machine.observer is not None:
        machine.observer.fused(name, place, reads, writes)


def _one_hot(machine: Machine) -> Callable[..., Any]:
    """``one_hot`` of ``aten/src/ATen/native/Onehot.cpp``: on CUDA the host does not look at the
    values, but to find out how many classes there are.
    """

    def one_hot(tensor: Any, num_classes: int = -1) -> Any:
        unknown = num_classes < 1
        if (
            machine.place_of(tensor) < 0
            or tensor.dtype != torch.long
            or not tensor.numel()
            or (unknown and num_classes != -1)
            or transformed()
        ):
            with below():
                return _aten.one_hot.default(tensor, num_classes)
        if unknown:
            num_classes = int(tensor.max().item()) + 1
        found = tensor.new_zeros((*tensor.shape, num_classes))
        return found.scatter_(-1, tensor.unsqueeze(-1), 1)

    return one_hot


def _matrix_rank(machine: Machine, operator: Any) -> Callable[..., Any]:
    """``linalg_matrix_rank`` of no matrices: its C++ code in ``BatchLinearAlgebra.cpp`` makes the
    result "like the matrices", which is host memory here.
    """

    def matrix_rank(given: Any, *args: Any, **kwargs: Any) -> Any:
        if not given.numel() and given.dim() > 1 and machine.place_of(given) >= 0:
            return given.new_zeros(given.shape[:-2], dtype=torch.long)
        return operator.decompose(given, *args, **kwargs)

    return matrix_rank


def _tensor_split(machine: Machine) -> Callable[..., Any]:
    """``tensor_split`` in ``TensorShape.cpp``: it reads where to split from host memory."""

    def tensor_split(given: Any, where: Any, dim: int = 0) -> Any:
        place = machine.place_of(where)
        if place >= 0:
            raise RuntimeError(
                "tensor_split expected tensor_indices_or_sections to be on cpu, but it's on "
                f"cuda:{place}"
            )
        if not is_known(machine, where):
            raise refuse("where to split a tensor")
        with below():
            at = values_of(machine, where)
            return _aten.tensor_split.tensor_indices_or_sections(given, at, dim)

    return tensor_split


# -- connectionist temporal classification


def _ctc_loss(machine: Machine) -> Callable[..., Any]:
    """The composite of ``aten/src/ATen/native/LossCTC.cpp``, in Python: its C++ makes the tensor
    of lengths "like the loss", which is host memory here.
    """

    def ctc_loss(
        log_probs: Any,
        targets: Any,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: int = 1,
        zero_infinity: bool = False,
    ) -> Any:
        inputs, lengths = (
            value.tolist() if isinstance(value, torch.Tensor) else list(value)
            for value in (input_lengths, target_lengths)
        )
        loss = torch._ctc_loss(log_probs, targets, inputs, lengths, blank, zero_infinity)[0]
        if zero_infinity:
            loss = torch.where(loss == float("inf"), 0.0, loss)
        if reduction == 1:
            divisor = torch.tensor(lengths, dtype=loss.dtype, device=loss.device)
            return (loss / divisor.clamp_min(1)).mean()
        return loss.sum() if reduction == 2 else loss

    return ctc_loss


# -- dropout


def _dropout(machine: Machine) -> Callable[..., Any]:
    """``native_dropout``: a mask of bytes. Source: ``is_fused_kernel_acceptable`` in
    ``aten/src/ATen/native/Dropout.cpp``.
    """

    def dropout(tensor: Any, p: float, train: bool) -> Any:
        place = place_of(machine, tensor)
        if place < 0 or not train or not 0.0 < p < 1.0 or not tensor.numel():
            with below():
                return _aten.dropout.default(tensor, p, train)
        if machine.valueless or is_traceable_wrapper_subclass(tensor):
            with below():
                return _aten.native_dropout.default(tensor, p, True)[0]
        if transformed():  # parts that a transform knows
            machine.assume(APART)
            with below():
                return _aten.dropout.default(tensor, p, train)
        return _Dropout.apply(tensor, p, machine, place)

    return dropout


class _Dropout(torch.autograd.Function):
    """The CPU's dropout (the same random numbers and rounding), saved as CUDA saves it."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, p: float, machine: Machine, place: int) -> Any:
        generators = machine.generators
        with uncharged(machine), generators.draw(place, ()):
            mask = torch.empty_like(tensor).bernoulli_(1 - p)
            result = tensor * mask.div(1 - p)
            kept = mask.bool()
        generators.advance(place, (), drawn(tensor, machine.devices[place].model))
        charge(machine, place, result, kept)
        notify_kernel(machine, place, "native_dropout", tensor, (result, kept))
        ctx.save_for_backward(kept)
        ctx.p, ctx.machine, ctx.place = p, machine, place
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (kept,) = ctx.saved_tensors
        with uncharged(ctx.machine):
            result = grad * kept.to(grad.dtype).div(1 - ctx.p)
        charge(ctx.machine, ctx.place, result)
        notify_kernel(ctx.machine, ctx.place, "native_dropout_backward", (grad, kept), result)
        return result, None, None, None


# -- attention


def _attention(machine: Machine) -> Callable[..., Any]:
    operator = _aten.scaled_dot_product_attention.default

    def scaled_dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> Any:
        place = place_of(machine, query)
        options = {"scale": scale, "enable_gqa": enable_gqa}
        if place < 0:
            with below():
                return operator(query, key, value, attn_mask, dropout_p, is_causal, **options)
        call = attention.Attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        _together(machine, place, call)
        chosen = attention.pick(machine.devices[place].model.capability, call, machine.torch)
        with below():
            return _KERNELS[chosen](call)

    return scaled_dot_product_attention


def _together(machine: Machine, place: int, call: attention.Attention) -> None:
    """Source: ``validate_sdpa_input`` in ``aten/src/ATen/native/transformers/attention.cpp``."""
    query, key, value = call[:3]
    if place_of(machine, key) != place or place_of(machine, value) != place:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got "
            f"query.device: {query.device} key.device: {key.device} and value.device: "
            f"{value.device} instead."
        )
    if call.mask is not None and (other := place_of(machine, call.mask)) != place:
        raise two_places(place, other, "scaled_dot_product_attention")


def _choices(machine: Machine, patches: Patches) -> None:
    """What jagged tensors ask, whose attention is chosen in Python."""
    backends = torch.backends.cuda

    def asked(reason: Callable[..., str]) -> Callable[..., bool]:
        def can_use(params: Any, debug: bool = False) -> bool:
            call = attention.Attention(
                params.query, params.key, params.value, params.attn_mask, params.dropout,
                params.is_causal, None, params.enable_gqa,
            )  # fmt: skip
            place = place_of(machine, call.query)
            if place < 0:
                return False
            found = reason(machine.devices[place].model.capability, call)
            if found and debug:
                warnings.warn(found, UserWarning, stacklevel=2)
            return not found

        return can_use

    answers = {
        "can_use_flash_attention": asked(attention.not_flash),
        "can_use_efficient_attention": asked(attention.not_efficient),
        "can_use_cudnn_attention": asked(attention.not_cudnn),
    }
    known = {name: value for name, value in answers.items() if hasattr(backends, name)}
    patches.set_all(backends, known, "torch.")


def _flash(call: attention.Attention) -> Any:
    """Head dimensions are padded to a multiple of 8: ``pad_last_dim`` in ``attention.cpp``."""
    width = call.query.size(-1)
    query, key, value = (_padded_to(item, 8) for item in call[:3])
    scale = width**-0.5 if call.scale is None else call.scale
    result = _aten._scaled_dot_product_flash_attention.default(
        query, key, value, call.dropout_p, call.is_causal, scale=scale
    )[0]
    return result if result.size(-1) == width else result[..., :width]


def _padded_to(tensor: Any, multiple: int) -> Any:
    missing = -tensor.size(-1) % multiple
    return nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _efficient(call: attention.Attention) -> Any:
    mask = _added(call.mask, call.query)
    if mask is not None:
        if mask.dtype != call.query.dtype:
            raise RuntimeError("invalid dtype for bias - should match query's dtype")
        mask = _aligned(mask).expand(*call.query.shape[:-1], call.key.size(-2))
    return _aten._scaled_dot_product_efficient_attention.default(
        *call[:3], mask, _differentiable(call), call.dropout_p, call.is_causal, scale=call.scale
    )[0]


def _differentiable(call: attention.Attention) -> bool:
    return torch.is_grad_enabled() and any(
        item.requires_grad for item in call[:4] if item is not None
    )


def _cudnn(call: attention.Attention) -> Any:
    mask = _added(call.mask, call.query, torch.finfo(call.query.dtype).min)
    return _aten._scaled_dot_product_cudnn_attention.default(
        *call[:3], mask, _differentiable(call), call.dropout_p, call.is_causal, scale=call.scale
    )[0]


def _aligned(mask: Any) -> Any:
    """A mask whose rows begin at multiples of 8 elements: ``pad_bias`` in ``attention.cpp``."""
    *strides, last = mask.stride()
    if last == 1 and all(stride % 8 == 0 for stride in strides):
        return mask
    width = mask.size(-1)
    return nn.functional.pad(mask, (0, 8 - width % 8))[..., :width]


def _math(call: attention.Attention) -> Any:
    """``_scaled_dot_product_attention_math``."""
    query, mask = call.query, call.mask
    if call.is_causal:
        if mask is not None:
            raise RuntimeError(
                "_scaled_dot_product_attention: Explicit attn_mask should not be set when "
                "is_causal=True"
            )
        # Made here: C++ code would ask for memory like the query's, which is the host's.
        mask = query.new_ones((query.size(-2), call.key.size(-2)), dtype=torch.bool).tril()
    options = {"scale": call.scale, "enable_gqa": call.enable_gqa}
    return _aten._scaled_dot_product_attention_math.default(
        *call[:3], _added(mask, query), call.dropout_p, False, None, **options
    )[0]


_KERNELS: Final = {
    attention.FLASH: _flash,
    attention.EFFICIENT: _efficient,
    attention.CUDNN: _cudnn,
    attention.MATH: _math,
}


def _added(mask: Any, query: Any, masked: float = -math.inf) -> Any:
    """A boolean mask as one that is added to the scores: ``convert_boolean_attn_mask``, and the
    same for cuDNN.
    """
    if mask is None or mask.dtype is not torch.bool:
        return mask
    low, zero = (query.new_full((), value) for value in (masked, 0.0))
    return torch.where(mask, zero, low)
