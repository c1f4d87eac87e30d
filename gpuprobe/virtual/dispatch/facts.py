"""What the dispatch mode needs to know about one operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from gpuprobe.virtual import values
from gpuprobe.virtual.dispatch.calls import OperatorRow
from gpuprobe.virtual.dispatch.refusals import refusal

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


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """Looked up once for each operator."""

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
    by_shape: Callable[..., Any] | None
    needs_values: bool
    host_results: tuple[int, ...]


def facts_of(func: Any, rows: Mapping[str, OperatorRow]) -> OperatorFacts:
    """``rows``: the lowering table, by ``name`` or ``name.overload``."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    row = rows.get(f"{name}.{schema.overload_name or 'default'}") or rows.get(name)
    return OperatorFacts(
        row=row if schema.name.startswith("aten::") else None,
        mixed=name in _MIXED or name.startswith("_foreach_"),
        fills=name == "copy_",
        refusal=refusal(name),
        composite=_composite(func),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        in_place=bool(schema.returns) and all(map(_written, schema.returns)),
        writes=any(map(_written, schema.arguments)),
        by_shape=values.BY_SHAPE.get(name),
        needs_values=name in values.NEED_VALUES,
        host_results=_HOST_RESULTS.get(name, ()),
    )


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
