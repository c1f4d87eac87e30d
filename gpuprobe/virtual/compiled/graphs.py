"""``mode="reduce-overhead"``: what CUDA graphs of compiled code do to memory.

torch keeps all graphs of a device in one private pool, and copies there the arguments that have
another address in each call (``torch/_inductor/cudagraph_trees.py``: ``CUDAGraphNode``). Here the
wrapper runs each time, with its memory from that pool; a replay's allocations are those of the
capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.torch_patches.intercept import placed_on
from gpuprobe.virtual.torch_patches.keys import below

_META = torch.device("meta")


def install(machine: Machine, patches: Patches) -> None:
    from torch._inductor import compile_fx, cudagraph_trees

    pools: dict[int, tuple[int, int]] = {}

    def cudagraphify(
        model: Callable[..., Any],
        static_input_idxs: Sequence[int] = (),
        *,
        device_index: int,
        **options: Any,
    ) -> Callable[..., Any]:
        if device_index not in pools:
            pools[device_index] = torch.cuda.graph_pool_handle()
        return _Captured(machine, model, frozenset(static_input_idxs), device_index,
                         pools[device_index])  # fmt: skip

    patches.set(compile_fx, "cudagraphify", cudagraphify)
    # There are no trees of captured graphs.
    patches.set(cudagraph_trees, "get_manager", lambda *args, **kwargs: None)
    try:
        from torch._inductor import output_code
    except ImportError:  # torch 2.5, where the graph's own method asks for a manager
        return
    patches.set(output_code, "maybe_handle_backward_generation", lambda *args: None)


class _Captured:
    """One graph of the compiler's that CUDA would capture."""

    def __init__(
        self,
        machine: Machine,
        wrapper: Callable[..., Any],
        static: frozenset[int],
        device: int,
        pool: tuple[int, int],
    ) -> None:
        self._machine = machine
        self._wrapper = wrapper
        self._static = static
        self._device = device
        self._pool = pool
        self._copies: list[Any] | None = None

    def __call__(self, given: list[Any]) -> Any:
        torch._C._cuda_beginAllocateToPool(self._device, self._pool)
        try:
            if self._copies is None:
                self._copies = [
                    self._copy(item) for at, item in enumerate(given) if self._moves(at, item)
                ]
            return self._wrapper(given)
        finally:
            torch._C._cuda_endAllocateToPool(self._device, self._pool)

    def _moves(self, at: int, value: Any) -> bool:
        """Whether an argument is copied to memory of the graph's."""
        if at in self._static or not isinstance(value, torch.Tensor):
            return False
        tag = self._machine.tag_of(value)
        if tag is not None and tag.held is not None:
            tag = self._machine.tags.get(tag.held._cdata)
        if tag is None or tag.place != self._device or tag.block is None:
            return False
        pool = self._machine.devices[self._device].sim.pools.get(self._pool[1])
        return pool is None or tag.block.free_list.pool not in (pool.small, pool.large)

    def _copy(self, value: Any) -> Any:
        with placed_on(self._machine, self._device), below():
            return torch.ops.aten.empty_strided.default(
                value.size(), value.stride(), dtype=value.dtype, device=_META
            )
