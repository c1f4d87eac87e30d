"""Normalisation that CUDA runs, or lays out, as no other device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.torch_support.version import installed
from gpuprobe.virtual.lowering.functions import place_of
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.torch_patches.keys import DEVICE, Kernels, below

_aten = torch.ops.aten
_FUSED_SINCE: Final = (2, 9)


def install(machine: Machine, kernels: Kernels) -> None:
    kernels.add("group_norm", _group_norm(machine), DEVICE)
    if installed() < _FUSED_SINCE:
        return
    if machine.torch < _FUSED_SINCE:
        kernels.add("rms_norm", _as_before(machine), DEVICE)
        return
    kernels.add("_fused_rms_norm", _rms_norm(machine), DEVICE)
    for key in ("CPU", "Meta"):
        kernels.add("_fused_rms_norm", _taken_apart, key)
    kernels.add("_fused_rms_norm_backward", _rms_norm_backward, "CPU")


def _group_norm(machine: Machine) -> Callable[..., Any]:
    """``group_norm`` in ``aten/src/ATen/native/group_norm.cpp``: of channels last, too, a CPU's
    kernel keeps the layout, and CUDA's is given a contiguous copy.
    """

    def group_norm(given: Any, *args: Any, **kwargs: Any) -> Any:
        if place_of(machine, given) >= 0:
            given = given.contiguous()
        with below():
            return _aten.group_norm.default(given, *args, **kwargs)

    return group_norm


def _taken_apart(
    given: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    """``rms_norm_composite``: the normalised input, and the factors, in the accumulated dtype."""
    return _aten._fused_rms_norm.default.decompose(given, normalized_shape, weight, eps)


def _as_before(machine: Machine) -> Callable[..., Any]:
    """``rms_norm`` in ``aten/src/ATen/native/layer_norm.cpp`` until torch 2.8: taken apart, and the
    weight multiplied after the result has the input's dtype.
    """

    def rms_norm(
        given: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
    ) -> Any:
        if place_of(machine, given) < 0:
            with below():
                return _aten.rms_norm.default(given, normalized_shape, weight, eps)
        wide = given.to(torch.float32) if given.dtype in _HALF else given
        dims = tuple(range(given.dim() - len(normalized_shape), given.dim()))
        least = torch.finfo(given.dtype).eps if eps is None else eps
        factor = torch.rsqrt(torch.pow(wide, 2).mean(dims, keepdim=True).add_(least))
        result = (wide * factor).type_as(given)
        return result if weight is None else result * weight

    return rms_norm


_HALF: Final = (torch.float16, torch.bfloat16)


def _rms_norm(machine: Machine) -> Callable[..., Any]:
    """One kernel with a formula of its own for the gradient, which saves the input and a factor for
    each row. Source: ``_fused_rms_norm_cuda`` in ``aten/src/ATen/native/cuda/layer_norm_kernel.cu``
    (since torch 2.9).
    """

    def fused_rms_norm(
        given: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
    ) -> Any:
        if place_of(machine, given) < 0:
            return _taken_apart(given, normalized_shape, weight, eps)
        with below():
            return _aten._fused_rms_norm.default(given, normalized_shape, weight, eps)

    return fused_rms_norm


def _rms_norm_backward(
    grad: Any, given: Any, normalized_shape: Any, factor: Any, weight: Any, wanted: Any
) -> tuple[Any, Any]:
    """The gradients of the input and of the weight, in their dtypes."""
    dims = tuple(range(given.dim() - len(normalized_shape), given.dim()))
    rows = tuple(range(given.dim() - len(normalized_shape)))
    normalized = given.to(factor.dtype) * factor
    outer = grad.to(factor.dtype)
    inner = outer if weight is None else outer * weight
    of_input = of_weight = None
    if wanted[0]:
        mean = (inner * normalized).mean(dims, keepdim=True)
        of_input = ((inner - normalized * mean) * factor).to(given.dtype)
        of_input = of_input.contiguous()
    if wanted[1] and weight is not None:
        product = outer * normalized
        of_weight = (product.sum(rows) if rows else product).to(weight.dtype).contiguous()
    return of_input, of_weight
