"""Which operators run a kernel, and so use the values of their arguments."""

from __future__ import annotations

from typing import Final

from torch._ops import OpOverload

# They make or describe memory. A functional collective's results are wrapped by the last one.
_NO_KERNEL: Final = frozenset(
    """empty empty_like empty_strided new_empty new_empty_strided set_ resize_ resize_as_
    record_stream lift_fresh detach alias lift detach_ _version is_same_size is_pinned
    _has_compatible_shallow_copy_type _sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims
    _sparse_coo_tensor_with_dims_and_tensors _sparse_compressed_tensor_unsafe _coalesced_ _nnz
    is_coalesced sparse_dim dense_dim _wrap_tensor_autograd _unsafe_view _reshape_alias""".split()  # noqa: SIM905 - a list to be read
)

OVERWRITES: Final = frozenset(
    """zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_
    log_normal_ _foreach_zero_""".split()  # noqa: SIM905 - a list to be read
)
"""Operators that replace all values of their first argument: nothing uses those before."""

HIDDEN_VIEWS: Final = frozenset(("_unsafe_view", "_reshape_alias"))
"""Operators whose schema does not show that they return memory of their argument."""


def runs_kernel(op: OpOverload) -> bool:
    """Whether an operator runs a kernel on the values of its arguments: no view, and none that only
    makes or describes memory.
    """
    return op._schema.name.rpartition("::")[2] not in _NO_KERNEL and not _shows_view(op)


def makes_view(op: OpOverload) -> bool:
    """Whether an operator only makes other tensors of memory that its arguments have."""
    return _shows_view(op) or op._schema.name.rpartition("::")[2] in HIDDEN_VIEWS


def _shows_view(op: OpOverload) -> bool:
    alias = [item.alias_info for item in op._schema.returns]
    return any(item is not None and not item.is_write for item in alias)


def takes_shape(name: str) -> bool:
    """Whether the operator of that name is a factory that takes the shape of its first argument,
    and none of its values.
    """
    return name.startswith("new_") or name.endswith("_like")
