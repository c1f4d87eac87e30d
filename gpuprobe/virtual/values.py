"""Tensors without values: operators whose shapes need more than torch's own rules
(``compute="shapes"``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch._prims_common import suggest_memory_format

from gpuprobe.torch_support.tensors import is_sparse, of_parts, parts, storage_key
from gpuprobe.virtual.machine import Machine, is_meta
from gpuprobe.virtual.reads import known
from gpuprobe.virtual.unknown import refuse

NEED_VALUES: Final = frozenset(
    {
        "_local_scalar_dense",
        "allclose",
        "equal",
        "nonzero",
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
        "bincount",
        "repeat_interleave",
        "is_nonzero",
        "item",
        "argwhere",
        "_assert_async",
        "index",
        "index_put",
        "index_put_",
        "_index_put_impl_",
        "torchvision::nms",
    }
)
"""Operators whose result, or the size of it, depends on values."""

_empty_strided = torch.empty_strided


def packed(data: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
    """``_pack_padded_sequence`` of a tensor without values: the lengths have theirs."""
    if is_meta(lengths):
        raise refuse("the lengths of sequences")
    time = 1 if batch_first else 0
    column = torch.zeros(
        (lengths.numel(), data.size(time), 1)
        if batch_first
        else (data.size(time), lengths.numel(), 1)
    )
    _, sizes = torch.ops.aten._pack_padded_sequence.default(column, lengths, batch_first)
    shape = (int(lengths.sum()), *data.shape[2:])
    return torch.empty(shape, dtype=data.dtype, device="meta"), sizes


def ctc(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *rest: Any
) -> tuple[Any, Any]:
    """``_ctc_loss``: the loss of each sequence, and its alphas. Source: ``ctc_loss_gpu_template``
    in ``aten/src/ATen/native/cuda/LossCTC.cu``: alphas are (batch, time, 2 * longest + 1).
    """
    if isinstance(target_lengths, torch.Tensor):
        if is_meta(target_lengths):
            raise refuse("the lengths of targets")
        longest = int(target_lengths.max())
    else:
        longest = max(target_lengths)
    time, batch = log_probs.shape[:2]
    make = {"dtype": log_probs.dtype, "device": "meta"}
    return torch.empty((batch,), **make), torch.empty((batch, time, 2 * longest + 1), **make)


def elementwise_loss(given: Any, target: Any, reduction: int = 1, *_: Any, **options: Any) -> Any:
    """``mse_loss``, ``smooth_l1_loss``: made for all losses, then given one element's shape.
    Source: ``TORCH_META_FUNC(mse_loss)`` in ``aten/src/ATen/native/Loss.cpp``.
    """
    if options.get("out") is not None:
        return options["out"].resize_(() if reduction else given.shape)
    shape = torch.broadcast_shapes(given.shape, target.shape)
    made = torch.empty(shape, dtype=torch.result_type(given, target), device="meta")
    return made.resize_(()) if reduction else made


def cross_entropy_loss(
    given: Any, target: Any, weight: Any = None, reduction: int = 1, **options: Any
) -> Any:
    """``binary_cross_entropy``. Source: ``binary_cross_entropy_out_cuda`` in
    ``aten/src/ATen/native/cuda/Loss.cu``.
    """
    return elementwise_loss(given, given, reduction, **options)


def masked_fill(given: Any, mask: Any, value: Any) -> Any:
    """``masked_fill`` by a number that is a tensor on the host, which CUDA allows and torch's rule
    for tensors without memory refuses (``masked_fill`` in ``torch/_refs/__init__.py``).
    """
    number = 0 if isinstance(value, torch.Tensor) else value
    return torch.ops.aten.masked_fill.Scalar(given, mask, number)


def like_second(grad: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
    """Backward kernels that make a contiguous gradient of the input's shape:
    ``mse_loss_backward`` and ``smooth_l1_loss_backward`` in ``aten/src/ATen/native/Loss.cpp``.
    """
    return torch.empty_like(given, memory_format=torch.contiguous_format)


def log_sigmoid(given: Any) -> tuple[Any, Any]:
    """No buffer: ``log_sigmoid_forward_cuda`` in ``aten/src/ATen/native/cuda/Activation.cpp``."""
    return torch.empty_like(given), given.new_empty((0,))


def row_norm_backward(grad: Any, given: Any, shape: Any, *rest: Any) -> tuple[Any, ...]:
    """Contiguous gradients of the input and of the parameters: ``layer_norm_backward_cuda`` and
    ``_fused_rms_norm_backward_cuda`` in ``aten/src/ATen/native/cuda/layer_norm_kernel.cu``.
    """
    *saved, wanted = rest
    parameters = saved[len(saved) + 1 - len(wanted) :]
    return tuple(
        like_second(grad, one) if needed and one is not None else None
        for one, needed in zip((given, *parameters), wanted, strict=True)
    )


def geqrf(given: Any) -> tuple[Any, Any]:
    """A matrix by columns, and a vector: ``geqrf`` in ``BatchLinearAlgebra.cpp``."""
    rank = min(given.shape[-2:])
    return torch.empty(given.mT.shape, dtype=given.dtype, device="meta").mT, given.new_empty(
        (*given.shape[:-2], rank)
    )


def eig(given: Any) -> tuple[Any, Any]:
    """Vectors by columns: ``linalg_eig`` in ``aten/src/ATen/native/BatchLinearAlgebra.cpp``."""
    dtype = torch.promote_types(given.dtype, torch.complex64)
    values = torch.empty(given.shape[:-1], dtype=dtype, device="meta")
    return values, torch.empty(given.shape, dtype=dtype, device="meta").mT


def least_squares(
    given: Any, other: Any, rcond: Any = None, *, driver: Any = None
) -> tuple[Any, ...]:
    """``linalg_lstsq`` by CUDA's only driver, which finds no rank. Source: as `eig`."""
    if driver not in (None, "gels"):
        raise RuntimeError(
            "torch.linalg.lstsq: parameter `driver` other than `gels` is not supported on CUDA"
        )
    vector = other.dim() == 1 or (
        given.dim() - 1 == other.dim() and given.shape[:-1] == other.shape
    )
    right = other.unsqueeze(-1) if vector else other
    batch = torch.broadcast_shapes(given.shape[:-2], right.shape[:-2])
    rows, columns = given.shape[-2:]
    room = given.new_empty((*batch, right.size(-1), max(rows, columns))).mT
    solution = room[..., :columns, :]
    left = (*batch, right.size(-1)) if rows > columns else (0,)
    real = given.real.dtype if given.is_complex() else given.dtype
    return (
        solution.squeeze(-1) if vector else solution,
        given.new_empty(left, dtype=real),
        given.new_empty((0,), dtype=torch.int64),
        given.new_empty((0,), dtype=real),
    )


def histogram(given: Any, bins: int = 100, *args: Any) -> Any:
    """``histc``: its range is found on the device."""
    return torch.empty((bins,), dtype=given.dtype, device="meta")


def grouped_product(
    left: Any, right: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """``_grouped_mm``, of any floating type: torch's own rule refuses all but bfloat16, where CUDA
    multiplies group by group. Rows of the result begin every 16 bytes.
    Source: ``create_grouped_gemm_output_tensor`` in ``aten/src/ATen/native/GroupedMMUtils.h``,
    ``_grouped_mm_cuda`` in ``aten/src/ATen/native/cuda/GroupedBlas.cpp``.
    """
    for given in (left, right):
        _whole_rows(given)
    rows, columns = left.shape[-2], right.shape[-1]
    if left.dim() == 2 and right.dim() == 2:
        shape: tuple[int, ...] = (offs.shape[0], rows, columns)
    elif left.dim() == right.dim():
        shape = (left.shape[0], rows, columns)
    else:
        shape = (rows, columns)
    dtype = out_dtype or left.dtype
    step = max(1, 16 // dtype.itemsize)
    padded = (columns + step - 1) // step * step
    stride = (rows * padded, padded, 1)[-len(shape) :]
    return _empty_strided(shape, stride, dtype=dtype, device="meta")


def _whole_rows(matrix: Any) -> None:
    """Raises RuntimeError as ``check_valid_strides_and_return_transposed`` does."""
    step = max(1, 16 // matrix.dtype.itemsize)
    (row, column), (rows, columns) = matrix.stride()[-2:], matrix.shape[-2:]
    by_columns = row == 1 and column >= max(1, rows)
    if not by_columns and not (column == 1 and row >= max(1, columns)):
        raise RuntimeError(f"Invalid strides/sizes, got {matrix.stride()} and {matrix.shape}")
    if (column if by_columns else row) % step:
        raise RuntimeError("strides should be multiple of 16 bytes")


def with_elements(machine: Machine, value: Any, stores: dict[int, Any]) -> Any:
    """The arguments of a call with sparse tensors, made for the CPU: as `known.with_values`, but
    values may be unknown, and are any then. ``stores`` takes the storage without memory for each
    storage that stands for one. Raises ValueNeeded where it is not known which elements a tensor
    has.
    """
    if isinstance(value, torch.Tensor):
        if not is_meta(value):
            return value
        if is_sparse(value):
            made = [with_elements(machine, part, stores) for part in parts(value)]
            # Kernels ask whether a backward pass will need more (``_sparse_mm_reduce_impl``).
            return of_parts(value, made, torch.device("cpu")).requires_grad_(value.requires_grad)
        if not (value.is_floating_point() or value.is_complex() or known.is_known(machine, value)):
            raise refuse("which elements of a sparse tensor there are")
        stand_in = known.values_of(machine, value)
        if value.requires_grad:
            stand_in.requires_grad_()
        stores[storage_key(stand_in)] = value.untyped_storage()
        return stand_in
    if type(value) is list or type(value) is tuple:
        return type(value)([with_elements(machine, item, stores) for item in value])
    if isinstance(value, dict):
        return {name: with_elements(machine, item, stores) for name, item in value.items()}
    return value


def of_sparse(name: str, args: tuple[Any, ...]) -> tuple[Any, torch.dtype] | None:
    """Sizes and dtype of a dense result of sparse tensors; None where it takes their elements to
    tell, or the result is sparse too.
    """
    first = args[0]
    if name == "_to_dense":
        return first.size(), first.dtype
    if name not in _PRODUCTS:
        return None
    left, right = args[_PRODUCTS[name] :][:2]
    if torch.strided not in (left.layout, right.layout):
        return None
    return (*left.size()[:-1], right.size(-1)), left.dtype


_PRODUCTS: Final = {"mm": 0, "addmm": 1, "_sparse_addmm": 1, "bmm": 0}
"""Matrix products, and which argument is the left factor."""


def nothing(*args: Any, **kwargs: Any) -> None:
    """An operator that only writes into its arguments."""


def folded(columns: Any, *args: Any) -> Any:
    """``col2im``: made like the columns, whose memory it keeps. Source: ``col2im_cuda`` in
    ``aten/src/ATen/native/cuda/Col2Im.cu``.
    """
    result = torch.ops.aten.col2im.default(columns, *args)
    made = torch.empty(columns.shape, dtype=columns.dtype, device="meta")
    return made.resize_(result.shape)


def gradients_of_efficient(query: Any, key: Any, value: Any, bias: Any, shared: bool) -> list[Any]:
    """Memory for the gradients of ``_efficient_attention_backward``, as ``attention_backward.cu``
    makes it: as the inputs, or side by side in one block; the bias's in rows of a multiple of 16.
    """
    if shared:
        chunk = query.new_empty((*query.shape[:-2], 3, *query.shape[-2:]))
        made = [chunk.select(-3, at) for at in range(3)]
    else:
        made = [torch.empty_like(item) for item in (query, key, value)]
    if bias is None:
        return [*made, query.new_empty((0,), dtype=torch.float32)]  # nothing on CUDA
    width = bias.size(-1)
    room = bias.new_empty((*bias.shape[:-1], -(-width // 16) * 16))
    return [*made, room[..., :width]]


def needs_sums(query: Any, sums: Any) -> None:
    """Raises RuntimeError where attention's forward pass was told to keep nothing for a backward
    pass. CUDA's kernel would read memory that is not there.
    """
    if query.numel() and not sums.numel():
        raise RuntimeError(
            "_efficient_attention_backward: the forward pass has not kept logsumexp "
            "(compute_log_sumexp=False)"
        )


def efficient_attention_backward(
    grad: Any, query: Any, key: Any, value: Any, bias: Any, *args: Any, **options: Any
) -> tuple[Any, ...]:
    """``_efficient_attention_backward``, whose meta kernel lacks an argument. ``args``: the result,
    where sequences begin, how long they are, and the sums.
    """
    needs_sums(query, args[5])
    shared = options.get("shared_storage_dqdkdv", False)
    return tuple(gradients_of_efficient(query, key, value, bias, shared))


def cudnn_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    compute_log_sumexp: bool,
    *args: Any,
    **named: Any,
) -> Any:
    """``_scaled_dot_product_cudnn_attention``, whose meta kernel makes the sums in any case."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        query, key, value, bias, compute_log_sumexp, *args, **named
    )
    if compute_log_sumexp:
        return found
    return (found[0], query.new_empty((0,), dtype=torch.float32), *found[2:])


def convolution(image: Any, weight: Any, *args: Any) -> Any:
    """``convolution``, whose meta kernel makes contiguous memory (of early versions the image's
    format), in the format that cuDNN's has. Source for one dimension: ``_convolution`` in
    ``Convolution.cpp``.
    """
    made = torch.ops.aten.convolution.default(*without_values((image, weight, *args)))
    if image.dtype is torch.float64 or weight.dtype is torch.float64:
        return torch.empty(made.shape, dtype=made.dtype, device="meta")
    rows = made.dim() == 3
    if rows:
        image = (
            shape_of(image)
            if image.is_contiguous()
            else image.new_empty(image.shape, device="meta")
        )
        image, weight, made = image.unsqueeze(2), shape_of(weight).unsqueeze(2), made.unsqueeze(2)
    layout = convolution_format(image, weight)
    if layout is not torch.contiguous_format:
        made = torch.empty(made.shape, dtype=made.dtype, device="meta", memory_format=layout)
    return made.squeeze(2) if rows else made


_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}


def convolution_format(image: Any, weight: Any) -> torch.memory_format:
    """Channels last if the image or the weight has them last: ``cudnn_conv_suggest_memory_format``
    in ``aten/src/ATen/native/ConvUtils.h``.
    """
    last = _LAST.get(image.dim())
    if last is not None and last in (suggest_memory_format(image), suggest_memory_format(weight)):
        return last
    return torch.contiguous_format


def awaitable(tensor: Any) -> Any:
    """The result of a functional collective, which wraps memory that is there already: torch's
    rule for shapes (in ``torch/distributed/_functional_collectives.py``) makes new memory.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(tensor)


def waited(tensor: Any) -> Any:
    """``wait_tensor``, which returns what it is given: torch's rule for shapes makes new memory."""
    return tensor


BY_SHAPE: Final[dict[str, Callable[..., Any]]] = {
    "_pack_padded_sequence": packed,
    "_ctc_loss": ctc,
    "masked_fill": masked_fill,
    "_ctc_loss_backward": like_second,
    "fractional_max_pool3d_backward": like_second,
    "geqrf": geqrf,
    "histc": histogram,
    "linalg_eig": eig,
    "linalg_lstsq": least_squares,
    "log_sigmoid_forward": log_sigmoid,
    "native_layer_norm_backward": row_norm_backward,
    "_fused_rms_norm_backward": row_norm_backward,
    "multi_margin_loss_backward": like_second,
    "multilabel_margin_loss_backward": like_second,
    "col2im": folded,
    "convolution": convolution,
    "_efficient_attention_backward": efficient_attention_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_attention,
    "mse_loss": elementwise_loss,
    "smooth_l1_loss": elementwise_loss,
    "smooth_l1_loss_backward": like_second,
    "huber_loss_backward": like_second,
    "mse_loss_backward": like_second,
    "binary_cross_entropy": cross_entropy_loss,
    "_grouped_mm": grouped_product,
    "_fused_sgd_": nothing,
    "_fused_adagrad_": nothing,
    "_c10d_functional::_wrap_tensor_autograd": awaitable,
    "_c10d_functional::wait_tensor": waited,
}
"""Operators that lack a meta kernel, whose meta kernel makes other memory than CUDA's does, or
whose arguments keep their values: what they return.
"""


def shape_of(tensor: Any) -> Any:
    """A tensor of the same shape without memory."""
    return _empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def without_values(value: Any, numbers: bool = False) -> Any:
    """One argument of a call with every host tensor that has values replaced by one that has none:
    torch refuses to mix them. A tensor without dimensions stays, as torch allows, unless it is in
    a list (``numbers``).
    """
    if isinstance(value, torch.Tensor):
        if is_meta(value) or not (numbers or value.dim()) or value.layout is not torch.strided:
            return value
        return shape_of(value)
    if type(value) is list or type(value) is tuple:
        return type(value)([without_values(item, numbers=True) for item in value])
    return value
