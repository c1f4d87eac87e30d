"""The event source on torch's CUDA: with the engine and the models of order of a virtual GPU.

torch's own trace of the GPU (``torch._C._activate_gpu_trace``) is not used. Its hooks run Python
code when C++ frees memory, also while an exception propagates, which is then lost; and it cannot be
switched off again. Instead:

* a kernel in Python shows what every operator reads and writes (`operator_calls`);
* methods of streams, events and graphs are replaced, those of C's classes too;
* a weak reference to each storage reports the end of its memory;
* waits in C++, those of the autograd engine and of collectives, are modelled
  (`gpuprobe.hazard_watch.order`).

Reports run in the program's own threads, or in the autograd engine's. A failure of this code ends
the check, and is reported; the program continues.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import operator
import sys
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter  # a program may replace `time.perf_counter`
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.autograd.graph import Node
from torch.utils._python_dispatch import _disable_current_modes

from gpuprobe.hazard_watch import host_access as host_watch
from gpuprobe.hazard_watch.host_integers import HostIntegers, flat, on_host
from gpuprobe.hazard_watch.order.backward import SUMS, BackwardPass
from gpuprobe.hazard_watch.places import backward_frames
from gpuprobe.hazard_watch.source import EventSource
from gpuprobe.hazard_watch.streams import is_contiguous
from gpuprobe.hazards.events import (
    BlockAccess,
    EventDestroy,
    Free,
    Operator,
    RecordStream,
    Site,
    StreamWait,
)
from gpuprobe.hazards.footprint import Footprint, whole
from gpuprobe.hazards.observer import HOST, PINNED, Observer, RegisteredMemory, StorageTag
from gpuprobe.patching import Patches
from gpuprobe.torch_support.callers import passed_on
from gpuprobe.torch_support.cuda_streams import NodeStreams, lifetime_of
from gpuprobe.torch_support.memory_history import history
from gpuprobe.torch_support.operator_calls import (
    called_by_engine,
    left_out,
    recording,
    unhandled,
    watch,
)
from gpuprobe.torch_support.tensors import storage_key

_PRIORITIES: Final = 4
_POOL: Final = 32
_POOLED: Final = _PRIORITIES * _POOL
"""Streams that torch makes of each priority and device (``c10/cuda/CUDAStream.cpp``)."""
_DRIVER: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_STRIDED: Final = torch.strided


_STEPS: Final = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
_PASSING_INTEGERS: Final = frozenset({"arange", "_to_copy", "copy_", *_STEPS})
"""Operators whose results may have integers that are known on the host."""


class _Block(NamedTuple):
    """A block of torch's caching allocator."""

    address: int


class _Tag(weakref.ref[UntypedStorage]):
    """The tag of a storage on a device, or of a pinned one that a copy used."""

    __slots__ = ("block", "key", "nbytes", "offset", "place", "registered", "stream", "whole")

    key: int
    nbytes: int
    place: int
    stream: int
    block: _Block | None
    registered: RegisteredMemory | None
    offset: int
    whole: Footprint | None
    """All of its bytes, once a tensor over all of them was used."""


class _Local(threading.local):
    """The current device and streams of one thread."""

    reason = ""

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}

    @property
    def device(self) -> int:
        return torch.cuda.current_device()


class _Earlier:
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


class _Cuda:
    """Torch's CUDA as a device model."""

    def __init__(self) -> None:
        self.devices = list(range(torch.cuda.device_count()))
        self.tags: dict[int, _Tag] = {}
        self.registered: dict[int, RegisteredMemory] = {}  # by address
        self.local = _Local()
        self.nodes = NodeStreams()
        self.observer: Observer | None = None
        self.assumed: dict[str, int] = {}
        self.compiled: dict[str, None] = {}
        self.labels: dict[tuple[int, int], int] = {}  # by device and handle of a stream
        self.ended: Callable[[_Tag], None] = lambda tag: None
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
                self.nodes.switched(streams, _untraced)

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
            if self.observer is not None:
                self.observer.node_begins(node)

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

    def _tag(self, storage: UntypedStorage, place: int) -> _Tag:
        tag = _Tag(storage, self.ended)
        tag.key, tag.nbytes, tag.place = storage._cdata, storage.nbytes(), place
        tag.stream, tag.block, tag.registered, tag.offset, tag.whole = 0, None, None, 0, None
        self.tags[tag.key] = tag
        return tag

    def tag_on_device(self, storage: UntypedStorage, stream: int) -> _Tag:
        """The new tag of a storage on a device that was allocated on a stream."""
        tag = self._tag(storage, storage.device.index)
        tag.stream = stream
        address = _address(storage)
        tag.block = _Block(address) if address else None
        return tag

    def known_integers(self, tensor: Tensor) -> list[int] | None:
        """Only integers that came from the host are known: reading others would wait."""
        return self.integers.of(tensor, self.block_of(tensor) if tensor.is_cuda else None)

    def tag_of(self, tensor: Tensor) -> _Tag | None:
        return self.tags.get(storage_key(tensor))


class CudaSource(EventSource):
    """The event source on CUDA. ``broken``: why the check ended early, or ""."""

    def __init__(self) -> None:
        machine = self._cuda = _Cuda()
        super().__init__(machine)
        machine.ended = self._ended
        machine.block_of = self.block_of
        self.engine.labels = machine.labels
        self.creations.made = machine.note
        self.broken = ""
        self._before = _Earlier()
        self._left_out = left_out.calls
        self.earlier = bool(self._before)
        self._queue: deque[Free | EventDestroy] = deque()  # ends since the last report
        self._events: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id of the object
        self._numbers = itertools.count(1)
        self._elapsed: float | None = None
        self._lock = threading.RLock()  # autograd's threads report too

    # -- on and off

    def install(self, patches: Patches) -> None:
        """Report until ``patches`` are undone."""
        patches.add(lambda: self.guarded(self.drain))  # after all other patches are undone
        _note_backward(patches)
        super().install(patches)
        self._streams(patches)
        self._methods(patches)
        function = torch.autograd.Function
        patches.set(function, "apply", self._applying(vars(function)["apply"].__func__))
        patches.add(watch(self._operator))
        patches.add(history.install())
        if torch.cuda.is_initialized():
            for index in range(len(self.machine.devices)):
                self._cuda.switched(index, self.machine.stream(index))

    def _streams(self, patches: Patches) -> None:
        """Patch methods and functions that order streams, or that wait for them."""
        event, stream = torch.cuda.Event, torch.cuda.Stream
        methods: dict[Any, dict[str, Callable[..., None]]] = {
            event: {
                "record": self._recorded,
                "wait": self._waited,
                "query": self._event_queried,
                "synchronize": self._event_waited,
            },
            stream: {"query": self._stream_queried, "synchronize": self._stream_waited},
        }
        for owner, reports in methods.items():
            for name, report in reports.items():
                patches.set(owner, name, self._reporting(getattr(owner, name), report))
        # Of classes in C, which accelerators other than CUDA share.
        generic: dict[Any, dict[str, Callable[..., None]]] = {
            torch.Event: methods[event],
            torch.Stream: {
                **methods[stream],
                "record_event": self._event_made,
                "wait_event": self._event_awaited,
                "wait_stream": self._stream_awaited,
                "__enter__": self._switched,
                "__exit__": self._switched,
            },
        }
        for owner, reports in generic.items():
            for name, report in reports.items():
                if name in vars(owner):
                    original = vars(owner)[name]
                    patches.add(_set_in_c(owner, name, self._reporting(original, report)))
        functions: dict[str, Callable[..., None]] = {
            "_cuda_setStream": self._switched,
            "_accelerator_setStream": self._switched,
            "_cuda_synchronize": self._device_waited,
            "_accelerator_synchronizeDevice": self._device_waited,
        }
        for name, report in functions.items():
            if hasattr(torch._C, name):
                patches.set(torch._C, name, self._reporting(getattr(torch._C, name), report))

    def _methods(self, patches: Patches) -> None:
        """Patch methods of tensors, graphs and memory that are not operators."""
        from torch.cuda import memory

        graph = torch.cuda.CUDAGraph
        for owner, name, report in (
            (torch.Tensor, "record_stream", self._stream_recorded),
            (torch.Tensor, "tolist", self._listed),
            (torch.UntypedStorage, "resize_", self._storage_resized),
            (graph, "capture_begin", self._capture_began),
            (graph, "capture_end", self._capture_ended),
            (graph, "replay", self._replayed),
        ):
            patches.set(owner, name, self._reporting(getattr(owner, name), report))
        original_empty, original_numpy = memory.empty_cache, torch.Tensor.numpy

        def empty_cache() -> None:
            original_empty()
            self.guarded(self.empty_cache)

        def numpy(this: Any, *args: Any, **kwargs: Any) -> Any:
            array = original_numpy(this, *args, **kwargs)
            return self.aliased(this, array) if self._is_pinned(this) else array

        for module in (memory, torch.cuda):
            patches.set(module, "empty_cache", empty_cache)
        runtime: Any = torch._C._cudart
        registered: dict[str, Callable[..., None]] = {
            "cudaHostRegister": self._registered,
            "cudaHostUnregister": self._unregistered,
        }
        for function, reporter in registered.items():
            patches.set(runtime, function, self._after(getattr(runtime, function), reporter))
        patches.set(torch.Tensor, "numpy", numpy)

    def _reporting(self, original: Any, report: Callable[..., None]) -> Callable[..., Any]:
        """``original``, followed by ``report`` with its result and its arguments."""

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.guarded(report, result, *args, **kwargs)
            return result

        return method

    def _after(self, original: Any, report: Callable[..., None]) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            result = original(*args)
            if not int(result):
                self.guarded(report, *args)
            return result

        return function

    def _applying(self, apply: Callable[..., Any]) -> Any:
        """``torch.autograd.Function.apply`` creates the nodes that accumulate the gradients of its
        leaves, though it runs without recording gradients itself.
        """
        source = self

        @functools.wraps(apply)
        def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
            result = apply(kind, *args, **kwargs)
            if torch.is_grad_enabled():
                source.guarded(source._cuda.leaves_used, args, {}, _untraced)
            return result

        return classmethod(applied)

    def coverage(self) -> list[str]:
        broken = f"everything after gpuprobe's own failure: {self.broken}"
        compiled = left_out.since(self._left_out)
        return [
            *super().coverage(),
            *([compiled] if compiled else []),
            *([broken] if self.broken else []),
        ]

    def guarded(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call our own code; if it fails, the check ends and the program continues."""
        if self.broken:
            return
        try:
            with self._lock:
                self.drain()
                self._cuda.enter_node()
                call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - reported as a gap of the coverage
            self.broken = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"

    # -- events and streams

    def _number(self, event: torch.Event) -> int:
        """The identity of an event while it exists."""
        lifetime = lifetime_of(event)
        found = self._events.get(id(event))
        if found is None or found[0]() is not lifetime:
            number = next(self._numbers)

            def gone(_: object, key: int = id(event)) -> None:
                self._events.pop(key, None)
                self._queue.append(EventDestroy(number))

            found = self._events[id(event)] = weakref.ref(lifetime, gone), number
        return found[1]

    def _where(self, stream: torch.Stream | None) -> tuple[int, int]:
        """Device and number of a stream, or of the current one."""
        if stream is None:
            index = _device()
            return index, self.machine.stream(index)
        return self._cuda.number_of(stream)

    def _recorded(self, _: None, event: torch.Event, stream: torch.Stream | None = None) -> None:
        self.event_record(self._number(event), *self._where(stream))

    def _waited(self, _: None, event: torch.Event, stream: torch.Stream | None = None) -> None:
        self.event_wait(self._number(event), *self._where(stream))

    def _event_queried(self, done: bool, event: torch.Event) -> None:
        if done:
            self.event_query(self._number(event))

    def _event_waited(self, _: None, event: torch.Event) -> None:
        self.event_synchronize(self._number(event))

    def _event_made(
        self, event: torch.Event, stream: torch.Stream, *_: object, **__: object
    ) -> None:
        self.event_record(self._number(event), *self._where(stream))

    def _event_awaited(self, _: None, stream: torch.Stream, event: torch.Event) -> None:
        self.event_wait(self._number(event), *self._where(stream))

    def _stream_awaited(self, _: None, stream: torch.Stream, other: torch.Stream) -> None:
        engine = self.active
        waiter, source = (engine.stream(*self._where(one)) for one in (stream, other))
        engine.apply(StreamWait(waiter, source, self.site()))

    def _stream_queried(self, done: bool, stream: torch.Stream) -> None:
        if done:
            self.stream_synchronize(*self._where(stream))

    def _stream_waited(self, _: None, stream: torch.Stream) -> None:
        self.stream_synchronize(*self._where(stream))

    def _device_waited(self, _: None, index: int | None = None) -> None:
        self.device_synchronize(_device() if index is None else index)

    def _switched(self, *_: object, **__: object) -> None:
        index = _device()
        self._cuda.switched(index, self.machine.stream(index))

    # -- memory

    def _stream_recorded(self, _: None, tensor: Tensor, stream: torch.Stream) -> None:
        found = self._touch(tensor)
        if found is not None:
            self.active.apply(RecordStream(found[0], self.active.stream(*self._where(stream))))

    def _storage_resized(self, _: object, storage: UntypedStorage, *__: object) -> None:
        tag = self.machine.tags.get(storage._cdata)
        if isinstance(tag, _Tag) and tag.place >= 0:
            self._moved(tag, storage)

    def _moved(self, tag: _Tag, storage: UntypedStorage) -> None:
        """A storage may have other memory than before."""
        address, old = _address(storage), tag.block
        tag.nbytes = storage.nbytes()
        if address != (0 if old is None else old.address):
            tag.block = _Block(address) if address else None
            tag.stream = self.machine.stream(tag.place)
            self.resized(tag, old)

    def _ended(self, tag: _Tag) -> None:
        """A storage was freed. This runs wherever its last reference is dropped: it only queues."""
        tags = self._cuda.tags
        if tags.get(tag.key) is not tag:
            return
        del tags[tag.key]
        address = None if tag.registered is not None else self._address(tag)
        if address is not None and not self.broken:
            site = self.site() if self.engine.end_matters(address) else None
            # The caching host allocator waits for the streams that used pinned memory before it
            # reuses it.
            self._queue.append(Free(address, site, tag.place == PINNED))

    def drain(self) -> None:
        """Report what has ended since the last report, in order."""
        while self._queue:
            event = self._queue.popleft()
            if isinstance(event, Free):
                self._cuda.integers.forget(event.address)
                self._free(event)
            else:
                self.engine.apply(event)

    def _registered(self, address: int, nbytes: int, flags: int) -> None:
        self._cuda.registered[address] = RegisteredMemory(address, nbytes)

    def _unregistered(self, address: int) -> None:
        memory = self._cuda.registered.pop(address, None)
        if memory is None:  # registered before the check
            return
        for tag in list(self._cuda.tags.values()):
            if tag.registered is memory:
                del self._cuda.tags[tag.key]
        self.unregistered(memory)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return not tensor.is_cuda and self.machine.place_of(tensor) == PINNED

    def _listed(self, _: object, tensor: Tensor) -> None:
        if self._is_pinned(tensor):
            self.host_use(tensor, False, "tolist")

    def _tag_new(self, values: Iterable[object], made: bool) -> None:
        """Tag the new tensors of an operator. Those that it ``made`` have memory of the current
        stream.
        """
        tags = self._cuda.tags
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.is_cuda and value.layout is _STRIDED:
                    storage = value.untyped_storage()
                    tag = tags.get(storage._cdata)
                    if tag is None:
                        self._tag(storage, made)
                    elif (tag.block.address if tag.block is not None else 0) != _address(storage):
                        self._moved(tag, storage)
            elif type(value) is list or type(value) is tuple:
                self._tag_new(value, made)

    def _is_new(self, value: object) -> bool:
        """Whether a tensor on a device, or one in a list, has a storage without a tag."""
        if isinstance(value, torch.Tensor):
            if not (value.is_cuda and value.layout is _STRIDED):
                return False
            return value.untyped_storage()._cdata not in self._cuda.tags
        return isinstance(value, (list, tuple)) and any(map(self._is_new, value))

    def _tag(self, storage: UntypedStorage, made: bool) -> None:
        index, address = storage.device.index, _address(storage)
        stream = self.machine.stream(index) if made else self._before.stream_of(address)
        tag = self._cuda.tag_on_device(storage, stream or 0)
        where = self._address(tag)
        if where is None or self.engine.is_live(where):
            return
        owner = None if stream is None else (index, stream)
        self._add_block(where, max(tag.nbytes, 1), owner, made and self._capture is not None)

    def _touch(self, tensor: Tensor) -> tuple[int, Footprint] | None:
        if tensor.is_cuda:
            if tensor.layout is not _STRIDED:
                return None
            # As `_tag_new`, with one call for the storage: this runs for each argument.
            storage = tensor.untyped_storage()
            tag = self._cuda.tags.get(storage._cdata)
            if tag is None:
                self._tag(storage, made=False)
                tag = self._cuda.tags[storage._cdata]
            block = tag.block
            try:
                at = storage.data_ptr()
            except RuntimeError:
                at = 0
            if at != (0 if block is None else block.address):
                self._moved(tag, storage)
                block = tag.block
            nbytes = tensor.nbytes
            if block is None or tag.place or nbytes != tag.nbytes or not is_contiguous(tensor):
                return self._footprint(tag, tensor)
            where = tag.whole
            if where is None or where.low != at or where.high != at + nbytes:
                where = tag.whole = whole(at, at + nbytes)
            return (at, where) if nbytes else None
        if tensor.layout is _STRIDED:
            self.machine.place_of(tensor)  # adds the tag of a pinned storage
            pinned = self.machine.tag_of(tensor)
            if pinned is not None:
                self._tag_pinned(pinned)
        return super()._touch(tensor)

    def _tag_pinned(self, tag: StorageTag) -> None:
        address = self._address(tag)
        if address is not None and not self.engine.is_live(address):
            memory = tag.registered
            self._add_block(address, (memory or tag).nbytes, None, False)  # in no graph's pool

    def block_of(self, tensor: Tensor) -> int | None:
        with torch._C.DisableTorchFunctionSubclass():  # possibly of a subclass
            return super().block_of(tensor)

    # -- graphs

    def _capture_began(
        self, _: None, graph: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any
    ) -> None:
        index = _device()
        self._cuda.integers.capturing = True
        self.capture_begin(index, self.machine.stream(index))

    def _capture_ended(self, _: None, graph: torch.cuda.CUDAGraph) -> None:
        self._cuda.integers.capturing = False
        graph._gpuprobe_accesses = self.capture_end(_device())

    def _replayed(self, _: None, graph: torch.cuda.CUDAGraph) -> None:
        captured, index = getattr(graph, "_gpuprobe_accesses", None), _device()
        self.graph_launch(captured, index, self.machine.stream(index))

    # -- uses outside of operators: the queue is drained first

    def host_use(self, tensor: Tensor, write: bool, op: str, note: str = "") -> None:
        self.guarded(super().host_use, tensor, write, op, note)

    def host_bytes(self, tensor: Tensor, where: Footprint, write: bool, op: str) -> None:
        self.guarded(super().host_bytes, tensor, where, write, op)

    def device_read(self, tensor: Tensor, index: int, op: str) -> None:
        self.guarded(super().device_read, tensor, index, op)

    def declared(
        self,
        reads: Tensor | Sequence[Tensor],
        writes: Tensor | Sequence[Tensor],
        stream: torch.Stream | None,
    ) -> None:
        self.guarded(super().declared, reads, writes, stream)

    # -- the backward pass

    def backward_begins(self, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.guarded(super().backward_begins, given, options)
        self._cuda.in_backward += 1

    def backward_ends(self) -> None:
        self._cuda.in_backward -= 1
        self.guarded(self._end_backward)

    def _end_backward(self) -> None:
        backward = self._backward.pop()
        if self._cuda.many_streams:  # else all is on one stream
            backward.begins(None)
        self._cuda.backward_ended()

    def _in_backward(
        self, actor: int, index: int, op: Operator, accesses: Sequence[BlockAccess], note: str
    ) -> tuple[int, str]:
        """The engine adds up gradients on a stream that it makes current while the node that
        produced the last of them is running.
        """
        name = op[0] if isinstance(op, tuple) else op
        if name in SUMS and called_by_engine():
            backward: BackwardPass = self._backward[-1]
            addresses = [address for address, _, _ in accesses]
            consumer = backward.summing_on(self.machine.stream(index), index, addresses)
            if consumer is not None:
                backward.sum_on(consumer, index)
                for address, where, write in accesses:
                    if write:
                        backward.wrote(address, where, op)
                return actor, note or "gradient"
        return super()._in_backward(actor, index, op, accesses, note)

    # -- operators

    def device_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        """The device of the first CUDA tensor, -1 without one."""
        for item in args:  # nearly always
            if isinstance(item, torch.Tensor) and item.is_cuda:
                return int(item.get_device())
        for item in _flat((*args, *kwargs.values(), result)):
            if isinstance(item, torch.Tensor) and item.is_cuda:
                return int(item.get_device())
        return -1

    def _operator(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        below: Callable[[Any, Any, Any], Any],
    ) -> Any:
        """An operator is called: see `gpuprobe.torch_support.operator_calls`."""
        if torch.is_grad_enabled():
            self.guarded(self._cuda.leaves_used, args, kwargs, _below)
        began = perf_counter()
        try:
            result = below(func, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again
            del args, kwargs
            raise passed_on(error)  # noqa: B904 - the same one
        seconds = perf_counter() - began
        self.guarded(self.operator_returned, func, args, kwargs, result, seconds)
        return result

    def operator_returned(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        seconds: float,
    ) -> None:
        """An operator returned after ``seconds`` of the host's time."""
        self._elapsed = seconds
        index = self.device_of(args, kwargs, result)
        if index >= 0:
            self._cuda.use(index)
            if self._is_new(result):  # and not an argument's memory
                self._tag_new(args, made=False)
                self._tag_new(kwargs.values(), made=False)
                self._tag_new((result,), made=True)
            name = self._plans[func].name
            if name == "lift_fresh":
                self._lifted(result, index)
            else:
                self.device_op(func, args, kwargs, result, index)
                if name in _PASSING_INTEGERS and not kwargs.get("alpha"):
                    self._record_integers(name, args, result)
        else:
            self.host_op(func, args, kwargs, result)
        self._elapsed = None

    def _launch(
        self, index: int, op: Operator, accesses: Sequence[BlockAccess], site: Site, note: str = ""
    ) -> None:
        integers = self._cuda.integers
        if integers:
            for address, _, write in accesses:
                if write:
                    integers.forget(address)
        super()._launch(index, op, accesses, site, note)

    def _record_integers(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Record the integers of a result on the device, if the host knows them."""
        if not HostIntegers.concern(result):
            return
        values: Sequence[int] | None = None
        if name == "arange":
            if all(type(value) is int for value in args):
                values = range(*args)
        elif name in _STEPS:
            values = self._stepped(name, args, result)
        else:
            source = args[0] if name == "_to_copy" else args[1]
            plain = type(source) in _PLAIN and source.dtype == result.dtype
            if plain and source.shape == result.shape and self.machine.place_of(source) == HOST:
                values = on_host(source)
        self._keep(result, values)

    def _stepped(self, name: str, args: tuple[Any, ...], result: Any) -> list[int] | None:
        """Known integers plus, minus or times a Python one; None if the result's type differs."""
        if len(args) != 2 or type(args[1]) is not int or type(args[0]) not in _PLAIN:
            return None
        step, before = _STEPS[name], self._cuda.known_integers(args[0])
        if before is None or args[0].dtype != result.dtype:
            return None
        values = [step(value, args[1]) for value in before]
        limits = torch.iinfo(result.dtype)
        return values if all(limits.min <= value <= limits.max for value in values) else None

    def _keep(self, tensor: Tensor, values: Sequence[int] | None) -> None:
        address = self.block_of(tensor)
        if address is not None:
            self._cuda.integers.keep(address, tensor, values)

    def constructed(self, made: Tensor, data: object) -> None:
        """`torch.tensor` or a similar function created ``made`` from ``data``."""
        if type(made) in _PLAIN and made.is_cuda and HostIntegers.concern(made):
            self.guarded(self._keep, made, flat(data))

    def _lifted(self, result: Tensor, index: int) -> None:
        """A tensor was created from Python's values, and copied to the device without an operator
        (``internal_new_from_data`` in ``tensor_new.cpp``, which waits for the copy).
        """
        accesses: list[tuple[int, Footprint, bool]] = []
        self.add_accesses(accesses, result, True)
        site = self.site()
        self._launch(index, ("copy", result.shape), accesses, site)
        if not host_watch.is_constructed():  # an index: like one that the program copies
            self._explicit_sync(index, site)
        elif result.numel():
            self._sync("new tensor from host values", site, index)

    def _sync(self, reason: str, site: Site, index: int | None = None) -> None:
        super()._sync(reason, site, index)
        if self._elapsed is not None:
            self.ledger.lost(reason, site, self._elapsed)


@contextmanager
def _untraced() -> Iterator[None]:
    """Hide operators from the check, and from the program's modes and subclasses."""
    with unhandled(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def _below() -> Iterator[None]:
    """The same within an operator; autograd records."""
    with _untraced(), recording():
        yield


def _address(storage: UntypedStorage) -> int:
    """The address of a storage; 0 for one without memory, as in some tensor subclasses."""
    try:
        return int(storage.data_ptr())
    except RuntimeError:
        return 0


def _flat(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


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


def _note_backward(patches: Patches) -> None:
    """Track the lines that call backward passes, until ``patches`` are undone."""
    original = torch.autograd.graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        backward_frames.append(sys._getframe(1))
        try:
            return original(*args, **kwargs)
        finally:
            backward_frames.pop()

    for module in (torch.autograd.graph, torch.autograd):
        if getattr(module, "_engine_run_backward", None) is original:
            patches.set(module, "_engine_run_backward", run_backward)


def _set_in_c(kind: Any, name: str, value: object) -> Callable[[], None]:
    """Replace a method of a class that C defines; return a function that restores it. Python does
    not allow setting it: its dictionary is changed, followed by ``PyType_Modified``, "after any
    manual modification of the attributes" (C API).
    """
    (methods,) = (one for one in gc.get_referents(vars(kind)) if type(one) is dict)
    before = methods[name]

    def replace(method: Any) -> None:
        methods[name] = method
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))

    replace(value)
    return lambda: replace(before)


def _device() -> int:
    return int(torch.cuda.current_device())
