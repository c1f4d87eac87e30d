"""What the watch asks of a device model: the virtual GPU's machine, or torch's CUDA itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gpuprobe.hazards.observer import Observer, RegisteredMemory, StorageTag


class ThreadState(Protocol):
    """What one thread has current."""

    @property
    def device(self) -> int: ...
    @property
    def streams(self) -> dict[int, int]:
        """The current stream of each device; 0 where there is none."""

    @property
    def reason(self) -> str:
        """Why the copy at hand is made, where torch itself makes it; else empty."""


class NodeStreamModel(Protocol):
    """Which streams nodes of the autograd graph run on."""

    def of(self, node: Any) -> dict[int, int] | None:
        """Stream numbers by device; None where they are not known."""


class DeviceModel(Protocol):
    """Devices, streams, and where tensors lie. It reports to ``observer``, where there is one."""

    observer: Observer | None

    @property
    def devices(self) -> Sequence[Any]: ...
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
        """What was taken for granted, with how often."""

    @property
    def compiled(self) -> Mapping[str, None]:
        """Names of what was given to torch.compile and runs eagerly."""

    @property
    def nodes(self) -> NodeStreamModel | None:
        """The streams of the backward pass's nodes; None where torch itself orders them, and
        reports how.
        """

    def stream(self, index: int) -> int:
        """The stream that work of this thread on a device goes to."""

    def blocking(self, index: int, number: int) -> bool:
        """Whether a stream and the legacy default stream of its device wait for each other: one
        that other code made without ``cudaStreamNonBlocking``.
        """

    def stream_chosen(self, index: int) -> bool:
        """Whether code within the backward pass made another stream current itself."""

    def place_of(self, tensor: Any) -> int:
        """Device index, ``HOST`` or ``PINNED``."""

    def known_integers(self, tensor: Any) -> list[int] | None:
        """The values of an integer tensor, where they can be had without waiting for a device."""

    def tag_of(self, tensor: Any) -> StorageTag | None:
        """The tag of a tensor's storage, None where it has none."""
