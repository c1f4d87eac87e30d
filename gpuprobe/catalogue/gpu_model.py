"""What is known of one kind of GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gpuprobe.model.values import ReadStatus, Unavailable

_KIB: Final = 1024
_WORKSPACE: Final = 4096 * _KIB * 2 + 16 * _KIB * 8
_WORKSPACE_LARGE: Final = 32 * _KIB * _KIB
_UNKNOWN: Final = Unavailable("no source available", ReadStatus.NOT_COLLECTED)


@dataclass(frozen=True)
class GpuModel:
    """One kind of GPU, with the field names of torch's device properties.

    Sizes are in bytes, clocks in kHz, the bus width in bits. ``context`` is an interval: what
    a process holds on the GPU apart from what torch's allocator reserved, once its first kernels
    are loaded (the CUDA context with the libraries' code), for one process on one GPU without
    NCCL. ``sources`` maps a field to where its value was read; a figure that no source gives
    is `Unavailable`.
    """

    name: str
    title: str
    total_memory: int
    capability: tuple[int, int]
    multi_processor_count: int
    max_threads_per_multi_processor: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    shared_memory_per_block: int = 48 * _KIB
    regs_per_multiprocessor: int = 65536
    max_threads_per_block: int = 1024
    warp_size: int = 32
    L2_cache_size: int | Unavailable = _UNKNOWN
    clock_rate: int | Unavailable = _UNKNOWN
    memory_clock_rate: int | Unavailable = _UNKNOWN
    memory_bus_width: int | Unavailable = _UNKNOWN
    context: tuple[int, int] = (0, 0)
    aliases: tuple[str, ...] = ()
    total_memory_seen: Mapping[int, str] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def major(self) -> int:
        return self.capability[0]

    @property
    def minor(self) -> int:
        return self.capability[1]

    @property
    def context_low(self) -> int:
        return self.context[0]

    @property
    def context_high(self) -> int:
        return self.context[1]

    @property
    def context_bytes(self) -> int:
        """The upper end of ``context``: a plan made with it does not run out of memory."""
        return self.context[1]

    @property
    def resident_threads(self) -> int:
        """Threads that run at once on the whole GPU. The context reserves memory for each."""
        return self.multi_processor_count * self.max_threads_per_multi_processor


def cublas_workspace(capability: tuple[int, int], torch: tuple[int, int] = (99, 0)) -> int:
    """Bytes of the workspace torch allocates per cuBLAS handle and stream, by default.

    ``torch`` is its (major, minor). Source: ``parseChosenWorkspaceSize`` in
    ``aten/src/ATen/cuda/CublasHandlePool.cpp``: ``:4096:2:16:8`` (8,519,680 bytes), and 32 MiB
    on sm_90; on compute capability 10.x and 12.x since pytorch/pytorch#175344, on 11.x since
    pytorch/pytorch#189312. Those changes are assumed to be in torch 2.12 and 2.14, the first
    releases branched after them; ``CUBLAS_WORKSPACE_CONFIG`` overrides all of these sizes.
    """
    major = capability[0]
    large = (
        capability == (9, 0)
        or (major in (9, 10, 12) and torch >= (2, 12))
        or (major == 11 and torch >= (2, 14))
    )
    return _WORKSPACE_LARGE if large else _WORKSPACE


def chosen_workspace(default: int) -> int:
    """``CUBLAS_WORKSPACE_CONFIG`` (``:SIZE:COUNT`` in KiB, repeated), else the GPU's default.

    Source: ``parseChosenWorkspaceSize``, as for `cublas_workspace`.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if not pairs:
        return default
    return sum(int(size) * _KIB * int(count) for size, count in pairs)
