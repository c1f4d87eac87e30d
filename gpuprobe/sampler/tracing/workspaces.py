"""Which blocks are cuBLAS's workspaces.

torch allocates one for each handle and stream at its first matrix product and keeps it
(``getCurrentCUDABlasHandle`` in ``aten/src/ATen/cuda/CublasHandlePool.cpp``). The allocator's
history has the line of that product only, and on newer GPUs the size alone, 32 MiB, is no proof:
a workspace is the first block of that size for a stream and a thread that no tensor owns when the
step ends.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from gpuprobe.analysis.trace.evidence import BACKWARD, Marks
from gpuprobe.catalogue.gpu_model import chosen_workspace, cublas_workspace
from gpuprobe.model.memory import Category, TraceAction
from gpuprobe.model.trace import EventColumns, Frame, MemoryTrace
from gpuprobe.sampler.hooks.discover import live_tensors
from gpuprobe.sampler.tracing.tensors import plain_tensors
from gpuprobe.torch_support.version import installed

_ALLOC = TraceAction.ALLOC.code
_FREED = (TraceAction.FREE_REQUESTED.code, TraceAction.FREE_COMPLETED.code)
_WORKSPACE = Category.WORKSPACE.code
_NAME = Frame("??", 0, "at::cuda::CUDABlasWorkspace")


@functools.cache
def workspace_bytes(device: str) -> int:
    """The size of a workspace on a device, as torch chooses it."""
    if hasattr(torch._C, "_cuda_getCublasWorkspaceSize"):  # since torch 2.9
        with torch.cuda.device(device):
            return int(torch._C._cuda_getCublasWorkspaceSize())
    return chosen_workspace(cublas_workspace(torch.cuda.get_device_capability(device), installed()))


class Workspaces:
    """The workspaces that the traces of one recording have shown."""

    def __init__(self) -> None:
        self._places: set[tuple[str, int]] = set()

    def name(self, trace: MemoryTrace) -> None:
        """Give the workspaces of a trace their category, and the name of what allocates them as the
        innermost frame. Its columns must be filled.
        """
        size = workspace_bytes(trace.device)
        for i, address in enumerate(trace.baseline.address):
            if (trace.device, address) in self._places and trace.baseline.size[i] == size:
                trace.baseline.category[i] = _WORKSPACE
        rows = list(_kept_rows(trace.events, size))
        if not rows:
            return
        owned = _addresses_of_tensors(trace.device)
        marks = Marks(trace.stacks)
        met: set[tuple[int, bool]] = set()
        for row in rows:
            address = trace.events.address[row]
            stack = trace.events.stack[row]
            key = trace.events.column("stream")[row], bool(marks.of(stack) & BACKWARD)
            if key in met or address in owned:
                continue
            met.add(key)
            self._places.add((trace.device, address))
            trace.events.category[row] = _WORKSPACE
            frames = trace.stacks.stacks[stack]
            name = trace.stacks.frame(_NAME)
            if name not in frames:  # the virtual GPU's history has it
                trace.events.stack[row] = trace.stacks.stack((name, *frames))


def _kept_rows(events: EventColumns, size: int) -> Iterator[int]:
    """The allocations of a size that live at the end of the trace."""
    live: dict[int, int] = {}
    for row, (action, nbytes) in enumerate(zip(events.action, events.size, strict=True)):
        if nbytes != size:
            continue
        if action == _ALLOC:
            live[events.address[row]] = row
        elif action in _FREED:
            live.pop(events.address[row], None)
    return iter(sorted(live.values()))


def _addresses_of_tensors(device: str) -> set[int]:
    """Where the storages of all tensors on a device begin."""
    found = set()
    for tensor in live_tensors():
        for plain in plain_tensors(tensor):
            if plain.is_cuda and str(plain.device) == device:
                found.add(plain.untyped_storage().data_ptr())
    return found
