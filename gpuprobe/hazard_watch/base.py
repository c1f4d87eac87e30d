"""The interface of a device model: the virtual GPU's machine, or torch's CUDA itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor
from torch.autograd.graph import Node

from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.events import BlockAccess, CodePosition, Site
from gpuprobe.hazards.observer import Observer, RegisteredMemory, StorageTag


class ThreadState(Protocol):
    """The current device and streams of one thread."""

    @property
    def device(self) -> int: ...
    @property
    def streams(self) -> dict[int, int]:
        """The current stream of each device; 0 by default."""

    @property
    def reason(self) -> str:
        """Why torch itself makes the current copy; else empty."""


class NodeStreamModel(Protocol):
    """The streams that nodes of the autograd graph run on."""

    def of(self, node: Node) -> dict[int, int] | None:
        """Stream numbers by device; None if unknown."""


class DeviceModel(Protocol):
    """Devices, streams, and the memory of tensors. Reports to its ``observer``, if any."""

    observer: Observer | None

    @property
    def devices(self) -> Sequence[object]: ...
    @property
    def tags(self) -> Mapping[int, StorageTag]:
        """Tags of live storages, by their key."""

    @property
    def registered(self) -> Mapping[int, RegisteredMemory]:
        """Host memory that the program pinned itself, by address."""

    @property
    def local(self) -> ThreadState: ...
    @property
    def assumed(self) -> Mapping[str, int]:
        """Assumptions, with the number of times that each was made."""

    @property
    def compiled(self) -> Mapping[str, None]:
        """Names of functions passed to torch.compile, which run eagerly."""

    @property
    def nodes(self) -> NodeStreamModel | None:
        """The streams of the backward pass's nodes; None if torch orders and reports them."""

    def stream(self, index: int) -> int:
        """The current stream of this thread on a device."""

    def blocking(self, index: int, number: int) -> bool:
        """Whether a stream and the legacy default stream of its device wait for each other: other
        code created it without ``cudaStreamNonBlocking``.
        """

    def stream_chosen(self, index: int) -> bool:
        """Whether the program made another stream current within the backward pass."""

    def place_of(self, tensor: Tensor) -> int:
        """Device index, ``HOST`` or ``PINNED``."""

    def known_integers(self, tensor: Tensor) -> list[int] | None:
        """The values of an integer tensor; None if reading them would wait for a device."""

    def tag_of(self, tensor: Tensor) -> StorageTag | None:
        """The tag of a tensor's storage, None if it has none."""


class OrderSource(Protocol):
    """The part of an event source that the models of libraries' synchronisation use."""

    machine: DeviceModel
    engine: Engine
    active: Engine
    """The engine that gets launches and waits: within a capture, the graph's own."""

    def site(self) -> CodePosition | None:
        """The program's current line."""

    def device_of_address(self, address: int) -> int:
        """The device of the memory at ``address``."""

    def event_wait(self, event: int, index: int, number: int) -> None:
        """A stream waits for an event."""

    def add_accesses(self, accesses: list[BlockAccess], value: object, write: bool) -> None:
        """Add the accesses to a tensor, or to the tensors of a list."""

    def record_names(self, actor: int, accesses: Sequence[BlockAccess], site: Site) -> None:
        """Record a place's names for the tensors of other streams that it uses."""
