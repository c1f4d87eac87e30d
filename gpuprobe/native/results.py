"""The result of an estimated run, from which its figures are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuprobe.catalogue.gpu_model import GpuModel
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace
from gpuprobe.model.values import Bytes

if TYPE_CHECKING:
    from gpuprobe.torch_support.traffic import Traffic


@dataclass(frozen=True)
class DeviceRun:
    """The result of a whole run on one GPU. ``number``: its number in the machine; ``index``: its
    index in the program.
    """

    index: int
    number: int
    model: GpuModel
    peak_allocated: int
    peak_reserved: int
    trace: MemoryTrace


@dataclass
class EngineRun:
    """The result of a whole run on ``count`` simulated GPUs, of which ``devices`` were used.

    ``settings`` of the allocator; ``rank`` of ``ranks``. ``traffic``: the transfers to other ranks,
    None for a single process; its buffers take ``nccl_low`` to ``nccl_high`` bytes.
    """

    count: int
    devices: Sequence[DeviceRun]
    settings: AllocatorSettings
    compute: str
    nccl_low: Bytes
    nccl_high: Bytes
    ranks: int = 1
    rank: int = 0
    assumed: list[str] = field(default_factory=list)
    unused_assumptions: Sequence[str] = ()
    traffic: Traffic | None = None

    def assume(self, text: str) -> None:
        """Note an assumption behind the figures, once."""
        if text not in self.assumed:
            self.assumed.append(text)
