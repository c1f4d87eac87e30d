"""The reads and writes of operators, and whether the host waits for them."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload

from gpuprobe.hazard_watch.rows import is_indexed
from gpuprobe.hazards.rules import ALSO_WRITTEN, SYNCS
from gpuprobe.torch_support.kernels import runs_kernel, takes_shape

# Deterministic algorithms fill the results of these (``torch.utils.deterministic``).
_UNINITIALIZED: Final = frozenset(
    """empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_""".split()  # noqa: SIM905
)
# The host learns how many there are, and launches the kernel that writes them after that.
SYNCS_FIRST: Final = frozenset({"nonzero", "mask", "repeat_interleave"})


class Plan:
    """One operator's reads, writes and waits; created once."""

    __slots__ = (
        "collective",
        "copies",
        "functional",
        "indexes",
        "kernel",
        "launches",
        "like",
        "name",
        "operator",
        "reason",
        "results",
        "rows",
        "statistics",
        "training",
        "uninitialized",
        "written",
    )

    def __init__(self, func: OpOverload) -> None:
        self.operator = func  # kept, so that no other one gets its identity
        schema = func._schema
        self.name = schema.name.rpartition("::")[2]
        also = ALSO_WRITTEN.get(self.name, ())
        names = [argument.name for argument in schema.arguments]
        self.written = tuple(
            (argument.alias_info is not None and argument.alias_info.is_write)
            or argument.name in also
            for argument in schema.arguments
        )
        # Running statistics are written in training only, though the schema always marks them.
        self.training = names.index("training") if "training" in names else None
        self.statistics = tuple(name in ("running_mean", "running_var") for name in names)
        alias = [item.alias_info for item in schema.returns]
        self.kernel = runs_kernel(func)
        self.like = takes_shape(self.name)
        self.results = bool(alias) and all(item is None for item in alias)
        self.reason = SYNCS.get(self.name)
        if self.name == "repeat_interleave" and func._overloadname == "Tensor":
            self.reason = "repeat_interleave"
        self.indexes = self.name in ("index", "index_put_", "_index_put_impl_", "index_put")
        self.copies = self.name in ("_to_copy", "copy_", "_foreach_copy_")
        self.collective = schema.name.startswith("c10d::")
        self.functional = (
            self.kernel
            and schema.name.startswith("_c10d_functional::")
            and (self.name == "wait_tensor" or "group_name" in names)
        )
        self.rows = is_indexed(self.name)
        self.uninitialized = self.name in _UNINITIALIZED and not self.kernel
        self.launches = self.kernel and not self.copies and not self.functional

    def writes(self, at: int, args: tuple[Any, ...]) -> bool:
        """Whether the call writes its argument ``at``."""
        if not self.written[at]:
            return False
        if self.training is None or not self.statistics[at] or self.training >= len(args):
            return True
        return bool(args[self.training])

    def sync_reason(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why the host waits in this call, None if it does not."""
        if self.indexes:
            return self._masked(args)
        if self.reason == "repeat_interleave" and kwargs.get("output_size") is not None:
            return None
        return self.reason

    def _masked(self, args: tuple[Any, ...]) -> str | None:
        """Indexing with a boolean mask waits for the number of elements."""
        masks = [
            item
            for item in args[1]
            if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
        ]
        if not masks:
            return None
        if self.name != "index" and len(args) > 2 and args[2].numel() == 1 and len(args[1]) == 1:
            return None  # masked_fill
        return "mask"


def fills_uninitialized() -> bool:
    """Whether a kernel fills uninitialised memory."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory
    )


def needs_temporary(target: Tensor, source: Tensor, *, to_device: bool) -> bool:
    """Whether a copy with ``non_blocking`` between pinned memory and a device still goes through
    pageable memory: the host's side is not contiguous, or is broadcast.
    Source: ``copy_requires_temporaries`` and ``copy_kernel_cuda`` in ``native/cuda/Copy.cu``.
    """
    if target.numel() <= 1:
        return False
    same = source.shape == target.shape
    direct = same and source.dtype == target.dtype
    if direct and (
        source.stride() == target.stride()
        and (source.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(source))
    ):
        return False
    on_host = source if to_device else target
    return not ((same or not to_device) and on_host.is_contiguous())
