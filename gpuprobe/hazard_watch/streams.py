"""Memory, streams, events and graphs, as a device model reports them to the engine."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

from gpuprobe.code_origin import PACKAGE
from gpuprobe.hazard_watch.base import DeviceModel
from gpuprobe.hazard_watch.names import (
    Blocks,
    Creations,
    context_at_hand,
    created_streams,
    names_at_hand,
)
from gpuprobe.hazard_watch.order.backward import BackwardPass
from gpuprobe.hazard_watch.places import site_at_hand
from gpuprobe.hazards.accesses import RaceContext
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.events import (
    Allocation,
    DeviceSynchronize,
    EventDestroy,
    EventRecord,
    EventSynchronize,
    EventWait,
    Free,
    GraphCapture,
    GraphReplay,
    HostAccess,
    Launch,
    RecordStream,
    StreamSynchronize,
)
from gpuprobe.hazards.footprint import Footprint, of_tensor, whole
from gpuprobe.hazards.ledger import SyncLedger
from gpuprobe.hazards.observer import PINNED, RegisteredMemory, StorageTag
from gpuprobe.torch_support.tensors import parts, storage_key

_SPACE: Final = 1 << 56  # one address space per device, and one for pinned memory
PINNED_SPACE: Final = 1 << 60
"""Addresses from here on are those of pinned memory."""

_new: Final = tuple.__new__  # half the time of calling a named tuple's class
is_contiguous = torch._C.TensorBase.is_contiguous


class _Capture:
    """A CUDA graph while it is captured. Nothing runs: what is launched is checked within the
    graph, by an engine of its own, and as one operation at each replay.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.engine = Engine()
        self.accesses: dict[tuple[int, Footprint, bool], None] = {}
        self.allocated: set[int] = set()


class StreamSource:
    """The engines of one watch, and what they know of memory and order."""

    def __init__(self, machine: DeviceModel) -> None:
        self.machine = machine
        self.engine = Engine()
        # What is launched and waited for is reported to this: within a capture, the graph's own.
        self.active = self.engine
        self.ledger = SyncLedger()
        self.allowed = 0  # contexts in which synchronisations are
        self.uncharged_graphs = 0  # replays of graphs that were captured before the watch
        self.earlier = False  # whether there was device memory before the watch
        self._capture: _Capture | None = None
        self.captures: list[Engine] = []
        self._backward: list[BackwardPass] = []
        self.blocks, self.creations = Blocks(), Creations()
        self.ended = False  # the program is over: its frames are gone
        self._captured_names: dict[int, tuple[str, ...]] = {}  # by address
        self.engine.context = self._context
        self.engine.legacy.blocking = machine.blocking

    # -- places

    def _context(self, first: int, second: int, address: int) -> RaceContext:
        """What the program calls what races, and where it is."""
        names = self.active.names
        actors = {names[actor]: actor for actor in range(1, len(names)) if names[actor][1] >= 0}
        if self.ended:
            return RaceContext((), (), (), created_streams(self, actors))
        return context_at_hand(self, actors, address)

    def _call_by_name(self, actor: int, accesses: Any, site: Any) -> None:
        """Remember what a place calls the tensors of other streams that it uses."""
        engine = self.active
        if site is None or site in engine.tensor_names:
            return
        foreign = [address for address, _, _ in accesses if engine.foreign(address, actor)]
        if self._capture is not None:  # what a graph uses is not to be dropped
            foreign = [address for address, _, _ in accesses]
            for address in foreign:
                self._captured_names[address] = names_at_hand(self, [address])
        if foreign:
            engine.tensor_names[site] = names_at_hand(self, foreign)

    def _actor(self, index: int) -> int:
        return self.active.stream(index, self.machine.stream(index))

    def _address(self, tag: StorageTag) -> int | None:
        if tag.place >= 0:
            return None if tag.block is None else tag.block.address + tag.place * _SPACE
        if tag.place != PINNED:
            return None
        memory = tag.registered
        return PINNED_SPACE + (tag.key if memory is None else memory.address)

    def block_of(self, tensor: Any) -> int | None:
        """The address of the block that a tensor lies in; None where it has none."""
        tag = self.machine.tag_of(tensor)
        return None if tag is None else self._address(tag)

    def current_stream(self, device: int) -> int:
        """The number of the stream that work of this thread on a device goes to."""
        return self.machine.stream(device)

    def site(self) -> Any:
        """The program's line at hand."""
        return site_at_hand()

    def _touch(self, tensor: Any) -> tuple[int, Footprint] | None:
        tag = self.machine.tags.get(storage_key(tensor))
        return None if tag is None else self._footprint(tag, tensor)

    def _footprint(self, tag: StorageTag, tensor: Any) -> tuple[int, Footprint] | None:
        """The address of a tensor's block and its bytes in it; None where there are none."""
        block = tag.block
        if block is not None and not tag.place:  # as `_address`, for the first device
            address: int | None = block.address
        else:
            address = self._address(tag)
        if address is None:
            return None
        if is_contiguous(tensor):  # nearly all: the strides say nothing more
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

    def allocated(self, tag: StorageTag) -> None:
        address = self._address(tag)
        if address is not None and not self.engine.is_live(address):
            owner = (tag.place, tag.stream) if tag.place >= 0 else None
            nbytes = tag.nbytes if tag.registered is None else tag.registered.nbytes
            self._add_block(address, nbytes, owner, self._capture is not None)

    def _add_block(
        self, address: int, nbytes: int, owner: tuple[int, int] | None, captured: bool
    ) -> None:
        """``owner``: device and number of the stream it is allocated on, None where that is not
        known. ``captured``: it belongs to the graph that is being captured.
        """
        engines = [self.engine]
        private = captured and self._capture is not None
        if captured and self._capture is not None:
            self._capture.allocated.add(address)
            engines.append(self._capture.engine)
        for engine in engines:
            actor = -1 if owner is None else engine.stream(*owner)
            engine.apply(_new(Allocation, (address, max(nbytes, 1), actor, private)))

    def freed(self, tag: StorageTag) -> None:
        address = self._address(tag)
        if address is not None:
            self._freed(address, waits=tag.place == PINNED)

    def unregistered(self, memory: RegisteredMemory) -> None:
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

    def resized(self, tag: StorageTag, old: Any) -> None:
        if old is not None:
            self._freed(old.address + tag.place * _SPACE)
        self.allocated(tag)

    def record_stream(self, tag: StorageTag, number: int) -> None:
        address = self._address(tag)
        if address is not None:
            self.active.apply(RecordStream(address, self.active.stream(tag.place, number)))

    def empty_cache(self) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        outer = None if frame is None else frame.f_back  # below torch.cuda.empty_cache itself
        files = [one.f_code.co_filename for one in (frame, outer) if one is not None]
        if torch.cuda.graphs.__file__ in files:
            for device in range(len(self.machine.devices)):
                self.engine.apply(DeviceSynchronize(device, site_at_hand()))
            return  # torch empties the cache before a capture; the program did not ask
        self._sync("empty_cache", None)

    def _add(self, accesses: list[tuple[int, Footprint, bool]], value: Any, write: bool) -> None:
        if isinstance(value, torch.Tensor):
            found = self._touch(value)
            if found is not None:
                accesses.append((found[0], found[1], write))
                return
            value = parts(value)  # a sparse one's
        if isinstance(value, (list, tuple)):
            touch = self._touch
            for item in value:  # hundreds, of an optimizer's operators
                found = touch(item) if isinstance(item, torch.Tensor) else None
                if found is None:
                    self._add(accesses, item, write)
                else:
                    accesses.append((found[0], found[1], write))

    # -- work and synchronisation

    def _launch(self, index: int, op: Any, accesses: Any, site: Any, note: str = "") -> None:
        if self._capture is not None:
            self._capture.accesses.update(dict.fromkeys(accesses))
        engine = self.active
        actor = engine.stream(index, self.machine.stream(index))
        if self._backward and torch._C._current_autograd_node() is not None:
            actor, note = self._in_backward(actor, index, op, accesses, note)
        engine.apply(_new(Launch, (actor, op, accesses, site, note)))
        if engine.many_streams or self._capture is not None:
            self._call_by_name(actor, accesses, site)

    def _in_backward(
        self, actor: int, index: int, op: Any, accesses: Any, note: str
    ) -> tuple[int, str]:
        """The actor and the note of what a node of the backward pass launches."""
        backward = self._backward[-1]
        if self.machine.stream_chosen(index):
            for address, _, write in accesses:
                if write:
                    backward.touched(address)
            return actor, note
        addresses = [address for address, _, _ in accesses]
        consumer = backward.summing(op[0] if isinstance(op, tuple) else op, addresses)
        if consumer is not None:
            actor = backward.sum_on(consumer, index)
        for address, where, write in accesses:
            if write:
                backward.wrote(address, where, op)
        return actor, note or "gradient"

    def _quiet(self, index: int, site: Any) -> None:
        """A copy that the program asked to wait for: it is what it says."""
        self.ledger.add("copy", site, allowed=True)
        self.active.apply(StreamSynchronize(self._actor(index), site))

    def _sync(self, reason: str, site: Any, index: int | None = None) -> None:
        site = site if site is not None else site_at_hand()
        self.ledger.add(reason, site, allowed=self.allowed > 0)
        if index is None:
            for device in range(len(self.machine.devices)):
                self.engine.apply(DeviceSynchronize(device, site))
        else:
            self.active.apply(StreamSynchronize(self._actor(index), site))

    # -- streams and events

    def event_record(self, event: int, index: int, number: int) -> None:
        engine = self.active
        engine.apply(EventRecord(event, engine.stream(index, number), site_at_hand()))

    def event_wait(self, event: int, index: int, number: int) -> None:
        engine = self.active
        engine.apply(EventWait(event, engine.stream(index, number), site_at_hand()))

    def event_query(self, event: int) -> None:
        """True on a virtual device: all that the event stands for is done."""
        self.engine.apply(EventSynchronize(event, site_at_hand()))

    def event_synchronize(self, event: int) -> None:
        self.engine.apply(EventSynchronize(event, site_at_hand()))

    def event_destroyed(self, event: int) -> None:
        self.engine.apply(EventDestroy(event))

    def stream_synchronize(self, index: int, number: int) -> None:
        self.engine.apply(StreamSynchronize(self.engine.stream(index, number), site_at_hand()))

    def device_synchronize(self, index: int) -> None:
        self.engine.apply(DeviceSynchronize(index, site_at_hand()))

    # -- graphs

    def capture_begin(self, index: int, number: int) -> None:
        self._capture = _Capture(len(self.captures))
        self._capture.engine.context = self._context
        self._capture.engine.labels = self.engine.labels
        self.active = self._capture.engine
        self.captures.append(self._capture.engine)

    def capture_end(self, index: int) -> Any:
        captured, self._capture = self._capture, None
        self.active = self.engine
        if captured is not None:
            used = {address for address, _, _ in captured.accesses}
            self.engine.apply(GraphCapture(captured.number, sorted(used - captured.allocated)))
        return captured

    def graph_launch(self, captured: Any, index: int, number: int) -> None:
        """Everything that was captured, as one operation. Memory that lives in the graph's own
        pool, and its results, are among it.
        """
        if captured is None:  # before the watch: what it does is not known
            self.uncharged_graphs += 1
            return
        actor = self.engine.stream(index, number)
        self.engine.apply(
            GraphReplay(captured.number, actor, list(captured.accesses), site_at_hand())
        )

    # -- the backward pass

    def backward_begins(self, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        """``_engine_run_backward`` is called, with these arguments."""
        machine = self.machine
        callers = {index: machine.stream(index) for index in range(len(machine.devices))}
        self._backward.append(BackwardPass(self, machine.nodes, callers, given, options))

    def node_begins(self, node: Any) -> None:
        if self._backward:
            self._backward[-1].begins(node)

    def backward_ends(self) -> None:
        """The streams current where backward was called wait for those of the leaves."""
        self._backward.pop().begins(None)

    def device_of_address(self, address: int) -> int:
        """The device whose memory lies at ``address``."""
        return address // _SPACE
