"""Which reduction a collective is asked for.

The operators of ``c10d`` are given it as an object of C++. Since torch 2.13 at the latest Python
code can read it; up to 2.9 it cannot, and what the collective was called with is remembered.
"""

from __future__ import annotations

import functools
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
