"""Fourier transforms of half precision, which torch's composite functions refuse for CPU tensors.

The composites of ``aten/src/ATen/native/SpectralOps.cpp`` ask for the device before they call an
operator. These do what those do on CUDA; the operators themselves are computed in the nearest
dtype (`gpuprobe.virtual.kernels.nearest`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.torch_patches.keys import DEVICE, Kernels, below

_aten = torch.ops.aten
_COMPLEX: Final = (
    "fft_fft2", "fft_ifft2", "fft_fftn", "fft_ifftn",
    "fft_hfft", "fft_hfft2", "fft_hfftn", "fft_irfft", "fft_irfft2", "fft_irfftn",
)  # fmt: skip
"""Made of complex numbers: an input of real ones becomes complex (``promote_tensor_fft``)."""


def install(machine: Machine, kernels: Kernels) -> None:
    """Register the functions; nothing without values, where nothing is refused."""
    if machine.shapes:
        return
    for name in _COMPLEX:
        kernels.add(name, _complex(getattr(_aten, name).default), DEVICE)
    for name, forward, half in (
        ("fft_fft", True, False),
        ("fft_ifft", False, False),
        ("fft_rfft", True, True),
        ("fft_ihfft", False, True),
    ):
        kernels.add(name, _real(getattr(_aten, name).default, _one(forward, half)), DEVICE)
    for name, forward in (("fft_rfft", True), ("fft_ihfft", False)):
        for end in ("2", "n"):
            operator = getattr(_aten, f"{name}{end}").default
            kernels.add(f"{name}{end}", _real(operator, _several(forward)), DEVICE)


def _complex(operator: Any) -> Callable[..., Any]:
    def transform(given: Any, *args: Any, **kwargs: Any) -> Any:
        if given.dtype is torch.float16 and given.is_cuda:
            given = given.to(torch.complex32)
        with below():
            return operator(given, *args, **kwargs)

    return transform


def _real(operator: Any, instead: Callable[..., Any]) -> Callable[..., Any]:
    def transform(given: Any, *args: Any, **kwargs: Any) -> Any:
        if given.dtype is torch.float16 and given.is_cuda:
            return instead(given, *args, **kwargs)
        with below():
            return operator(given, *args, **kwargs)

    return transform


def _scaling(norm: str | None, forward: bool) -> int:
    """``fft_norm_mode``: 0 none, 1 by the root of n, 2 by n (``norm_from_string``)."""
    if norm == "ortho":
        return 1
    if norm not in (None, "backward", "forward"):
        raise RuntimeError(f'Invalid normalization mode: "{norm}"')
    return 2 if (norm == "forward") == forward else 0


def _resized(given: Any, dims: Sequence[int], sizes: Sequence[int]) -> Any:
    """Cut or filled with zeros: ``resize_fft_input``."""
    padding = [0] * (2 * given.dim())
    for dim, size in zip(dims, sizes, strict=True):
        if size == -1 or size == given.size(dim):
            continue
        if size < given.size(dim):
            given = given.narrow(dim, 0, size)
        else:
            padding[2 * (given.dim() - 1 - dim) + 1] = size - given.size(dim)
    return torch.nn.functional.pad(given, padding) if any(padding) else given


def _one(forward: bool, half: bool) -> Callable[..., Any]:
    """``fft_r2c``; ``half``: of the result, which is symmetric, only one half."""

    def transform(given: Any, n: int | None = None, dim: int = -1, norm: Any = None) -> Any:
        dim = dim % given.dim()
        given = _resized(given, [dim], [-1 if n is None else n])
        result = _aten._fft_r2c.default(given, [dim], _scaling(norm, forward), half)
        return result if forward else result.conj()

    return transform


def _several(forward: bool) -> Callable[..., Any]:
    def transform(given: Any, s: Any = None, dim: Any = None, norm: Any = None) -> Any:
        if dim is None:
            dim = range(given.dim()) if s is None else range(-len(s), 0)
        dims = [at % given.dim() for at in dim]
        given = _resized(given, dims, s if s is not None else [-1] * len(dims))
        scaling = _scaling(norm, forward)
        if forward:
            return _aten._fft_r2c.default(given, dims, scaling, True)
        last = _aten._fft_r2c.default(given, dims[-1:], scaling, True)
        if not dims[:-1]:
            return last.conj()
        last = last.conj_physical()
        return _aten._fft_c2c.default(last, dims[:-1], scaling, False)

    return transform
