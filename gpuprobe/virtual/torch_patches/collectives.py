"""torch.distributed on a virtual machine: NCCL's place is taken by gloo, or by nothing at all.

With values, ``nccl`` becomes ``gloo``: the same results through host memory. Without values, or
where a cluster is only pretended (``ranks``), collectives return at once and move nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine

_NCCL = "NCCL's own buffers (some hundred MiB per communicator) are not counted"


def install(machine: Machine, patches: Patches) -> None:
    """Answer for NCCL, where this torch has torch.distributed at all."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    _meta_kernels(patches)
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        name = None if backend is None else str(backend).lower()
        ranks = machine.ranks
        if ranks > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            kwargs = {key: value for key, value in kwargs.items() if key in ("timeout",)}
            machine.assume(_NCCL)
            machine.assume(f"{ranks} ranks: this one's memory, with nobody to talk to")
            original("fake", store=FakeStore(), rank=0, world_size=ranks, **kwargs)
            return
        if name is None or "nccl" in name:
            machine.assume(_NCCL)
            backend = "gloo"
        kwargs.pop("device_id", None)  # it would have NCCL connect at once
        original(backend, *args, **kwargs)

    answers = {"init_process_group": init_process_group, "is_nccl_available": lambda: True}
    patches.set_all(dist.distributed_c10d, answers, "torch.distributed")


def _meta_kernels(patches: Patches) -> None:
    """Collectives of tensors without values: done at once."""
    library = torch.library.Library("c10d", "IMPL")
    patches.add(library._destroy)
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("c10d::") or not schema.returns:
            continue
        returns = [str(item.type) for item in schema.returns]
        if "Work" not in returns[-1]:
            continue
        name = schema.name.removeprefix("c10d::")
        library.impl(name, _done(len(returns)), "Meta")


def _done(returns: int) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        results = args[: returns - 1]
        future: Any = torch.futures.Future()
        future.set_result(_flat(args[0]))
        work = torch._C._distributed_c10d._create_work_from_future(future).boxed()
        return (*results, work) if returns > 1 else work

    return kernel


def _flat(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for inner in value for item in _flat(inner)]
    return []
