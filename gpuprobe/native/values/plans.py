"""What is done for each operator, decided once from its schema."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch._ops import OpOverload

from gpuprobe.native.values.arguments import Args
from gpuprobe.native.values.exchanges import SPACES


class How(Enum):
    """How an operator on the device gets its values."""

    ONLY = "only"
    """It runs, and has no values to compute: views, allocation, sizes."""
    WHOLE = "whole"
    """It runs, and its CPU kernel is run on the same memory."""
    PARTS = "parts"
    """It consists of other operators, which are computed one by one."""
    READS = "reads"
    """Like both: it reads what its parts compute, and the whole is computed as well."""
    COUNTS = "counts"
    """Its kernels count elements and the host reads the count: computed first."""
    EXCHANGE = "exchange"
    """A collective."""
    COPY = "copy"
    """A copy, also between devices."""
    SCALAR = "scalar"
    """It reads one element."""
    ANSWER = "answer"
    """Its result is no tensor, and depends on values."""
    FLATTEN = "flatten"
    """It moves the weights of a recurrent network into one buffer, whose layout is cuDNN's."""


@dataclass
class OperatorPlan:
    """``fresh``: which results are new tensors, not arguments that were written to. ``written``:
    positions and names of arguments that are. ``random``: whether it draws numbers.
    """

    func: OpOverload
    name: str
    how: How
    fresh: tuple[int, ...]
    written: tuple[int | str, ...]
    out: bool
    random: bool
    takes_generator: bool
    in_float32: bool = False
    """The CPU has no kernel for the operator's dtype: known after the first failure."""
    writes: bool = False
    """It writes to arguments, declared or not."""
    whole_storage: bool = False
    """It works on the storages of its arguments."""
    overwrites: bool = False
    """Its result does not depend on what the written argument held."""
    allocates: bool = False
    """It makes a tensor of a given size, or of that of its first argument."""


_ONLY: Final = frozenset(
    """
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided empty_quantized
    _efficientzerotensor resize_ resize_as_ resize_as_sparse_ sparse_resize_
    sparse_resize_and_clear_ set_ set_data as_strided_ t_ transpose_ squeeze_ unsqueeze_ swapaxes_
    swapdims_ detach_ requires_grad_ record_stream _unsafe_view lift_fresh _resize_output_
    _resize_output _local_scalar_dense_ is_pinned _pin_memory pin_memory _cudnn_init_dropout_state
    _fused_sdp_choice _version rename_ is_coalesced _coalesced_ dense_dim
    sparse_dim _dimI _dimV _nnz _assert_async _functional_assert_async _assert_tensor_metadata
    _use_cudnn_ctc_loss _has_same_storage_numel is_same_size cudnn_is_acceptable
    _cuda_getCurrentRawStream _propagate_xla_data _backward set_source_Storage
    _sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims_and_tensors
    _sparse_coo_tensor_with_dims _sparse_compressed_tensor_with_dims sparse_coo_tensor
    sparse_compressed_tensor _sparse_compressed_tensor_unsafe _validate_sparse_coo_tensor_args
    _validate_sparse_compressed_tensor_args _spdiags_ _nested_tensor_size _nested_tensor_strides
    _nested_tensor_storage_offsets _nested_view_from_buffer unsafe_split unsafe_chunk
    unsafe_split_with_sizes _fw_primal _make_dual _test_ambiguous_defaults
    """.split()  # noqa: SIM905
)

_ALLOCATES: Final = frozenset(
    """
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like
    new_zeros ones ones_like new_ones full full_like new_full rand rand_like randn randn_like
    randint randint_like clone _to_copy
    """.split()  # noqa: SIM905
)

_COPIES: Final = frozenset(
    {"copy_", "_to_copy", "_copy_from", "_foreach_copy_", "_copy_from_and_resize", "copy"}
)

_READS: Final = frozenset(
    """
    index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put masked_select
    bincount histc repeat_interleave multinomial segment_reduce linalg_matrix_exp
    _to_sparse _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc to_sparse
    embedding_renorm_ _ctc_loss _ctc_loss_backward linalg_lstsq linalg_eig _linalg_eigvals
    is_nonzero _nested_tensor_from_mask histogram linalg_cond linalg_pinv
    _sparse_mask_projection sparse_mask nanmedian linspace logspace masked_fill masked_fill_
    masked_scatter_backward index_fill index_fill_ isin normal _grouped_mm
    """.split()  # noqa: SIM905
)
MASKED: Final = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
)
"""Of these only with masks among the indices."""

_COUNTS: Final = frozenset(
    """
    nonzero _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive _coalesce nms
    """.split()  # noqa: SIM905
)

_OVERWRITES: Final = frozenset(
    """
    zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_
    geometric_ eye_ _foreach_zero_ _foreach_copy_
    """.split()  # noqa: SIM905
)

_WHOLE_STORAGE: Final = frozenset(
    """
    as_strided_copy as_strided_scatter copy diagonal_scatter select_scatter slice_scatter
    as_strided_scatter_backward
    """.split()  # noqa: SIM905
)
"""Operators that use the whole storage of a tensor, or positions relative to its start."""

HIDDEN_WRITES: Final = {
    "native_batch_norm": (3, 4),
    "cudnn_batch_norm": (3, 4),
    "batch_norm_gather_stats": (3, 4),
    "batch_norm_gather_stats_with_counts": (3, 4),
}
"""Arguments that operators write to although their schemas do not declare it."""

_PYTHON_RESULTS: Final = frozenset({"equal", "allclose"})

_PASSED: Final = frozenset(
    {"prim", "profiler", "_c10d_functional_autograd", "c10d_functional",
     "debugprims", "mkldnn", "rngprims", "fsdp_", "symm_mem", "_dtensor"}
)  # fmt: skip
"""Namespaces whose operators copy their data themselves, or have no data."""

_has = torch._C._dispatch_has_kernel_for_dispatch_key
_SEEDED: Final = torch.Tag.nondeterministic_seeded


def masked(args: Args) -> bool:
    """Whether an indexing operator's indices contain a mask."""
    return any(
        isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
        for item in args[1]
    )


def plan_of(func: OpOverload) -> OperatorPlan:
    """The plan for an operator."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    space = schema.name.partition("::")[0]
    returns = schema.returns
    fresh = tuple(i for i, item in enumerate(returns) if item.alias_info is None)
    written: list[int | str] = []
    generator = False
    for i, argument in enumerate(schema.arguments):
        if argument.name == "generator":
            generator = True
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else i)
    return OperatorPlan(
        func,
        name,
        _how(func, space, name, returns),
        fresh,
        tuple(written),
        any(isinstance(item, str) for item in written),
        generator or _SEEDED in func.tags,
        generator,
        writes=bool(written) or name in HIDDEN_WRITES,
        whole_storage=name in _WHOLE_STORAGE,
        allocates=name in _ALLOCATES,
        overwrites=name in _OVERWRITES,
    )


def _how(func: OpOverload, space: str, name: str, returns: Any) -> How:
    if name == "_local_scalar_dense":
        return How.SCALAR
    if name == "_cudnn_rnn_flatten_weight":
        return How.FLATTEN
    if name in _PYTHON_RESULTS:
        return How.ANSWER
    if space in SPACES or space in _PASSED or name in _ONLY:
        return How.EXCHANGE if space in SPACES else How.ONLY
    full = func.name()
    if (
        _has(full, "CompositeImplicitAutograd")
        and not _has(full, "CUDA")
        and not _has(full, "CompositeExplicitAutograd")
    ):
        return How.PARTS
    if name == "_linalg_check_errors" or (space != "aten" and _in_python(full)):
        return How.PARTS
    if any(item.alias_info is not None and not item.alias_info.is_write for item in returns):
        return How.ONLY  # a view
    if name in _COPIES:
        return How.COPY
    if name in _COUNTS:
        return How.COUNTS
    if name in _READS:
        return How.READS
    tensors = any("Tensor" in str(item.type) for item in returns)
    if not tensors and not func._schema.is_mutable:
        return How.ONLY
    return How.WHOLE


def _in_python(full: str) -> bool:
    """Whether an operator's kernel is a Python function, which calls operators itself. One that has
    another for CUDA than for the CPU may launch kernels without them, as bitsandbytes does.
    """
    from torch._library.custom_ops import OPDEFS

    space, _, rest = full.partition("::")
    plain = rest.partition(".")[0]
    if f"{space}::{plain}" in OPDEFS:
        return True
    impls = torch.library._impls
    others = ("CPU", "CompositeExplicitAutograd")
    if f"{space}/{rest}/CUDA" in impls and any(f"{space}/{rest}/{key}" in impls for key in others):
        return False
    keys = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(f"{space}/{rest}/{key}" in impls for key in keys)
