"""Strides of results of pointwise operators, as CUDA's kernels lay them out.

torch's rules for tensors without memory convert some arguments to a wider type first, and lay the
result out like the copies: ``float16`` of an expanded gradient and a transposed matrix, say. A
kernel looks at the arguments as they are.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._prims_common import compute_elementwise_output_strides

from gpuprobe.torch_support.tensors import tensors_in

_FULL: Final = torch.contiguous_format
_empty_strided = torch.empty_strided


def like_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """``result`` of a pointwise operator in the strides of ``TensorIteratorBase::
    compute_strides`` in ``aten/src/ATen/TensorIterator.cpp``.
    """
    if type(result) is not torch.Tensor or not result.dim():
        return result
    given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.dim()]
    if all(tensor.is_contiguous(memory_format=_FULL) for tensor in given):
        return result
    shape = result.size()
    if torch.broadcast_shapes(*(tensor.size() for tensor in given)) != shape:
        return result
    strides = compute_elementwise_output_strides(*(tensor.expand(shape) for tensor in given))
    if strides == result.stride():
        return result
    return _empty_strided(shape, strides, dtype=result.dtype, device="meta")
