"""What a device model reports to its observer: launches, memory, streams, graphs.

A device model (the virtual GPU) calls its `Observer`, if it has one, in program order. Torch's
types are ``Any``: this layer does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

Tensor: TypeAlias = Any
Operator: TypeAlias = Any
Node: TypeAlias = Any
"""Torch's types, which this layer does not import."""

HOST: Final = -1
"""Place of ordinary host memory. Places from 0 on are device indices."""
PINNED: Final = -2
"""Place of page-locked host memory."""


class AllocatedBlock(Protocol):
    """A block of a device's allocator; ``address`` in bytes within that device."""

    @property
    def address(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RegisteredMemory:
    """Host memory that the program pinned itself (``cudaHostRegister``), in bytes."""

    address: int
    nbytes: int

    def overlaps(self, address: int, nbytes: int) -> bool:
        return self.address < address + nbytes and address < self.address + self.nbytes


class StorageTag(Protocol):
    """The memory of a live storage. ``place``: a device index, `HOST` or `PINNED`; ``key``: its
    identity while it is live; ``stream``: the number of the stream that it was allocated on;
    ``block``: None if it has no device memory; ``registered``: the memory of a pinned storage that
    torch did not allocate, with ``offset``, the storage's first byte in there.
    """

    @property
    def key(self) -> int: ...
    @property
    def place(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def stream(self) -> int: ...
    @property
    def block(self) -> AllocatedBlock | None: ...
    @property
    def registered(self) -> RegisteredMemory | None: ...
    @property
    def offset(self) -> int: ...


class Observer(Protocol):
    """Streams are (device index, stream number); 0 is a device's default stream."""

    # -- memory

    def allocated(self, tag: StorageTag) -> None:
        """A storage was created."""

    def freed(self, tag: StorageTag) -> None:
        """A storage was freed; its block is not reused before this returns."""

    def resized(self, tag: StorageTag, old: AllocatedBlock | None) -> None:
        """A storage has another block in place of the ``old`` one."""

    def record_stream(self, tag: StorageTag, number: int) -> None:
        """``Tensor.record_stream``, with a stream of the storage's own device."""

    def unregistered(self, memory: RegisteredMemory) -> None:
        """Host memory is pageable again (``cudaHostUnregister``)."""

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``."""

    # -- work

    def device_op(
        self,
        func: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Tensor,
        index: int,
    ) -> None:
        """An operator ran on a device."""

    def host_op(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        """An operator ran on the host."""

    def fused(self, op: str, index: int, reads: Tensor, writes: Tensor) -> None:
        """A kernel ran that does not go through the dispatcher."""

    def host_use(self, tensor: Tensor, write: bool, op: str) -> None:
        """The host touched a pinned tensor outside the dispatcher."""

    def aliased(self, tensor: Tensor, array: object) -> object:
        """A NumPy array was created over pinned memory. Returns the array for the program."""

    # -- streams and events

    def event_record(self, event: int, index: int, number: int) -> None: ...
    def event_wait(self, event: int, index: int, number: int) -> None: ...
    def event_query(self, event: int) -> None: ...
    def event_synchronize(self, event: int) -> None: ...
    def event_destroyed(self, event: int) -> None: ...
    def stream_synchronize(self, index: int, number: int) -> None: ...
    def device_synchronize(self, index: int) -> None: ...

    # -- the backward pass

    def node_begins(self, node: Node) -> None:
        """A node of the autograd graph begins in a backward pass, with its streams current; None:
        all nodes are done.
        """

    # -- graphs

    def capture_begin(self, index: int, number: int) -> None: ...
    def capture_end(self, index: int) -> Any:
        """Returns the capture, an argument of `graph_launch` at each replay."""

    def graph_launch(self, captured: Any, index: int, number: int) -> None: ...
