"""The event source on real CUDA: the same engine, with torch's own reports.

Three sources: torch's GPU trace callbacks (events, streams, synchronisation, the caching
allocator's blocks; ``torch/cuda/_gpu_trace.py``), a dispatch mode (what every operator reads and
writes), and the few Python methods that neither shows. Callbacks run under locks of torch's: they
only put a line into a queue, which is read at the next operator. A failure of this code switches
it off and is reported; the program goes on.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpuprobe.hazard_watch import host_access as host_watch
from gpuprobe.hazard_watch.order.backward import SUMS
from gpuprobe.hazard_watch.places import backward_frames
from gpuprobe.hazard_watch.source import EventSource
from gpuprobe.hazards.footprint import Footprint, of_tensor
from gpuprobe.hazards.observer import HOST, PINNED, Observer, RegisteredMemory
from gpuprobe.patching import Patches
from gpuprobe.torch_support.callers import passed_on
from gpuprobe.torch_support.tensors import storage_key

_PRIORITIES: Final = 4
_POOL: Final = 32
"""Streams that torch makes of each priority and device (``c10/cuda/CUDAStream.cpp``)."""
_DRIVER: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_REPORTS: Final = (
    ("EventRecordCallbacks", "_recorded"),
    ("EventWaitCallbacks", "_waited"),
    ("EventDeletionCallbacks", "_event_gone"),
    ("MemoryAllocationCallbacks", "_allocated"),
    ("MemoryDeallocationCallbacks", "_block_freed"),
    ("DeviceSynchronizationCallbacks", "_device_waited"),
    ("StreamSynchronizationCallbacks", "_stream_waited"),
    ("EventSynchronizationCallbacks", "_event_waited"),
)


class _Pinned(weakref.ref[Any]):
    """The tag of a pinned storage that a copy used."""

    __slots__ = ("block", "key", "nbytes", "offset", "place", "registered", "stream")

    key: int
    nbytes: int
    place: int
    stream: int
    block: None
    registered: RegisteredMemory | None
    offset: int


class _Local:
    """What a virtual machine knows of a thread; torch knows it here."""

    reason = ""
    streams: Final[dict[int, int]] = {}

    @property
    def device(self) -> int:
        return torch.cuda.current_device()


class _Cuda:
    """The device model that torch itself is. ``tags``: tags of pinned storages."""

    nodes = None

    def __init__(self) -> None:
        self.devices = list(range(torch.cuda.device_count()))
        self.tags: dict[int, _Pinned] = {}
        self.registered: dict[int, RegisteredMemory] = {}  # by address
        self._handles: dict[tuple[int, int], int] = {}  # by device and id of a stream
        self.local = _Local()
        self.observer: Observer | None = None
        self.assumed: dict[str, int] = {}
        self.compiled: dict[str, None] = {}
        self.labels: dict[tuple[int, int], int] = {}  # by device and handle of a stream
        self.freed: Callable[[_Pinned], None] = lambda tag: None

    def stream(self, index: int) -> int:
        """The CUDA handle of the current stream; 0 is the legacy default stream."""
        # What ``torch.cuda.current_stream`` does, without an object for it.
        stream_id, device, kind = torch._C._cuda_getCurrentStream(index)
        handle = self._handles.get((device, stream_id))
        if handle is None:
            made: Any = torch.cuda.Stream(
                stream_id=stream_id, device_index=device, device_type=kind
            )
            handle = self._handles[device, stream_id] = int(made.cuda_stream)
            self.note(made)
        return handle

    def note(self, stream: Any) -> None:
        """Remember what people are to know a stream by: its position in torch's pool, as
        ``StreamId`` in ``c10/cuda/CUDAStream.cpp`` has it (bits 4 to 8: index; 1 to 3: priority,
        from 1). Streams of other code come after those.
        """
        key = int(stream.device_index), int(stream.cuda_stream)
        index, pool = stream.stream_id >> 5, (stream.stream_id >> 1 & 15) - 1
        if key[1] and 0 <= pool < _PRIORITIES and 0 <= index < _POOL:
            self.labels[key] = 1 + index + pool * _POOL
        else:
            self.note_handle(*key)

    def note_handle(self, index: int, handle: int) -> None:
        """The same of a stream of which only the handle is known."""
        if handle and (index, handle) not in self.labels:
            others = sum(label > _PRIORITIES * _POOL for label in self.labels.values())
            self.labels[index, handle] = _PRIORITIES * _POOL + 1 + others

    def blocking(self, index: int, number: int) -> bool:
        # Negative numbers are those of process groups: no handles, which the driver would read.
        return number > 0 and _waits_for_the_default_stream(number)

    def stream_chosen(self, index: int) -> bool:
        return False  # the engine's waits are reported like any other

    def place_of(self, tensor: Any) -> int:
        if tensor.is_cuda:
            return int(tensor.get_device())
        if tensor.layout is not torch.strided:
            return HOST
        storage = tensor.untyped_storage()
        if storage._cdata in self.tags:
            return PINNED
        if not self.is_pinned(tensor):
            return HOST
        tag = _Pinned(storage, self.freed)
        tag.key, tag.nbytes, tag.place = storage._cdata, storage.nbytes(), PINNED
        tag.stream, tag.block = 0, None
        found = (one for one in self.registered.values() if one.overlaps(storage.data_ptr(), 1))
        tag.registered = next(found, None)
        tag.offset = 0
        if tag.registered is not None:
            tag.offset = storage.data_ptr() - tag.registered.address
        self.tags[tag.key] = tag
        return PINNED

    def known_integers(self, tensor: Any) -> list[int] | None:
        return None  # to read them would wait for the device

    def is_pinned(self, tensor: Any) -> bool:
        return bool(tensor.is_pinned())

    def tag_of(self, tensor: Any) -> _Pinned | None:
        return self.tags.get(storage_key(tensor))


class CudaSource(EventSource):
    """Enter `watching` around the program. ``broken`` says why watching ended early, or ""."""

    def __init__(self) -> None:
        machine = self._cuda = _Cuda()
        super().__init__(machine)
        machine.freed, self._tags = self._pinned_freed, machine.tags
        self._memory = machine.registered
        self.engine.labels = machine.labels
        self.creations.made = machine.note
        self.broken = ""
        self._queue: deque[tuple[Any, ...]] = deque()
        self._captured: set[int] = set()  # blocks that were allocated during a capture
        self._owners: dict[int, tuple[int, int]] = {}  # by block: the stream it is allocated on
        # By block allocated in a backward pass: the sequence number and the stream of the node at
        # work then.
        self._gradients: dict[int, tuple[int, int]] = {}
        self._elapsed: float | None = None
        self._lock = threading.RLock()  # autograd's threads report too

    # -- on and off

    def install(self, patches: Patches) -> None:
        """Report until ``patches`` are undone. torch cannot stop its trace again, only its
        callbacks can be taken away: what is left is a test of a flag in C++.
        """
        from torch.cuda import _gpu_trace

        patches.add(lambda: self.guarded(self.drain))  # when all else has been put back
        torch._C._activate_gpu_trace()
        for registry_name, method_name in _REPORTS:
            registry = getattr(_gpu_trace, registry_name)
            callback = getattr(self, method_name)
            registry.add_callback(callback)
            patches.add(_remover(registry, callback))
        host_watch.install(self, patches)
        self.collectives.install(patches)
        self.blocks.install(patches)
        self.creations.install(patches)
        self._methods(patches)
        _note_backward(patches)
        mode = _Watch(self)
        mode.__enter__()
        patches.add(lambda: mode.__exit__(None, None, None))
        self._threads(patches)

    def _threads(self, patches: Patches) -> None:
        """Dispatch modes are a thread's own: threads that the program starts get one too."""
        original = threading.Thread.run
        source = self

        def run(thread: threading.Thread) -> None:
            with _Watch(source):
                original(thread)

        patches.set(threading.Thread, "run", run)

    def _methods(self, patches: Patches) -> None:
        """Methods that say something about order, and that no callback reports."""
        from torch.cuda import memory

        graph = torch.cuda.CUDAGraph
        for owner, name, report in (
            (torch.cuda.Event, "query", self._event_queried),
            (torch.cuda.Event, "wait", self._never_recorded),
            (torch.cuda.Stream, "query", self._stream_queried),
            (torch.Tensor, "record_stream", self._stream_recorded),
            (torch.Tensor, "tolist", self._listed),
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
        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(this, *args, **kwargs)
            self.guarded(report, this, result, *args, **kwargs)
            return result

        method.__name__ = original.__name__
        return method

    def _after(self, original: Any, report: Callable[..., None]) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            result = original(*args)
            if not int(result):
                self.guarded(report, *args)
            return result

        return function

    def _registered(self, address: int, nbytes: int, flags: int) -> None:
        self._memory[address] = RegisteredMemory(address, nbytes)

    def _unregistered(self, address: int) -> None:
        memory = self._memory.pop(address, None)
        if memory is None:  # registered before watching began
            return
        for tag in list(self._tags.values()):
            if tag.registered is memory:
                del self._tags[tag.key]
        self.unregistered(memory)

    def _never_recorded(self, event: Any, _: None, stream: Any = None) -> None:
        """CUDA has no event before the first record, and torch reports no wait for it."""
        if not event.cuda_event:
            stream = torch.cuda.current_stream() if stream is None else stream
            actor = self.active.stream(stream.device_index, stream.cuda_stream)
            self.active.event_wait(id(event), actor, self.site())

    def _event_queried(self, event: Any, done: bool) -> None:
        if done:
            self.event_synchronize(event.cuda_event)

    def _stream_queried(self, stream: Any, done: bool) -> None:
        if done:
            self.stream_synchronize(stream.device_index, stream.cuda_stream)

    def _stream_recorded(self, tensor: Any, _: None, stream: Any) -> None:
        address = self._device_address(tensor)
        if address is not None:
            actor = self.active.stream(stream.device_index, stream.cuda_stream)
            self.active.record_stream(address, actor)

    def _is_pinned(self, tensor: Any) -> bool:
        return not tensor.is_cuda and self.machine.place_of(tensor) == PINNED

    def _listed(self, tensor: Any, _: Any) -> None:
        if self._is_pinned(tensor):
            self.host_use(tensor, False, "tolist")

    def _capture_began(self, graph: Any, _: None, *args: Any, **kwargs: Any) -> None:
        index = _device()
        self.capture_begin(index, self.machine.stream(index))

    def _capture_ended(self, graph: Any, _: None) -> None:
        graph._gpuprobe_accesses = self.capture_end(_device())

    def _replayed(self, graph: Any, _: None) -> None:
        captured, index = getattr(graph, "_gpuprobe_accesses", None), _device()
        self.graph_launch(captured, index, self.machine.stream(index))

    def coverage(self) -> list[str]:
        broken = f"everything after gpuprobe's own failure: {self.broken}"
        return [*super().coverage(), *([broken] if self.broken else [])]

    def guarded(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call our own code; if it fails, watching is over and the program is not."""
        if self.broken:
            return
        try:
            with self._lock:
                self.drain()
                call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - reported as a gap of the coverage
            self.broken = f"{type(error).__name__}: {error}"

    # -- what torch reports: no locks, no CUDA, nothing raised

    def _recorded(self, event: int, stream: int) -> None:
        self._queue.append(("event_record", event, stream, _device(), self.site()))

    def _waited(self, event: int, stream: int) -> None:
        self._queue.append(("event_wait", event, stream, _device(), self.site()))

    def _event_gone(self, event: int) -> None:
        self._queue.append(("event_destroyed", event))

    def _allocated(self, address: int) -> None:
        device = _device()
        self._queue.append(("alloc", address, (device, self.machine.stream(device))))

    def _block_freed(self, address: int) -> None:
        self._queue.append(("free", address, self._free_site(), False))

    def _free_site(self) -> Any:
        """The line at hand, if a report may name it."""
        return self.site() if self.engine.many_streams or self.captures else None

    def _device_waited(self) -> None:
        self._queue.append(("device_synchronize", _device(), self.site()))

    def _stream_waited(self, stream: int) -> None:
        self._queue.append(("stream_synchronize", stream, _device(), self.site()))

    def _event_waited(self, event: int) -> None:
        self._queue.append(("event_synchronize", event, self.site()))

    def drain(self) -> None:
        """Give the engine what was reported since the last operator, in order."""
        engine, queue = self.active, self._queue
        while queue:
            kind, *given = queue.popleft()
            if kind == "alloc":
                self._block_added(*given)
            elif kind == "free":
                self._block_gone(*given)
            elif kind in ("event_record", "event_wait"):
                event, stream, device, site = given
                getattr(engine, kind)(event, self._stream_of(device, stream), site)
            elif kind == "stream_synchronize":
                stream, device, site = given
                engine.stream_synchronize(self._stream_of(device, stream), site)
            else:
                getattr(engine, kind)(*given)

    def _block_added(self, address: int, owner: tuple[int, int]) -> None:
        self._owners[address] = owner
        node = torch._C._current_autograd_node()
        if node is not None:
            self._gradients[address] = (node._sequence_nr(), self._node_stream(owner[0]))
        if self._capture is not None:
            self._captured.add(address)

    def _block_gone(self, address: int, site: Any, waits: bool) -> None:
        self._captured.discard(address)
        self._owners.pop(address, None)
        self._gradients.pop(address, None)
        if self.engine.knows(address):
            self._freed_at(address, site if self.engine.end_matters(address) else None, waits)

    def _stream_of(self, device: int, handle: int) -> int:
        """The actor of a stream's handle. Handles of other streams than the default one are
        those of one device.
        """
        if handle:
            for index in range(len(self.machine.devices)):
                if self.active.has_stream(index, handle) or (index, handle) in self._cuda.labels:
                    return self.active.stream(index, handle)
            self._cuda.note_handle(device, handle)
        return self.active.stream(device, handle)

    # -- where tensors are

    def _device_address(self, tensor: Any) -> int | None:
        try:
            return int(tensor.untyped_storage().data_ptr()) or None
        except (NotImplementedError, RuntimeError):
            return None

    def block_of(self, tensor: Any) -> int | None:
        with torch._C.DisableTorchFunctionSubclass():  # any tensor that the program has a name for
            if tensor.is_cuda:
                return self._device_address(tensor)
            return super().block_of(tensor)

    def _touch(self, tensor: Any) -> tuple[int, Footprint] | None:
        offset = 0
        if tensor.is_cuda:
            address = self._device_address(tensor)
        else:
            place = self.machine.place_of(tensor) if tensor.layout is torch.strided else HOST
            tag = self.machine.tag_of(tensor) if place == PINNED else None
            address = None if tag is None else self._address(tag)
            offset = 0 if tag is None else tag.offset
        if address is None:
            return None
        if not self.engine.knows(address):
            # Made since the watch began, or before: the reports of allocations have no size.
            nbytes = tensor.untyped_storage().nbytes()
            owner = self._owners.get(address)
            self._add_block(address, nbytes, owner, address in self._captured)
        item = tensor.element_size()
        start = address + offset + tensor.storage_offset() * item
        where = of_tensor(start, tensor.size(), tensor.stride(), item)
        return None if where is None else (address, where)

    def _pinned_freed(self, tag: _Pinned) -> None:
        if self._tags.get(tag.key) is tag:
            del self._tags[tag.key]
        # The caching host allocator waits for the streams that used it before it hands it on.
        if tag.registered is None:
            self._queue.append(("free", self._address(tag), self._free_site(), True))

    def device_of(self, args: Any, kwargs: Any, result: Any) -> int:
        """The device of the first CUDA tensor, -1 where there is none."""
        for value in (*args, *kwargs.values(), result):
            items = value if isinstance(value, (list, tuple)) else (value,)
            for item in items:
                if isinstance(item, torch.Tensor) and item.is_cuda:
                    return int(item.get_device())
        return -1

    # -- uses out of the dispatcher's sight: what was reported before comes first

    def host_use(self, tensor: Any, write: bool, op: str, note: str = "") -> None:
        self.guarded(super().host_use, tensor, write, op, note)

    def host_bytes(self, tensor: Any, where: Footprint, write: bool, op: str) -> None:
        self.guarded(super().host_bytes, tensor, where, write, op)

    def device_read(self, tensor: Any, index: int, op: str) -> None:
        self.guarded(super().device_read, tensor, index, op)

    def declared(self, reads: Any, writes: Any, stream: Any) -> None:
        self.guarded(super().declared, reads, writes, stream)

    # -- operators

    def _launch(self, index: int, op: Any, accesses: Any, site: Any, note: str = "") -> None:
        node = torch._C._current_autograd_node() if self._gradients else None
        if node is not None:
            self._record_gradients(node, op, accesses, index)
        if not note and backward_frames and torch._C._current_autograd_node() is not None:
            note = "gradient"
        super()._launch(index, op, accesses, site, note)

    def _node_stream(self, device: int) -> int:
        """The stream of the node that runs: its code may have made another one current."""
        outside = self.blocks.outside(device)
        return self.machine.stream(device) if outside is None else outside

    def _record_gradients(self, node: Any, op: Any, accesses: Any, index: int) -> None:
        """The autograd engine records a gradient for the stream of the node that it goes to, where
        that is another one than its producer's (``record_stream_any_impl`` in ``engine.cpp`` and
        ``input_buffer.cpp``), which no callback reports. Gradients are added up, on the stream
        that is current then, while the node that produced the last of them is at work.
        """
        number = node._sequence_nr()
        adds = isinstance(op, tuple) and op[0] in SUMS
        stream = self.machine.stream(index) if adds else self._node_stream(index)
        for address, _, _ in accesses:
            made = self._gradients.get(address)
            if made is not None and (adds or made[0] != number) and made[1] != stream:
                self.active.record_stream(address, self.active.stream(index, stream))

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any, seconds: float) -> None:
        """An operator returned; ``seconds``: how long the host was in it."""
        self._elapsed = seconds
        index = self.device_of(args, kwargs, result)
        if index >= 0:
            self.device_op(func, args, kwargs, result, index)
        else:
            self.host_op(func, args, kwargs, result)
        self._elapsed = None

    def _sync(self, reason: str, site: Any, index: int | None = None) -> None:
        super()._sync(reason, site, index)
        if self._elapsed is not None:
            self.ledger.lost(reason, site, self._elapsed)


class _Watch(TorchDispatchMode):
    """Hands every operator to the event source after it was launched."""

    def __init__(self, source: CudaSource) -> None:
        super().__init__()
        self._source = source

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if (
                kind not in _PLAIN
                and kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
            ):
                return NotImplemented  # the subclass unwraps first; its parts come back here
        kwargs = kwargs or {}
        began = time.perf_counter()
        try:
            result = func(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again
            args = kwargs = None
            raise passed_on(error)  # noqa: B904 - the same one
        seconds = time.perf_counter() - began
        self._source.guarded(self._source.ran, func, args, kwargs, result, seconds)
        return result


def _waits_for_the_default_stream(handle: int) -> bool:
    """Whether a stream was made without ``CU_STREAM_NON_BLOCKING``; False where the driver cannot
    be asked.
    """
    flags = ctypes.c_uint(_NON_BLOCKING)
    try:
        failed = ctypes.CDLL(_DRIVER).cuStreamGetFlags(ctypes.c_void_p(handle), ctypes.byref(flags))
    except (OSError, AttributeError):
        return False
    return not failed and not flags.value & _NON_BLOCKING


def _note_backward(patches: Patches) -> None:
    """Know the line that called a backward pass while it runs, until ``patches`` are undone."""
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


def _device() -> int:
    return int(torch.cuda.current_device())


def _remover(registry: Any, callback: Any) -> Callable[[], None]:
    def remove() -> None:
        if callback in registry.callback_list:
            registry.callback_list.remove(callback)

    return remove
