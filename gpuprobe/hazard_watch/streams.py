"""Translates launches, the use of memory, and synchronisations of operators to engine events."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import Node

from gpuprobe.hazard_watch.device import (
    PINNED,
    Cuda,
    EarlierBlocks,
    Tag,
    address_of,
)
from gpuprobe.hazard_watch.names import (
    Blocks,
    Creations,
    context_at_hand,
    created_streams,
    names_at_hand,
    site_at_hand,
)
from gpuprobe.hazard_watch.order.backward import SUMS, BackwardPass
from gpuprobe.hazards.accesses import RaceContext
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.events import (
    Allocation,
    BlockAccess,
    DeviceSynchronize,
    EventDestroy,
    Free,
    GraphCapture,
    HostAccess,
    Launch,
    Operator,
    Site,
    StreamSynchronize,
)
from gpuprobe.hazards.footprint import Footprint, of_tensor, whole
from gpuprobe.hazards.ledger import LineLedger
from gpuprobe.hazards.untracked import untrack
from gpuprobe.torch_support.operator_calls import called_by_engine
from gpuprobe.torch_support.tensors import parts, storage_key
from gpuprobe.user_frames import PACKAGE, outside

_SPACE: Final = 1 << 56  # one address space per device, and one for pinned memory
PINNED_SPACE: Final = 1 << 60
"""Addresses from here on are those of pinned memory."""

_new: Final = tuple.__new__  # half the time of calling a named tuple's class
is_contiguous = torch._C.TensorBase.is_contiguous


class CapturedGraph:
    """A CUDA graph in capture. Nothing runs: its launches are checked within the graph, by a
    separate engine, and as one operation at each replay.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.engine = Engine()
        self.accesses: dict[BlockAccess, None] = {}
        self.allocated: set[int] = set()


class StreamSource:
    """The engines of one check, and the memory and streams that they get events of."""

    def __init__(self) -> None:
        machine = self.machine = Cuda()
        self.engine = Engine()
        # The engine that gets launches and waits: within a capture, the graph's own.
        self.active = self.engine
        self.ledger = LineLedger()
        self.allowed = 0  # open contexts in which synchronisations are allowed
        self.uncharged_graphs = 0  # replays of graphs that were captured before the check
        self._capture: CapturedGraph | None = None
        self.captures: list[Engine] = []
        self._backward: list[BackwardPass] = []
        self.blocks, self.creations = Blocks(), Creations()
        self.ended = False  # whether the program has ended, and its frames are gone
        self._captured_names: dict[int, tuple[str, ...]] = {}  # by address
        self.engine.context = self._context
        self.engine.legacy.blocking = machine.blocking
        self.engine.labels = machine.labels
        machine.ended = self._ended
        machine.node_began = self._node_begins
        machine.block_of = self.block_of
        self.creations.made = machine.note
        self._before = EarlierBlocks()
        self.earlier = bool(self._before)  # whether there was device memory before the check
        self._queue: deque[Free | EventDestroy] = deque()  # ends since the last report
        self.broken = ""  # why the check ended early
        self._elapsed: float | None = None  # seconds of the operator that is being reported

    # -- places

    def _context(self, first: int, second: int, address: int) -> RaceContext:
        """The program's names for a race's streams and tensors, and its frames."""
        names = self.active.names
        actors = {names[actor]: actor for actor in range(1, len(names)) if names[actor][1] >= 0}
        if self.ended:
            return RaceContext((), (), (), created_streams(self, actors))
        return context_at_hand(self, actors, address)

    def record_names(self, actor: int, accesses: Sequence[BlockAccess], site: Site) -> None:
        """Record a place's names for the tensors of other streams that it uses."""
        engine = self.active
        if site is None or site in engine.tensor_names:
            return
        foreign = [address for address, _, _ in accesses if engine.foreign(address, actor)]
        if self._capture is not None:  # what a graph uses must not be dropped
            foreign = [address for address, _, _ in accesses]
            for address in foreign:
                self._captured_names[address] = names_at_hand(self, [address])
        if foreign:
            engine.tensor_names[site] = names_at_hand(self, foreign)

    def _actor(self, index: int) -> int:
        return self.active.stream(index, self.machine.stream(index))

    def _address(self, tag: Tag) -> int | None:
        if tag.place >= 0:
            return tag.block + tag.place * _SPACE if tag.block else None
        if tag.place != PINNED:
            return None
        memory = tag.registered
        return PINNED_SPACE + (tag.key if memory is None else memory.address)

    def block_of(self, tensor: Tensor) -> int | None:
        """The address of a tensor's block; None if it has none."""
        with torch._C.DisableTorchFunctionSubclass():  # possibly of a subclass
            tag = self.machine.tag_of(tensor)
            return None if tag is None else self._address(tag)

    def touch(self, tensor: Tensor) -> tuple[int, Footprint] | None:
        """The address of a tensor's block and its bytes in there; None if it has none."""
        if tensor.is_cuda:
            if tensor.layout is not torch.strided:
                return None
            # As `_tag_new`, with one call for the storage: this runs for each argument.
            storage = tensor.untyped_storage()
            tag = self.machine.tags.get(storage._cdata)
            if tag is None:
                if not storage.is_cuda:  # of a fake tensor, which torch's compiler traces
                    return None
                self._tag(storage, made=False)
                tag = self.machine.tags[storage._cdata]
            try:
                at = storage.data_ptr()
            except RuntimeError:
                at = 0
            if at != tag.block:
                self._moved(tag, storage)
            nbytes = tensor.nbytes
            if not at or tag.place or nbytes != tag.nbytes or not is_contiguous(tensor):
                return self._footprint(tag, tensor)
            where = tag.whole
            if where is None or where.low != at or where.high != at + nbytes:
                where = tag.whole = whole(at, at + nbytes)
                untrack(where)
            return (at, where) if nbytes else None
        if tensor.layout is torch.strided:
            self.machine.place_of(tensor)  # adds the tag of a pinned storage
            pinned = self.machine.tag_of(tensor)
            if pinned is not None:
                self._tag_pinned(pinned)
        tag = self.machine.tags.get(storage_key(tensor))
        return None if tag is None else self._footprint(tag, tensor)

    def _footprint(self, tag: Tag, tensor: Tensor) -> tuple[int, Footprint] | None:
        address = self._address(tag) if tag.place else tag.block or None
        if address is None:
            return None
        if is_contiguous(tensor):  # nearly all: the strides add nothing
            nbytes = tensor.nbytes
            if nbytes == tag.nbytes and not tag.offset:
                return (address, whole(address, address + nbytes)) if nbytes else None
            start = address + tag.offset + tensor.storage_offset() * tensor.element_size()
            return (address, whole(start, start + nbytes)) if nbytes else None
        item = tensor.element_size()
        start = address + tag.offset + tensor.storage_offset() * item
        where = of_tensor(start, tensor.size(), tensor.stride(), item)
        return None if where is None else (address, where)

    # -- memory

    def _add_block(
        self, address: int, nbytes: int, owner: tuple[int, int] | None, captured: bool
    ) -> None:
        """Report a new block. ``owner``: device and number of the stream it is allocated on, None
        if unknown. ``captured``: it belongs to the graph in capture.
        """
        engines = [self.engine]
        private = captured and self._capture is not None
        if captured and self._capture is not None:
            self._capture.allocated.add(address)
            engines.append(self._capture.engine)
        for engine in engines:
            actor = -1 if owner is None else engine.stream(*owner)
            engine.apply(_new(Allocation, (address, max(nbytes, 1), actor, private)))

    def unregistered(self, start: int) -> None:
        """The host memory at ``start`` is pageable again (``cudaHostUnregister``)."""
        machine = self.machine
        memory = machine.registered.pop(start, None)
        if memory is None:  # registered before the check
            return
        for tag in list(machine.tags.values()):
            if tag.registered is memory:
                del machine.tags[tag.key]
        address = PINNED_SPACE + memory.address
        if self.engine.is_live(address):  # cudaHostUnregister is not documented to wait for copies
            where = whole(address, address + memory.nbytes)
            self.engine.apply(
                HostAccess(address, where, True, "cudaHostUnregister", site_at_hand())
            )
        self._freed(address, waits=True)

    def _freed(self, address: int, *, waits: bool = False) -> None:
        site = site_at_hand() if self.engine.end_matters(address) else None
        self._free(_new(Free, (address, site, waits)))

    def _free(self, event: Free) -> None:
        engine, address = self.engine, event.address
        if event.site is not None and address in self._captured_names:
            engine.tensor_names.setdefault(event.site, self._captured_names[address])
        engine.apply(event)
        if self._capture is not None:
            self._capture.engine.apply(Free(address))

    def _tag_new(self, values: Iterable[object], made: bool) -> None:
        """Tag the new tensors of an operator. Those that it ``made`` have memory of the current
        stream.
        """
        tags = self.machine.tags
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.is_cuda and value.layout is torch.strided:
                    storage = value.untyped_storage()
                    tag = tags.get(storage._cdata)
                    if tag is None:
                        self._tag(storage, made)
                    elif tag.block != address_of(storage):
                        self._moved(tag, storage)
            elif type(value) is list or type(value) is tuple:
                self._tag_new(value, made)

    def _is_new(self, value: object) -> bool:
        """Whether a tensor on a device, or one in a list, has a storage without a tag."""
        if isinstance(value, torch.Tensor):
            if not (value.is_cuda and value.layout is torch.strided):
                return False
            return value.untyped_storage()._cdata not in self.machine.tags
        return isinstance(value, (list, tuple)) and any(map(self._is_new, value))

    def _tag(self, storage: UntypedStorage, made: bool) -> None:
        index, address = storage.device.index, address_of(storage)
        stream = self.machine.stream(index) if made else self._before.stream_of(address)
        tag = self.machine.tag_on_device(storage, stream or 0)
        where = self._address(tag)
        if where is None or self.engine.is_live(where):
            return
        owner = None if stream is None else (index, stream)
        self._add_block(where, max(tag.nbytes, 1), owner, made and self._capture is not None)

    def _tag_pinned(self, tag: Tag) -> None:
        address = self._address(tag)
        if address is not None and not self.engine.is_live(address):
            memory = tag.registered
            self._add_block(address, (memory or tag).nbytes, None, False)  # in no graph's pool

    def _moved(self, tag: Tag, storage: UntypedStorage) -> None:
        """A storage may have other memory than before."""
        address, old = address_of(storage), tag.block
        tag.nbytes = storage.nbytes()
        if address != old:
            tag.block = address
            tag.stream = self.machine.stream(tag.place)
            if old:
                self._freed(old + tag.place * _SPACE)
            where = self._address(tag)
            if where is not None and not self.engine.is_live(where):
                owner = tag.place, tag.stream
                self._add_block(where, tag.nbytes, owner, self._capture is not None)

    def resized(self, storage: UntypedStorage) -> None:
        """A storage was resized; one on a device may have another block."""
        tag = self.machine.tags.get(storage._cdata)
        if tag is not None and tag.place >= 0:
            self._moved(tag, storage)

    def _ended(self, tag: Tag) -> None:
        """A storage was freed. This runs wherever its last reference is dropped: it only queues."""
        tags = self.machine.tags
        if tags.get(tag.key) is not tag:
            return
        del tags[tag.key]
        address = None if tag.registered is not None else self._address(tag)
        if address is not None and not self.broken:
            site = site_at_hand() if self.engine.end_matters(address) else None
            # The caching host allocator waits for the streams that used pinned memory before it
            # reuses it.
            self._queue.append(Free(address, site, tag.place == PINNED))

    def event_ended(self, event: int) -> None:
        """An event was freed. It only queues, as `_ended` does."""
        self._queue.append(EventDestroy(event))

    def drain(self) -> None:
        """Report what has ended since the last report, in order."""
        while self._queue:
            event = self._queue.popleft()
            if isinstance(event, Free):
                self.machine.integers.forget(event.address)
                self._free(event)
            else:
                self.engine.apply(event)

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``."""
        frame = outside(sys._getframe(1), PACKAGE)
        outer = None if frame is None else frame.f_back  # below torch.cuda.empty_cache itself
        files = [one.f_code.co_filename for one in (frame, outer) if one is not None]
        if torch.cuda.graphs.__file__ in files:
            for device in range(len(self.machine.devices)):
                self.engine.apply(DeviceSynchronize(device, site_at_hand()))
            return  # torch empties the cache before a capture, not the program
        self._sync("empty_cache", None)

    def add_accesses(self, accesses: list[BlockAccess], value: object, write: bool) -> None:
        if isinstance(value, torch.Tensor):
            touched = self.touch(value)
            if touched is not None:
                address, where = touched
                accesses.append((address, where, write))
                return
            value = parts(value)  # a sparse one's
        if isinstance(value, (list, tuple)):
            touch = self.touch
            for item in value:  # hundreds, of an optimizer's operators
                touched = touch(item) if isinstance(item, torch.Tensor) else None
                if touched is None:
                    self.add_accesses(accesses, item, write)
                else:
                    address, where = touched
                    accesses.append((address, where, write))

    # -- work and synchronisation

    def _launch(
        self, index: int, op: Operator, accesses: Sequence[BlockAccess], site: Site, note: str = ""
    ) -> None:
        integers = self.machine.integers
        if integers:
            for address, _, write in accesses:
                if write:
                    integers.forget(address)
        if self._capture is not None:
            self._capture.accesses.update(dict.fromkeys(accesses))
        engine = self.active
        actor = engine.stream(index, self.machine.stream(index))
        if self._backward and torch._C._current_autograd_node() is not None:
            actor, note = self._in_backward(actor, index, op, accesses, note)
        engine.apply(_new(Launch, (actor, op, accesses, site, note)))
        if engine.many_streams or self._capture is not None:
            self.record_names(actor, accesses, site)

    def _in_backward(
        self, actor: int, index: int, op: Operator, accesses: Sequence[BlockAccess], note: str
    ) -> tuple[int, str]:
        """The actor and the note of a launch within a node of the backward pass. The autograd
        engine adds up gradients on a stream that it makes current while the node that produced the
        last of them is running.
        """
        backward = self._backward[-1]
        name = op[0] if isinstance(op, tuple) else op
        if name in SUMS and called_by_engine():
            written = [address for address, _, _ in accesses]
            consumer = backward.summing_on(self.machine.stream(index), index, written)
            if consumer is not None:
                backward.sum_on(consumer, index)
                for address, where, write in accesses:
                    if write:
                        backward.wrote(address, where, op)
                return actor, note or "gradient"
        if self.machine.stream_chosen(index):
            for address, _, write in accesses:
                if write:
                    backward.touched(address)
            return actor, note
        addresses = [address for address, _, _ in accesses]
        consumer = backward.summing(name, addresses)
        if consumer is not None:
            actor = backward.sum_on(consumer, index)
        for address, where, write in accesses:
            if write:
                backward.wrote(address, where, op)
        return actor, note or "gradient"

    def _explicit_sync(self, index: int, site: Site) -> None:
        """A copy that the program explicitly waits for: not an implicit synchronisation."""
        self.ledger.add("copy", site, allowed=True)
        self.active.apply(StreamSynchronize(self._actor(index), site))

    def _sync(self, reason: str, site: Site, index: int | None = None) -> None:
        site = site if site is not None else site_at_hand()
        self.ledger.add(reason, site, allowed=self.allowed > 0)
        if index is None:
            for device in range(len(self.machine.devices)):
                self.engine.apply(DeviceSynchronize(device, site))
        else:
            self.active.apply(StreamSynchronize(self._actor(index), site))
        if self._elapsed is not None:
            self.ledger.lost(reason, site, self._elapsed)

    # -- graphs

    def capture_begin(self) -> None:
        self._capture = CapturedGraph(len(self.captures))
        self._capture.engine.context = self._context
        self._capture.engine.labels = self.engine.labels
        self.active = self._capture.engine
        self.captures.append(self._capture.engine)

    def capture_end(self) -> CapturedGraph | None:
        captured, self._capture = self._capture, None
        self.active = self.engine
        if captured is not None:
            used = {address for address, _, _ in captured.accesses}
            self.engine.apply(GraphCapture(captured.number, sorted(used - captured.allocated)))
        return captured

    # -- the backward pass

    def _begin_backward(self, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A call of ``_engine_run_backward`` begins, with these arguments."""
        machine = self.machine
        callers = {index: machine.stream(index) for index in range(len(machine.devices))}
        self._backward.append(BackwardPass(self, machine.nodes, callers, given, options))

    def _node_begins(self, node: Node | None) -> None:
        if self._backward:
            self._backward[-1].begins(node)

    def _end_backward(self) -> None:
        """The streams that were current at the call of backward wait for those of the leaves."""
        backward = self._backward.pop()
        if self.machine.many_streams:  # else all is on one stream
            backward.begins(None)
        self.machine.backward_ended()

    def device_of_address(self, address: int) -> int:
        """The device of the memory at ``address``."""
        return address // _SPACE
