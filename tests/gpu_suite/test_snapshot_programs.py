"""The programs allocate as the snapshots show: compared allocation by allocation.

Of the forward passes every size can be compared without a GPU. A backward pass allocates
otherwise on the CPU (or without memory, as here) than on CUDA: that is what the estimator is for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shared_files import shared_snapshots
from snapshot_programs import NAMES, programs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gpuprobe
from gpuprobe.model.memory import TraceAction

SNAPSHOTS = {path.stem: path for path in shared_snapshots() if path.stem in NAMES}
WORKSPACE = 32 << 20


class Births(TorchDispatchMode):
    """The size of every storage that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for x in _tensors(out):
            storage = x.untyped_storage()
            if storage._cdata not in known and storage.nbytes():
                self.sizes.append(storage.nbytes())
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", NAMES)
def test_a_program_runs(name: str) -> None:
    program = programs()[name]
    assert sum(1 for _ in program.run("cpu", program.tiny)) == 1


@pytest.mark.parametrize(
    ("name", "beside"), [("lm_medium_ctx256_inference", []), ("lm_ctx128_forward", [WORKSPACE])]
)
def test_every_allocation_is_the_recorded_one(name: str, beside: list[int]) -> None:
    """``beside``: what cuBLAS takes."""
    if name not in SNAPSHOTS:
        pytest.skip("the public snapshots are not here")
    births = Births()
    with births:
        run = programs()[name].run("meta", programs()[name].sizes)
        next(run)
        births.sizes.clear()
        assert next(run, None) is None
    (trace,) = gpuprobe.load(SNAPSHOTS[name]).ranks[0].load_traces()
    alloc = TraceAction.ALLOC.code
    events = trace.events
    recorded = [s for a, s in zip(events.action, events.size, strict=True) if a == alloc]
    for size in beside:
        recorded.remove(size)
    assert births.sizes == recorded
