"""What a device model reports to whoever watches it: launches, memory, streams, graphs.

A device model (the virtual GPU) calls an `Observer` where one is set, in program order; it need
not know who it is. Tensors are ``Any``: nothing on this floor knows torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

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
    """Where a live storage lies: ``place`` is a device index, `HOST` or `PINNED`. ``key``
    identifies the storage as long as it lives; ``stream`` is the number of the one that it was
    allocated on; ``block`` is None where it has no device memory. ``registered`` is the memory
    that a pinned storage lies in where torch did not allocate it, ``offset`` the storage's first
    byte in there.
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
        """A storage was made."""

    def freed(self, tag: StorageTag) -> None:
        """A storage is gone; its block is not handed on before this returns."""

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
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, index: int
    ) -> None:
        """An operator ran on a device."""

    def host_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """An operator ran on the host."""

    def fused(self, op: str, index: int, reads: Any, writes: Any) -> None:
        """A kernel ran whose work the dispatcher does not show."""

    def host_use(self, tensor: Any, write: bool, op: str) -> None:
        """The host touched a pinned tensor outside the dispatcher."""

    def aliased(self, tensor: Any, array: Any) -> Any:
        """A NumPy array was made over pinned memory. Returns what the program gets."""

    # -- streams and events

    def event_record(self, event: int, index: int, number: int) -> None: ...
    def event_wait(self, event: int, index: int, number: int) -> None: ...
    def event_query(self, event: int) -> None: ...
    def event_synchronize(self, event: int) -> None: ...
    def event_destroyed(self, event: int) -> None: ...
    def stream_synchronize(self, index: int, number: int) -> None: ...
    def device_synchronize(self, index: int) -> None: ...

    # -- the backward pass

    def node_begins(self, node: Any) -> None:
        """Within the backward pass a node of the autograd graph begins, and its streams are
        current; None: all nodes are done.
        """

    # -- graphs

    def capture_begin(self, index: int, number: int) -> None: ...
    def capture_end(self, index: int) -> Any:
        """Returns what `graph_launch` is to be given at each replay."""

    def graph_launch(self, captured: Any, index: int, number: int) -> None: ...
