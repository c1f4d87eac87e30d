"""What the dispatch mode needs to know about one operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from gpuprobe.hazards.rules import ALSO_WRITTEN
from gpuprobe.virtual import accuracy, values
from gpuprobe.virtual.dispatch.calls import OperatorRow
from gpuprobe.virtual.dispatch.refusals import refusal
from gpuprobe.virtual.kernels.parts import PARTS
from gpuprobe.virtual.operators.running import Extension, extension_of

# Operators that take host tensors next to device ones, as on CUDA. Source: their CUDA kernels'
# checks, in aten/src/ATen/native.
_MIXED: Final = frozenset(
    {
        "copy_",
        "_to_copy",
        "_copy_from",
        "_copy_from_and_resize",
        "index",
        "index_put_",
        "_index_put_impl_",
        "index_put",
        "set_",
        "_pack_padded_sequence",
        "_pad_packed_sequence",
        "_ctc_loss",
        "_cudnn_ctc_loss",
        "_use_cudnn_ctc_loss",
        "tensor_split",
        "record_stream",
        "_fused_adam_",
        "_fused_adamw_",
        "_fused_sgd_",
        "_fused_adagrad_",
        "_foreach_copy_",
        "lift_fresh",
    }
)

# Results that stay on the host though the inputs lie on a device: position by operator.
_HOST_RESULTS: Final = {
    "_pack_padded_sequence": (1,),
    # The random state: _efficient_attention_forward in attention.cu. While a graph is captured it
    # lies on the device; that is not counted.
    "_scaled_dot_product_efficient_attention": (2, 3),
    "_efficient_attention_forward": (2, 3),
}


# In-place operators that do not look at what they overwrite.
_OVERWRITES: Final = frozenset(
    {
        "bernoulli_",
        "cauchy_",
        "copy_",
        "exponential_",
        "fill_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
        "_foreach_copy_",
        "_foreach_zero_",
        "c10d::_allgather_base_",
        "c10d::_reduce_scatter_base_",
        "c10d::allgather_",
        "c10d::allgather_coalesced_",
        "c10d::allgather_into_tensor_coalesced_",
        "c10d::alltoall_",
        "c10d::alltoall_base_",
        "c10d::reduce_scatter_",
        "c10d::reduce_scatter_tensor_coalesced_",
    }
)

# Operators that look at a tensor's shape, and not at its values.
_LIKE: Final = frozenset(
    {
        "empty_like",
        "full_like",
        "ones_like",
        "rand_like",
        "randint_like",
        "randn_like",
        "zeros_like",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
    }
)


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """Looked up once for each operator."""

    name: str
    row: OperatorRow | None
    mixed: bool
    """It takes host tensors next to device ones."""
    fills: bool
    refusal: Callable[..., None] | None
    composite: bool
    draws: bool
    """It takes random numbers from a generator."""
    in_place: bool
    """What it returns is what it was given."""
    writes: bool
    written: tuple[tuple[int, str], ...]
    """Positions and names of the arguments whose memory it writes to."""
    view: bool
    """It makes windows on its first argument's memory, and looks at nothing but shapes."""
    moves: bool
    """It changes which memory its argument lies in, or the window on it, and no values."""
    overwrites: bool
    """What it writes to is not read."""
    like: bool
    """It reads shapes, and no values."""
    each: bool
    """It does the same to each entry of its lists (``foreach``)."""
    pointwise: bool
    """Numbers among its arguments do not change the shape of its result."""
    iterated: bool
    """It makes a result whose strides follow those of its arguments (``TensorIterator``)."""
    remembered: bool
    """Its result is new memory, or its first argument, and depends on the arguments' shapes."""
    by_shape: Callable[..., Any] | None
    parts: Callable[..., Any] | None
    """What it is made of, where that takes memory of its own (`kernels.parts`)."""
    collective: bool
    devices: tuple[int, ...]
    """Positions of devices among the arguments of an operator that is not torch's own ``aten``, and
    whose kernel makes tensors there."""
    needs_values: bool
    host_results: tuple[int, ...]
    extension: Extension | None
    """What is known of another package's operator; None for torch's own."""
    equal: bool
    """It is known to allocate what CUDA's kernels do, or is made of other operators."""
    of_any_type: bool
    """``equal`` is true of dtypes that were not compared as well."""

    @property
    def declares_accesses(self) -> bool:
        return self.extension is not None and self.extension.declares_accesses


def facts_of(func: Any, rows: Mapping[str, OperatorRow]) -> OperatorFacts:
    """``rows``: the lowering table, by ``name`` or ``name.overload``."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    row = rows.get(f"{name}.{schema.overload_name or 'default'}") or rows.get(name)
    also_written = ALSO_WRITTEN.get(name.removeprefix("c10d::"), ())
    return OperatorFacts(
        name=name,
        row=row if schema.name.startswith("aten::") else None,
        mixed=name in _MIXED or name.startswith("_foreach_"),
        fills=name == "copy_",
        refusal=refusal(name),
        composite=_composite(func),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        in_place=bool(schema.returns) and all(map(_written, schema.returns)),
        writes=any(map(_written, schema.arguments)),
        written=()
        if torch.Tag.inplace_view in func.tags
        else tuple(
            (at, argument.name)
            for at, argument in enumerate(schema.arguments)
            if _written(argument) or argument.name in also_written
        ),
        view=_makes_views(func, name) and row is None,
        moves=torch.Tag.inplace_view in func.tags,
        overwrites=name in _OVERWRITES or _returns_only_out(schema),
        like=name in _LIKE,
        each=name.startswith("_foreach_"),
        pointwise=torch.Tag.pointwise in func.tags or name.startswith("_foreach_"),
        iterated=torch.Tag.pointwise in func.tags
        and not any(
            _written(argument) or argument.name == "memory_format" for argument in schema.arguments
        ),
        remembered=_remembered(func, name),
        by_shape=values.BY_SHAPE.get(name),
        parts=None if schema.overload_name else PARTS.get(name),  # not with ``out=`` or names
        collective=schema.name.startswith(("c10d::", "_c10d_functional::")),
        devices=()
        if schema.name.startswith("aten::")
        else tuple(
            at for at, argument in enumerate(schema.arguments) if str(argument.type) == "Device"
        ),
        needs_values=name in values.NEED_VALUES,
        host_results=_HOST_RESULTS.get(name, ()),
        extension=extension_of(func),
        equal=_composite(func) or accuracy.known_equal(func),
        of_any_type=_composite(func) or accuracy.returns_nothing_new(func),
    )


@functools.cache
def on_sparse(facts: OperatorFacts) -> OperatorFacts:
    """The same of a call with sparse tensors, whose kernels are others: the lowering table has
    none of them.
    """
    return replace(facts, row=None)


def _remembered(func: Any, name: str) -> bool:
    schema = func._schema
    if (
        not schema.name.startswith("aten::")
        or torch.Tag.inplace_view in func.tags
        or torch.Tag.dynamic_output_shape in func.tags
        or name in values.BY_SHAPE
        or name in values.NEED_VALUES
        or not any("Tensor" in str(argument.type) for argument in schema.arguments)
    ):
        return False
    written = [at for at, argument in enumerate(schema.arguments) if _written(argument)]
    if written:  # it returns what it writes to, and that is the first argument, or nothing
        return written == [0] and (
            not schema.returns or (len(schema.returns) == 1 and _written(schema.returns[0]))
        )
    return all(
        returned.alias_info is None and str(returned.type) in ("Tensor", "List[Tensor]")
        for returned in schema.returns
    )


def _makes_views(func: Any, name: str) -> bool:
    schema = func._schema
    if not schema.name.startswith("aten::") or not schema.arguments or not schema.returns:
        return False
    first, *rest = schema.arguments
    return (
        not any("Tensor" in str(argument.type) for argument in rest)
        and not _written(first)
        and all(
            given.alias_info is not None and not given.alias_info.is_write
            for given in (first, *schema.returns)
        )
        and name not in PARTS
        and refusal(name) is None
        and extension_of(func) is None
        and not _composite(func)
    )


def _returns_only_out(schema: Any) -> bool:
    """Whether all that is written to are ``out=`` arguments."""
    written = [argument for argument in schema.arguments if _written(argument)]
    return bool(written) and all(argument.is_out for argument in written)


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _composite(func: Any) -> bool:
    """Whether an operator is made of others and has no kernel or formula of its own."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    try:
        if not has(name, "CompositeImplicitAutograd"):
            return False
    except RuntimeError:  # `sym_size` and its kin, which the dispatcher does not know
        return False
    return not any(has(name, key) for key in ("CPU", "Meta", "CompositeExplicitAutograd"))
