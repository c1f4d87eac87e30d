"""Torch's CUDA as the hazard watch knows it: devices, streams, and the memory of tensors."""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import Node
from torch.utils._python_dispatch import _disable_current_modes

from gpuprobe.hazard_watch.host_integers import HostIntegers
from gpuprobe.hazard_watch.node_streams import NodeStreams
from gpuprobe.hazards.footprint import Footprint
from gpuprobe.torch_support.memory_history import history
from gpuprobe.torch_support.operator_calls import unhandled
from gpuprobe.torch_support.tensors import storage_key

HOST: Final = -1
"""Place of ordinary host memory. Places from 0 on are device indices."""
PINNED: Final = -2
"""Place of page-locked host memory."""

_PRIORITIES: Final = 4
_POOL: Final = 32
_POOLED: Final = _PRIORITIES * _POOL
"""Streams that torch makes of each priority and device (``c10/cuda/CUDAStream.cpp``)."""
_DRIVER: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING


@dataclass(frozen=True, slots=True)
class RegisteredMemory:
    """Host memory that the program pinned itself (``cudaHostRegister``), in bytes."""

    address: int
    nbytes: int

    def overlaps(self, address: int, nbytes: int) -> bool:
        return self.address < address + nbytes and address < self.address + self.nbytes


class Tag(weakref.ref[UntypedStorage]):
    """The tag of a storage on a device, or of a pinned one that a copy used. ``place``: a device
    index or `PINNED`; ``key``: the storage's identity while it is live; ``stream``: the number of
    the stream that it was allocated on; ``block``: the address of its memory on a device, or 0;
    ``registered``: the memory of a pinned storage that torch did not allocate, with ``offset``, the
    storage's first byte in there.
    """

    __slots__ = ("block", "key", "nbytes", "offset", "place", "registered", "stream", "whole")

    key: int
    nbytes: int
    place: int
    stream: int
    block: int
    registered: RegisteredMemory | None
    offset: int
    whole: Footprint | None
    """All of its bytes, once a tensor over all of them was used."""


class _Local(threading.local):
    """The current device and streams of one thread."""

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}

    @property
    def device(self) -> int:
        return torch.cuda.current_device()


class EarlierBlocks:
    """The blocks of the caching allocator at the start of a check, with their streams."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._streams: list[int] = []
        if not torch.cuda.is_initialized():
            return
        # torch.cuda.memory_snapshot() of torch 2.13 releases a reference to True that it does not
        # own: Python before 3.12 aborts when none is left.
        found = sorted(
            (block["address"], segment["stream"])
            for segment in history.read()["segments"]
            for block in segment["blocks"]
            if block["state"] == "active_allocated" and "address" in block
        )
        self._addresses = [address for address, _ in found]
        self._streams = [stream for _, stream in found]

    def __bool__(self) -> bool:
        return bool(self._addresses)

    def stream_of(self, address: int) -> int | None:
        at = bisect_right(self._addresses, address) - 1
        return self._streams[at] if at >= 0 and self._addresses[at] == address else None


class Cuda:
    """Devices and streams of torch, and the tags of live storages, by their key."""

    def __init__(self) -> None:
        self.devices = list(range(torch.cuda.device_count()))
        self.tags: dict[int, Tag] = {}
        self.registered: dict[int, RegisteredMemory] = {}  # by address
        self.local = _Local()
        self.nodes = NodeStreams()
        self.labels: dict[tuple[int, int], int] = {}  # by device and handle of a stream
        self.ended: Callable[[Tag], None] = lambda tag: None
        self.node_began: Callable[[Node | None], None] = lambda node: None
        self.many_streams = False
        """Whether the order of the backward pass matters: not with one default stream alone."""
        self._used: set[int] = set()  # devices
        self.in_backward = 0
        self.integers = HostIntegers()
        self.block_of: Callable[[Tensor], int | None] = lambda tensor: None
        self._handles: dict[tuple[int, int], int] = {}  # by device and id of a stream
        # The running node of the backward pass, by thread.
        self._running: dict[int, Node | None] = {}

    # -- streams

    def stream(self, index: int) -> int:
        """The CUDA handle of the current stream; 0 is the legacy default stream."""
        # As ``torch.cuda.current_stream``, without creating an object.
        return self.handle(*torch._C._cuda_getCurrentStream(index))

    def use(self, index: int) -> None:
        """Record that an operator runs on a device."""
        if index not in self._used:
            self._used.add(index)
            self.many_streams = self.many_streams or len(self._used) > 1

    def handle(self, stream_id: int, device: int, kind: int) -> int:
        """The CUDA handle of a stream of torch's."""
        found = self._handles.get((device, stream_id))
        if found is None:
            made: Any = torch.cuda.Stream(
                stream_id=stream_id, device_index=device, device_type=kind
            )
            found = self._handles[device, stream_id] = int(made.cuda_stream)
            self.note(made)
            self.many_streams = self.many_streams or bool(found)
        return found

    def number_of(self, stream: torch.Stream) -> tuple[int, int]:
        """Device and handle of a stream object, possibly a ``torch.Stream``."""
        device = int(stream.device_index)
        return device, self.handle(stream.stream_id, device, stream.device_type)

    def note(self, stream: torch.Stream) -> None:
        """Set a stream's number for messages: its position in torch's pool, from its ``StreamId``
        (``c10/cuda/CUDAStream.cpp``; bits 4 to 8: index; 1 to 3: priority, from 1). Streams of
        other code have higher numbers.
        """
        key = int(stream.device_index), int(stream.cuda_stream)
        index, pool = stream.stream_id >> 5, (stream.stream_id >> 1 & 15) - 1
        if not key[1] or key in self.labels:
            return
        if 0 <= pool < _PRIORITIES and 0 <= index < _POOL:
            self.labels[key] = 1 + index + pool * _POOL
        else:
            others = sum(label > _POOLED for label in self.labels.values())
            self.labels[key] = _POOLED + 1 + others

    def blocking(self, index: int, number: int) -> bool:
        """Whether a stream and the legacy default stream of its device wait for each other: other
        code created it without ``cudaStreamNonBlocking``.
        """
        # Streams of torch's pools are not. Negative numbers are those of process groups: not
        # handles, and the driver would dereference them.
        label = self.labels.get((index, number), _POOLED + 1)
        return number > 0 and label > _POOLED and _waits_for_the_default_stream(number)

    def switched(self, index: int, number: int) -> None:
        """This thread has switched to another stream on a device."""
        self.many_streams = self.many_streams or bool(number)
        streams = self.local.streams
        if streams.get(index, 0) != number:
            streams[index] = number
            # The engine's threads count their nodes from 0: a stream that a hook makes current
            # there is not the one of the forward's nodes with these numbers.
            if torch._C._current_autograd_node() is None:
                self.nodes.switched(streams, untraced)

    def stream_chosen(self, index: int) -> bool:
        """Whether the running node, or a hook, has switched to another stream."""
        node = torch._C._current_autograd_node() if self.many_streams else None
        streams = None if node is None else self.nodes.of(node)
        return streams is not None and self.stream(index) != streams.get(index, 0)

    def enter_node(self) -> None:
        """Report the running node if it is another one than before. After the last one, the
        engine's thread runs the callbacks for the end of the backward pass, without a node.
        """
        if not (self.in_backward and self.many_streams):
            return
        node = torch._C._current_autograd_node()
        thread = threading.get_ident()
        before = self._running.get(thread)
        if node is not before and (node is not None or thread in self._running):
            self._running[thread] = node
            self.node_began(node)

    def backward_ended(self) -> None:
        """A backward pass has returned: nodes must not outlive the graph."""
        self._running.clear()
        if not self.in_backward:
            self.nodes.forget_leaves()

    def leaves_used(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], below: Callable[[], Any]
    ) -> None:
        """Autograd records an operator with these arguments: see `NodeStreams`."""
        streams = self.local.streams
        self.nodes.leaves_used(args, streams, below)
        if kwargs:
            self.nodes.leaves_used(kwargs.values(), streams, below)

    # -- storages

    def place_of(self, tensor: Tensor) -> int:
        """Device index, `HOST` or `PINNED`."""
        if tensor.is_cuda:
            return int(tensor.get_device())
        if tensor.layout is not torch.strided:
            return HOST
        storage = tensor.untyped_storage()
        if storage._cdata in self.tags:
            return PINNED
        if not tensor.is_pinned():
            return HOST
        tag = self._tag(storage, PINNED)
        found = (one for one in self.registered.values() if one.overlaps(storage.data_ptr(), 1))
        tag.registered = next(found, None)
        if tag.registered is not None:
            tag.offset = storage.data_ptr() - tag.registered.address
        return PINNED

    def _tag(self, storage: UntypedStorage, place: int) -> Tag:
        tag = Tag(storage, self.ended)
        tag.key, tag.nbytes, tag.place = storage._cdata, storage.nbytes(), place
        tag.stream, tag.block, tag.registered, tag.offset, tag.whole = 0, 0, None, 0, None
        self.tags[tag.key] = tag
        return tag

    def tag_on_device(self, storage: UntypedStorage, stream: int) -> Tag:
        """The new tag of a storage on a device that was allocated on a stream."""
        tag = self._tag(storage, storage.device.index)
        tag.stream = stream
        tag.block = address_of(storage)
        return tag

    def known_integers(self, tensor: Tensor) -> list[int] | None:
        """The values of an integer tensor that came from the host; None for others: reading them
        would wait for a device.
        """
        return self.integers.of(tensor, self.block_of(tensor) if tensor.is_cuda else None)

    def tag_of(self, tensor: Tensor) -> Tag | None:
        """The tag of a tensor's storage, None if it has none."""
        return self.tags.get(storage_key(tensor))


@contextmanager
def untraced() -> Iterator[None]:
    """Hide operators from the check, and from the program's modes and subclasses."""
    with unhandled(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def address_of(storage: UntypedStorage) -> int:
    """The address of a storage; 0 for one without memory, as in some tensor subclasses."""
    try:
        return int(storage.data_ptr())
    except RuntimeError:
        return 0


def _waits_for_the_default_stream(handle: int) -> bool:
    """Whether a stream was created without ``CU_STREAM_NON_BLOCKING``; False if the driver cannot
    be queried. Querying the flags of a stream in capture would end the capture.
    """
    flags, status, stream = ctypes.c_uint(), ctypes.c_int(), ctypes.c_void_p(handle)
    try:
        driver = ctypes.CDLL(_DRIVER)
        if driver.cuStreamIsCapturing(stream, ctypes.byref(status)) or status.value:
            return False
        failed = driver.cuStreamGetFlags(stream, ctypes.byref(flags))
    except (OSError, AttributeError):
        return False
    return not failed and not flags.value & _NON_BLOCKING
