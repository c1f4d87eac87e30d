"""Host kernels whose results are laid out otherwise than CUDA's, brought into CUDA's form.

With values the host's kernels run. Some of them return statistics in another dtype, no memory at
all where CUDA returns unused memory, or other strides: what a device keeps would be of another
size with values than without, where torch's meta kernels answer as for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.virtual.kernels.nearest import Instead, instead
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.torch_patches.keys import DEVICE, Kernels, below

_aten = torch.ops.aten
_HALF: Final = (torch.float16, torch.bfloat16)


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    """``toAccumulateType`` on CUDA."""
    return torch.float32 if dtype in _HALF else dtype


def _layer_norm(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Mean and reciprocal deviation in the accumulated dtype: ``layer_norm_cuda`` in
    ``aten/src/ATen/native/cuda/layer_norm_kernel.cu``.
    """
    out, *statistics = func(*args, **kwargs)
    dtype = _accumulated(args[0].dtype)
    return (out, *(item.to(dtype) for item in statistics))


def _batch_norm(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The same, and memory for both where they are not computed: ``batch_norm_cuda`` in
    ``aten/src/ATen/native/cuda/Normalization.cu``.
    """
    out, mean, deviation, *rest = func(*args, **kwargs)
    given = args[0]
    dtype = _accumulated(given.dtype)

    def widened(item: Any) -> Any:
        if not item.numel() and given.dim() > 1:
            return torch.zeros(given.size(1), dtype=dtype)
        return item.to(dtype)

    return (out, widened(mean), widened(deviation), *rest)


def _backward(at: int, *parameters: int) -> Callable[..., Any]:
    """A backward kernel is given the two statistics (from argument ``at`` on) in the host's dtype:
    that of the input, unless any of ``parameters`` is float32.
    """

    def kernel(func: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = args[1].dtype
        if any(args[i] is not None and args[i].dtype is torch.float32 for i in parameters):
            dtype = torch.float32
        given = list(args)
        for index in (at, at + 1):
            if isinstance(given[index], torch.Tensor):
                given[index] = given[index].to(dtype)
        return func(*given, **kwargs)

    return kernel


def _nansum(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Of complex numbers, too, which the host's kernel does not take."""
    given = args[0]
    if not given.is_complex():
        return func(*args, **kwargs)
    dims = args[1] if len(args) > 1 and args[1] else tuple(range(given.dim()))
    wide = given.to(torch.complex64) if given.dtype is torch.complex32 else given
    result = torch.where(wide.isnan(), 0, wide).sum(dims, *args[2:], **kwargs)
    return result if kwargs.get("dtype") is not None else result.to(given.dtype)


def _least_squares(
    func: Any, given: Any, other: Any, rcond: Any = None, *, driver: Any = None
) -> Any:
    """CUDA has one driver, which finds no rank: ``linalg_lstsq_out_info`` in
    ``aten/src/ATen/native/BatchLinearAlgebra.cpp``.
    """
    if driver not in (None, "gels"):
        raise RuntimeError(
            "torch.linalg.lstsq: parameter `driver` other than `gels` is not supported on CUDA"
        )
    return func(given, other, rcond, driver="gels")


def _embedding_bag(
    func: Any,
    weight: Any,
    indices: Any,
    offsets: Any,
    by_frequency: bool = False,
    mode: int = 0,
    sparse: bool = False,
    factors: Any = None,
    include_last: bool = False,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """The bag of each index always, a size for each offset, the largest indices only of maxima;
    none with room for more: ``_embedding_bag_cuda`` in
    ``aten/src/ATen/native/cuda/EmbeddingBag.cu``.
    """
    given = (weight, indices, offsets, by_frequency, mode, sparse, factors, include_last)
    out, bags, sizes, largest = func(*given, *rest, **kwargs)
    if bags.numel() != indices.numel():
        starts = offsets[:-1] if include_last else offsets
        bags = torch.bucketize(torch.arange(indices.numel()), starts, right=True) - 1
        bags = bags.to(indices.dtype)
    if sizes.numel() != offsets.numel():
        sizes = torch.nn.functional.pad(sizes, (0, offsets.numel() - sizes.numel()))
    if mode != _MAXIMA:
        largest = largest.new_empty((0,))
    return tuple(
        item if item.untyped_storage().nbytes() == item.nbytes else item.clone()
        for item in (out, bags, sizes, largest)
    )


_MAXIMA: Final = 2  # EmbeddingBagMode::MAX


def _laid_out(func: Any, *args: Any, **kwargs: Any) -> Any:
    """In the strides that the meta kernel gives."""
    try:
        return Instead(func, args, kwargs).run({})
    except RuntimeError as error:
        return instead(func, error, *args, **kwargs)


def _log_sigmoid(func: Any, given: Any) -> tuple[Any, Any]:
    """Without the buffer that a CPU keeps for the backward pass: ``log_sigmoid_forward_cuda`` in
    ``aten/src/ATen/native/cuda/Activation.cpp``.
    """
    result, _ = func(given)
    return result, given.new_empty((0,))


def _log_sigmoid_backward(func: Any, grad: Any, given: Any, buffer: Any) -> Any:
    return func(grad, given, given.abs().neg_().exp_())


def _by_dimension(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Positions of elements, first those in the first dimension: ``nonzero_cuda_out_impl`` and
    ``nonzero_static_cuda`` in ``aten/src/ATen/native/cuda/Nonzero.cu``.
    """
    return func(*args, **kwargs).t().contiguous().t()


TABLE: Final[dict[Any, Callable[..., Any]]] = {
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _backward(3, 5, 6),
    _aten.native_batch_norm.default: _batch_norm,
    _aten._native_batch_norm_legit.default: _batch_norm,
    _aten._native_batch_norm_legit.no_stats: _batch_norm,
    _aten._native_batch_norm_legit_no_training.default: _batch_norm,
    _aten._batch_norm_with_update.default: _batch_norm,
    _aten.native_batch_norm_backward.default: _backward(5, 2, 3),
    _aten.batch_norm_backward.default: _backward(5, 2, 3),
    _aten._embedding_bag.default: _embedding_bag,
    _aten._embedding_bag_forward_only.default: _embedding_bag,
    _aten.linalg_lstsq.default: _least_squares,
    _aten._linalg_svd.default: _laid_out,
    _aten.nansum.default: _nansum,
    _aten.log_sigmoid_forward.default: _log_sigmoid,
    _aten.log_sigmoid_backward.default: _log_sigmoid_backward,
    _aten.nonzero.default: _by_dimension,
    _aten.nonzero_static.default: _by_dimension,
    _aten._fft_r2c.default: _laid_out,
    _aten._fft_c2r.default: _laid_out,
    _aten._fft_c2c.default: _laid_out,
    _aten.max_unpool2d.default: _laid_out,
    _aten.max_unpool3d.default: _laid_out,
}
"""Called with the operator and its arguments, in place of the operator."""


def _product(plain: Any) -> Callable[..., Any]:
    """A matrix product whose result has another dtype than its factors. Source: ``_mm_dtype_cuda``
    and its like in ``aten/src/ATen/native/cuda/Blas.cpp``.
    """

    def kernel(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        *tensors, dtype = args
        result = plain(*(item.to(dtype) for item in tensors), **kwargs)
        return result if out is None else out.copy_(result)

    return kernel


def _mish_backward(machine: Machine) -> Callable[..., Any]:
    """One kernel on CUDA. Meta tensors have none, and torch takes it apart for them."""

    def kernel(grad: Any, given: Any) -> Any:
        if machine.place_of(grad) < 0 or torch.is_grad_enabled():
            with below():
                return _aten.mish_backward.default(grad, given)
        return torch.empty_like(given)

    return kernel


def install(machine: Machine, kernels: Kernels) -> None:
    """Give operators that only CUDA has a kernel."""
    if machine.shapes:
        kernels.add("mish_backward", _mish_backward(machine), DEVICE)
        return
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        packet = getattr(_aten, name)
        for overload in ("dtype", "dtype_out"):
            full = f"{name}.{overload}"
            if overload in packet.overloads() and not has(f"aten::{full}", "CPU"):
                kernels.add(full, _product(packet.default), "CPU")
