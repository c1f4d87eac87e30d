"""``torch.distributed`` in a pretended job: which reduction a collective performs, and checkpoints
of which this rank writes its own part.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from gpuprobe.patching import Patches

_METHODS: Final = (
    "_reduce_scatter_base",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
)
"""Methods of ``ProcessGroup`` that are told a reduction, in their options or by itself."""


class Reductions:
    """The reduction that each thread has asked for."""

    def __init__(self, patches: Patches) -> None:
        from torch.distributed import ProcessGroup, ReduceOp

        self._kinds: Any = ReduceOp.RedOpType
        self._readable = "op" in torch.classes.c10d.ReduceOp()._method_names()
        self._asked = threading.local()
        if not self._readable:
            for name in _METHODS:
                patches.set(ProcessGroup, name, self._method(getattr(ProcessGroup, name)))

    def kind(self, reduce_op: Any) -> Any:
        """The ``RedOpType`` of what an operator of ``c10d`` was given."""
        if self._readable:
            return reduce_op.op()
        # C++ code asks for nothing but sums: the reducer of DistributedDataParallel and its
        # hooks (torch/csrc/distributed/c10d/reducer.cpp, default_comm_hooks.cpp).
        return getattr(self._asked, "kind", self._kinds.SUM)

    @contextmanager
    def functional(self, func: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """Around an operator of ``_c10d_functional``, which is told the reduction's name."""
        names = [argument.name for argument in func._schema.arguments]
        if self._readable or "reduce_op" not in names or func._schema.name.startswith("c10d::"):
            yield
            return
        at = names.index("reduce_op")
        name = args[at] if at < len(args) else kwargs["reduce_op"]
        with self._ask(getattr(self._kinds, str(name).upper(), self._kinds.SUM)):
            yield

    @contextmanager
    def _ask(self, kind: Any) -> Iterator[None]:
        before = getattr(self._asked, "kind", self._kinds.SUM)
        self._asked.kind = kind
        try:
            yield
        finally:
            self._asked.kind = before

    def _method(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            with self._ask(self._told((*args, *kwargs.values()))):
                return original(*args, **kwargs)

        return method

    def _told(self, values: tuple[Any, ...]) -> Any:
        for value in values:
            value = getattr(value, "reduceOp", value)
            if isinstance(value, self._kinds):
                return value
            if isinstance(value, torch.distributed.ReduceOp):
                return value.op
        return self._kinds.SUM


_MODULE: Final = "torch.distributed.checkpoint"


class Checkpoints:
    """Saves and loads of one rank, without the plans of the others."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._installed = False

    def install(self) -> None:
        """Do so now, if the program has imported it. To import it here would cost 400 ms."""
        if self._installed or _MODULE not in sys.modules:
            return
        self._installed = True
        from torch.distributed.checkpoint import default_planner, metadata, utils

        wrapper: Any = utils._DistWrapper
        original = wrapper.__init__

        @functools.wraps(original)
        def init(this: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
            original(this, group, False, coordinator_rank)

        self._patches.set(wrapper, "__init__", init)
        # The plan of one rank does not cover what is sharded. What is wrong with a plan is a list,
        # of nothing for one that is fine; in early versions True is the answer for that.
        fine = default_planner._validate_global_plan([], metadata.Metadata({}))
        self._patches.set(default_planner, "_validate_global_plan", lambda plan, about: fine)
