"""What the models of libraries' synchronisation need of an event source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpuprobe.hazard_watch.device import Cuda
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.events import BlockAccess, Site


class OrderSource(Protocol):
    """The part of `gpuprobe.hazard_watch.streams.StreamSource` that these models use."""

    machine: Cuda
    engine: Engine
    active: Engine
    """The engine that gets launches and waits: within a capture, the graph's own."""

    def device_of_address(self, address: int) -> int:
        """The device of the memory at ``address``."""

    def add_accesses(self, accesses: list[BlockAccess], value: object, write: bool) -> None:
        """Add the accesses to a tensor, or to the tensors of a list."""

    def record_names(self, actor: int, accesses: Sequence[BlockAccess], site: Site) -> None:
        """Record a place's names for the tensors of other streams that it uses."""
