"""``torch.distributed`` in a pretended job: which reduction a collective performs, and checkpoints.

The operators of ``c10d`` get the reduction as a C++ object. Since torch 2.13 at the latest Python
code can read it; up to 2.9 it cannot, and the argument of the collective is remembered.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._ops import OpOverload

from gpuprobe.patching import Patches

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_METHODS: Final = (
    "_reduce_scatter_base",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
)
"""Methods of ``ProcessGroup`` with a reduction as an argument, or in their options."""


class Reductions:
    """The reduction that each thread has requested."""

    def __init__(self, patches: Patches) -> None:
        from torch.distributed import ProcessGroup, ReduceOp

        self._kinds: Any = ReduceOp.RedOpType
        self._readable = "op" in torch.classes.c10d.ReduceOp()._method_names()
        self._requested = threading.local()
        if not self._readable:
            for name in _METHODS:
                patches.set(ProcessGroup, name, self._method(getattr(ProcessGroup, name)))

    def kind(self, reduce_op: Any) -> Any:
        """The ``RedOpType`` of the argument of an operator of ``c10d``."""
        if self._readable:
            return reduce_op.op()
        # C++ code requests only sums: the reducer of DistributedDataParallel and its hooks
        # (torch/csrc/distributed/c10d/reducer.cpp, default_comm_hooks.cpp).
        return getattr(self._requested, "kind", self._kinds.SUM)

    @contextmanager
    def functional(self, func: OpOverload, args: Any, kwargs: Any) -> Iterator[None]:
        """Context of an operator of ``_c10d_functional``, which gets the reduction's name."""
        names = [argument.name for argument in func._schema.arguments]
        if self._readable or "reduce_op" not in names or func._schema.name.startswith("c10d::"):
            yield
            return
        at = names.index("reduce_op")
        name = args[at] if at < len(args) else kwargs["reduce_op"]
        with self._request(getattr(self._kinds, str(name).upper(), self._kinds.SUM)):
            yield

    @contextmanager
    def _request(self, kind: Any) -> Iterator[None]:
        before = getattr(self._requested, "kind", self._kinds.SUM)
        self._requested.kind = kind
        try:
            yield
        finally:
            self._requested.kind = before

    def _method(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            with self._request(self._reduce_op_of((*args, *kwargs.values()))):
                return original(*args, **kwargs)

        return method

    def _reduce_op_of(self, values: tuple[object, ...]) -> Any:
        for value in values:
            value = getattr(value, "reduceOp", value)
            if isinstance(value, self._kinds):
                return value
            if isinstance(value, torch.distributed.ReduceOp):
                return value.op
        return self._kinds.SUM


_MODULE: Final = "torch.distributed.checkpoint"


class Checkpoints:
    """Saves and loads of one rank, without the plans of the others: this rank writes its own
    part.
    """

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._installed = False

    def install(self) -> None:
        """Install this, if the program has imported ``torch.distributed.checkpoint``. To import it
        here would cost 400 ms.
        """
        if self._installed or _MODULE not in sys.modules:
            return
        self._installed = True
        from torch.distributed.checkpoint import default_planner, metadata, utils

        wrapper: Any = utils._DistWrapper
        original = wrapper.__init__

        @functools.wraps(original)
        def init(
            this: Any, group: ProcessGroup | None, use_dist: bool, coordinator_rank: int
        ) -> None:
            original(this, group, False, coordinator_rank)

        self._patches.set(wrapper, "__init__", init)
        # The plan of one rank does not cover everything that is sharded. The errors of a plan are a
        # list, empty for a valid one; early versions return True then.
        valid = default_planner._validate_global_plan([], metadata.Metadata({}))
        self._patches.set(default_planner, "_validate_global_plan", lambda plan, about: valid)
