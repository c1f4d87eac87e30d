"""What the engine is given: launches, copies, memory and waits, as a device model reports them."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

from gpuprobe.code_origin import PACKAGE
from gpuprobe.hazard_watch import host_access as host_watch
from gpuprobe.hazard_watch.base import DeviceModel
from gpuprobe.hazard_watch.collectives import Collectives
from gpuprobe.hazard_watch.operators import SYNCS_FIRST, Plan
from gpuprobe.hazard_watch.places import place, site_at_hand
from gpuprobe.hazard_watch.processes import Processes
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.footprint import Footprint, of_tensor, whole
from gpuprobe.hazards.ledger import SyncLedger
from gpuprobe.hazards.observer import PINNED, StorageTag
from gpuprobe.patching import Patches
from gpuprobe.torch_support.tensors import is_meta, parts

__all__ = ["EventSource", "place"]

_SPACE: Final = 1 << 56  # one address space per device, and one for pinned memory
_PINNED_SPACE: Final = 1 << 60

_is_contiguous = torch._C.TensorBase.is_contiguous


class _Capture:
    """A CUDA graph while it is captured. Nothing runs: what is launched is judged within the
    graph, by an engine of its own, and as one operation at each replay.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.engine = Engine()
        self.accesses: dict[tuple[int, Footprint, bool], None] = {}
        self.allocated: set[int] = set()


class EventSource:
    """The observer of one device model. Everything arrives in program order."""

    def __init__(self, machine: DeviceModel) -> None:
        self.machine = machine
        self.engine = Engine()
        # What is launched and waited for is told to this: within a capture, the graph's own.
        self.active = self.engine
        self.ledger = SyncLedger()
        self.allowed = 0
        self.unseen_graphs = 0
        self.arrays = 0
        self.earlier = False  # whether there was device memory before the watch
        self._plans: dict[Any, Plan] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._capture: _Capture | None = None
        self.captures: list[Engine] = []
        self._backward: list[dict[str, Any]] = []
        self.collectives = Collectives(self)
        self.processes = Processes(self)

    def install(self, patches: Patches) -> None:
        """Follow the backward pass: the engine orders its streams by itself."""
        original = torch.autograd.graph._engine_run_backward
        source = self

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            source.backward_begins()
            try:
                return original(*args, **kwargs)
            finally:
                source.backward_ends()

        for module in (torch.autograd.graph, torch.autograd):
            if getattr(module, "_engine_run_backward", None) is original:
                patches.set(module, "_engine_run_backward", run_backward)
        host_watch.install(self, patches)
        self.collectives.install(patches)
        self.processes.install(patches)
        # What exists already was made before the watch.
        for tag in list(self.machine.tags.values()):
            self.earlier = self.earlier or tag.place >= 0
            self.allocated(tag)

    # -- places

    def _actor(self, index: int) -> int:
        return self.active.stream(index, self.machine.stream(index))

    def _address(self, tag: StorageTag) -> int | None:
        if tag.place >= 0:
            return None if tag.block is None else tag.block.address + tag.place * _SPACE
        return tag.key + _PINNED_SPACE if tag.place == PINNED else None

    def site(self) -> Any:
        """The program's line at hand."""
        return site_at_hand()

    def _touch(self, tensor: Any) -> tuple[int, Footprint] | None:
        try:
            tag = self.machine.tags.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None
        if tag is None:
            return None
        address = self._address(tag)
        if address is None:
            return None
        if _is_contiguous(tensor):  # nearly all: no need to look at the strides
            nbytes = tensor.nbytes
            if nbytes == tag.nbytes:
                return (address, whole(address, address + nbytes)) if nbytes else None
            start = address + tensor.storage_offset() * tensor.element_size()
            return (address, whole(start, start + nbytes)) if nbytes else None
        item = tensor.element_size()
        where = of_tensor(
            address + tensor.storage_offset() * item, tensor.size(), tensor.stride(), item
        )
        return None if where is None else (address, where)

    # -- memory

    def allocated(self, tag: StorageTag) -> None:
        address = self._address(tag)
        if address is not None and not self.engine.knows(address):
            owner = (tag.place, tag.stream) if tag.place >= 0 else None
            self._add_block(address, tag.nbytes, owner, self._capture is not None)

    def _add_block(
        self, address: int, nbytes: int, owner: tuple[int, int] | None, captured: bool
    ) -> None:
        """``owner``: device and number of the stream it is allocated on, None where that is not
        known. ``captured``: it belongs to the graph that is being captured.
        """
        engines = [self.engine]
        if captured and self._capture is not None:
            self._capture.allocated.add(address)
            engines.append(self._capture.engine)
        for engine in engines:
            engine.alloc(address, max(nbytes, 1), -1 if owner is None else engine.stream(*owner))

    def freed(self, tag: StorageTag) -> None:
        address = self._address(tag)
        if address is not None:
            self._freed(address, waits=tag.place == PINNED)

    def _freed(self, address: int, *, waits: bool = False) -> None:
        site = site_at_hand() if self.engine.in_graph(address) else None
        self.engine.free(address, site, waits=waits)
        if self._capture is not None:
            self._capture.engine.free(address)

    def resized(self, tag: StorageTag, old: Any) -> None:
        if old is not None:
            self._freed(old.address + tag.place * _SPACE)
        self.allocated(tag)

    def idle(self, index: int, number: int) -> bool:
        """Whether the host has waited for all that was launched on a stream."""
        return self.engine.idle(self.engine.stream(index, number))

    def record_stream(self, tag: StorageTag, number: int) -> None:
        address = self._address(tag)
        if address is not None:
            self.active.record_stream(address, self.active.stream(tag.place, number))

    def empty_cache(self) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        outer = None if frame is None else frame.f_back  # below torch.cuda.empty_cache itself
        if outer is not None and outer.f_code.co_filename.endswith("graphs.py"):
            for device in range(len(self.machine.devices)):
                self.engine.device_synchronize(device, None)
            return  # torch empties the cache before a capture; the program did not ask
        self._sync("empty_cache", None)

    # -- operators

    def _plan(self, func: Any) -> Plan:
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = Plan(func)
        return plan

    def device_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, index: int
    ) -> None:
        plan = self._plan(func)
        if self.collectives.waiting is not None and self.collectives.finishing():
            return
        if plan.copies:
            self._copies(plan, args, kwargs, result, index)
            return
        if not plan.kernel:
            return
        if plan.like:
            args = (None, *args[1:])
        accesses: list[tuple[int, Footprint, bool]] = []
        shapes: list[tuple[int, Any]] = []  # by first byte: a report has the one that raced
        written = plan.written
        touch = self._touch
        for at, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                found = touch(value)
                if found is not None:
                    accesses.append((*found, written[at] and plan.writes(at, args)))
                    shapes.append((found[1].low, value.shape))
                else:
                    self._add(accesses, parts(value), written[at])
            elif type(value) is list or type(value) is tuple:
                self._add(accesses, value, written[at])
        if kwargs:
            names = self._argument_names(func)
            for name, value in kwargs.items():
                if isinstance(value, (torch.Tensor, list, tuple)):
                    self._add(accesses, value, written[names.index(name)])
        if plan.results:
            if isinstance(result, torch.Tensor):
                found = touch(result)
                if found is not None:
                    accesses.append((*found, True))
                    shapes.append((found[1].low, result.shape))
                else:
                    self._add(accesses, parts(result), True)
            else:
                self._add(accesses, result, True)
        site = site_at_hand()
        op = (plan.name, shapes)
        reason = plan.reason or (plan.masked(args) if plan.indexes else None)
        if reason == "repeat_interleave" and kwargs.get("output_size") is not None:
            reason = None
        if plan.collective:
            number = self.collectives.launched(func, args, result)
            if number is not None:
                self._collective(index, number, op, accesses, result, site)
                return
        pinned = [item for item in accesses if item[0] >= _PINNED_SPACE]
        if pinned and not plan.indexes:
            accesses = self._taken(pinned, accesses, plan.name, site)
        if reason in SYNCS_FIRST:
            self._sync(reason, site, index)
        self._launch(index, op, accesses, site)
        if plan.indexes and any(
            isinstance(item, torch.Tensor) and self.machine.place_of(item) < 0 for item in args[1]
        ):
            self._quiet(index, site)  # ``indice.to(self.device())`` in TensorAdvancedIndexing.cpp
        if reason is not None and reason not in SYNCS_FIRST:
            self._sync(reason, site, index)

    def _argument_names(self, func: Any) -> list[str]:
        return [argument.name for argument in func._schema.arguments]

    def _add(self, accesses: list[tuple[int, Footprint, bool]], value: Any, write: bool) -> None:
        if isinstance(value, torch.Tensor):
            found = self._touch(value)
            if found is not None:
                accesses.append((found[0], found[1], write))
                return
            value = parts(value)  # a sparse one's
        if isinstance(value, (list, tuple)):
            for item in value:
                self._add(accesses, item, write)

    def _launch(self, index: int, op: Any, accesses: Any, site: Any, note: str = "") -> None:
        if self._capture is not None:
            self._capture.accesses.update(dict.fromkeys(accesses))
        actor = self._actor(index)
        backward = self._backward[-1] if self._backward else None
        if (
            backward is not None
            and torch._C._current_autograd_node() is not None
            and not self.machine.stream_chosen(index)
        ):
            # The engine makes each node's stream wait for the streams of its inputs.
            for other in backward["actors"]:
                if other != actor:
                    self.active.order(actor, other)
            backward["actors"].add(actor)
            note = note or "gradient"
            for address, where, write in accesses:
                if write:
                    backward["written"][address] = (where, op)
        self.active.launch(actor, op, accesses, site, note)

    def _collective(
        self, index: int, number: int, op: Any, accesses: Any, result: Any, site: Any
    ) -> None:
        """On a stream of the process group's, which waits for the current one; tensors are kept
        until the handle was waited for.
        """
        engine = self.active
        if self._capture is not None:
            self._capture.accesses.update(dict.fromkeys(accesses))
        actor = engine.stream(index, number)
        engine.stream_wait(actor, self._actor(index), site)
        for address, _, _ in accesses:
            engine.record_stream(address, actor)
        engine.launch(actor, op, accesses, site)
        self.collectives.started(actor, index, result, site)

    def _taken(self, pinned: Any, accesses: Any, op: str, site: Any) -> Any:
        """Host numbers that a kernel is given: the host reads them as it launches it
        (``TensorIterator::scalar_value``). What is left is the kernel's.
        """
        read = [item for item in pinned if not item[2]]
        for address, where, _ in read:
            self.engine.host_access(address, where, False, op, site)
        return [item for item in accesses if item not in read]

    def _copies(
        self,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        index: int,
    ) -> None:
        """The tensors of a copy, or of each in a list of them."""
        blocking = not kwargs.get("non_blocking")
        if plan.name == "_to_copy":
            self._copy(result, args[0], blocking, index)
            return
        target, source = args[0], args[1] if len(args) > 1 else kwargs["src"]
        blocking = blocking and not (len(args) > 2 and bool(args[2]))
        if plan.name == "copy_":
            self._copy(target, source, blocking, index)
            return
        for to, from_ in zip(target, source, strict=True):
            self._copy(to, from_, blocking, index)

    def _copy(self, target: Any, source: Any, blocking: bool, index: int) -> None:
        """Copies within a device, between devices, and to and from the host."""
        machine = self.machine
        to, from_ = machine.place_of(target), machine.place_of(source)
        accesses: list[tuple[int, Footprint, bool]] = []
        self._add(accesses, source, False)
        self._add(accesses, target, True)
        site = site_at_hand()
        shape = tuple(target.shape)
        if to >= 0 and from_ >= 0 and to != from_:
            # Fenced on both sides by torch (``copy_device_to_device`` in Copy.cu).
            one, other = self._actor(from_), self._actor(to)
            self.active.stream_wait(one, other, site)
            self._launch(from_, ("copy", shape), accesses, site)
            self.active.stream_wait(other, one, site)
            return
        self._launch(index, ("copy", shape), accesses, site)
        if (to >= 0 and from_ >= 0) or host_watch.is_number(source):
            return
        reason = machine.local.reason
        if to >= 0:
            if from_ == PINNED and not blocking:
                return
            if reason:
                self._sync(reason, site, index)
            elif not blocking:
                # The host waits until the source is staged, not until it has arrived (CUDA
                # runtime API: "API synchronization behavior").
                self.ledger.add("copy from pageable memory", site, allowed=self.allowed > 0)
            elif not source.numel():
                self._sync("copy from pageable memory", site, index)
            else:
                self._quiet(index, site)
        elif to == PINNED and not blocking:
            return
        elif not blocking:
            self._sync("copy to host", site, index)
        else:
            self._quiet(index, site)

    def _quiet(self, index: int, site: Any) -> None:
        """A copy that the program asked to wait for: it is what it says."""
        self.ledger.add("copy", site, allowed=True)
        self.active.stream_synchronize(self._actor(index), site)

    def _sync(self, reason: str, site: Any, index: int | None = None) -> None:
        self.ledger.add(
            reason, site if site is not None else site_at_hand(), allowed=self.allowed > 0
        )
        if index is None:
            for device in range(len(self.machine.devices)):
                self.engine.device_synchronize(device, site)
        else:
            self.active.stream_synchronize(self._actor(index), site)

    def host_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """An operator on host memory: pinned buffers are watched, and what a collective works
        on.
        """
        if func.namespace == "c10d":
            plan = self._plan(func)
            self.collectives.on_host(func, args, plan.written, result, site_at_hand())
            return
        plan = self._plan(func)
        if not plan.kernel:
            return
        if plan.like:
            args = (None, *args[1:])
        for at, value in enumerate(args):
            self._on_host(value, plan.written[at] and plan.writes(at, args), plan.name)
        if kwargs:
            names = self._argument_names(func)
            for name, value in kwargs.items():
                self._on_host(value, plan.written[names.index(name)], plan.name)

    def _on_host(self, value: Any, write: bool, op: str) -> None:
        """An argument of an operator that the host runs: a tensor, or a list of them."""
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (list, tuple)):
                for item in value:
                    self._on_host(item, write, op)
            return
        if is_meta(value):
            return
        try:
            tag = self.machine.tags.get(value.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return
        if tag is not None:
            found = self._touch(value) if tag.place == PINNED else None
            if found is not None:
                self.engine.host_access(found[0], found[1], write, op, site_at_hand())
        elif self.collectives.flying:
            self.collectives.host_use(value, write, op, site_at_hand())

    def host_use(self, tensor: Any, write: bool, op: str, note: str = "") -> None:
        """The host touches a pinned tensor outside the dispatcher."""
        found = self._touch(tensor)
        if found is not None:
            self.engine.host_access(found[0], found[1], write, op, site_at_hand(), note)

    def host_bytes(self, tensor: Any, where: Footprint, write: bool, op: str) -> None:
        """The host touches ``where``, from the first byte of a pinned tensor's storage, through
        NumPy.
        """
        tag = self.machine.tags.get(tensor.untyped_storage()._cdata)
        address = None if tag is None else self._address(tag)
        if address is not None:
            where = where._replace(low=where.low + address, high=where.high + address)
            self.engine.host_access(address, where, write, op, site_at_hand(), "numpy")

    def device_read(self, tensor: Any, index: int, op: str) -> None:
        """The host reads a device's tensor out of sight of the dispatcher, and waits for it."""
        accesses: list[tuple[int, Footprint, bool]] = []
        self._add(accesses, tensor, False)
        site = site_at_hand()
        self._launch(index, (op, tensor.shape), accesses, site)
        self._sync(op, site, index)

    def fused(self, op: str, index: int, reads: Any, writes: Any) -> None:
        """A kernel that a virtual device does the work of out of the dispatcher's sight."""
        accesses: list[tuple[int, Footprint, bool]] = []
        self._add(accesses, reads, False)
        self._add(accesses, writes, True)
        self._launch(index, op, accesses, site_at_hand())

    def declared(self, reads: Any, writes: Any, stream: Any) -> None:
        """A kernel launched outside the dispatcher, as its author describes it."""
        accesses: list[tuple[int, Footprint, bool]] = []
        self._add(accesses, reads, False)
        self._add(accesses, writes, True)
        machine = self.machine
        index = machine.local.device if stream is None else stream.device_index
        number = machine.stream(index) if stream is None else stream.cuda_stream
        actor = self.active.stream(index, number)
        if self._capture is not None:
            self._capture.accesses.update(dict.fromkeys(accesses))
        self.active.launch(actor, "declared kernel", accesses, site_at_hand())

    def aliased(self, tensor: Any, array: Any) -> Any:
        """A NumPy array over pinned memory: its uses are watched, where NumPy tells."""
        from gpuprobe.hazard_watch.pinned_array import watched

        self.arrays += 1
        return watched(self, tensor, array)

    # -- streams and events

    def event_record(self, event: int, index: int, number: int) -> None:
        engine = self.active
        engine.event_record(event, engine.stream(index, number), site_at_hand())

    def event_wait(self, event: int, index: int, number: int) -> None:
        engine = self.active
        engine.event_wait(event, engine.stream(index, number), site_at_hand())

    def event_query(self, event: int) -> None:
        """True on a virtual device: all that the event stands for is done."""
        self.engine.event_synchronize(event, site_at_hand())

    def event_synchronize(self, event: int) -> None:
        self.engine.event_synchronize(event, site_at_hand())

    def event_destroyed(self, event: int) -> None:
        self.engine.event_destroyed(event)

    def stream_synchronize(self, index: int, number: int) -> None:
        self.engine.stream_synchronize(self.engine.stream(index, number), site_at_hand())

    def device_synchronize(self, index: int) -> None:
        self.engine.device_synchronize(index, site_at_hand())

    # -- graphs

    def capture_begin(self, index: int, number: int) -> None:
        self._capture = _Capture(len(self.captures))
        self.active = self._capture.engine
        self.captures.append(self._capture.engine)

    def capture_end(self, index: int) -> Any:
        captured, self._capture = self._capture, None
        self.active = self.engine
        if captured is not None:
            used = {address for address, _, _ in captured.accesses}
            self.engine.captured(captured.number, sorted(used - captured.allocated))
        return captured

    def graph_launch(self, captured: Any, index: int, number: int) -> None:
        """Everything that was captured, as one operation. Memory that lives in the graph's own
        pool, and its results, are among it.
        """
        if captured is None:  # before the watch: what it does is not known
            self.unseen_graphs += 1
            return
        actor = self.engine.stream(index, number)
        self.engine.replay(captured.number, actor, list(captured.accesses), site_at_hand())

    # -- the backward pass

    def backward_begins(self) -> None:
        callers = {
            self.active.stream(index, self.machine.local.streams.get(index, 0))
            for index in range(len(self.machine.devices))
        }
        local = self.machine.local
        self._backward.append(
            {"actors": set(callers), "callers": callers, "written": {}, "base": local.base}
        )
        local.base = dict(local.streams)

    def backward_ends(self) -> None:
        """The streams current where backward was called wait for all that it used; what it
        wrote counts as written there (torch's notes: "Stream semantics of backward passes").
        """
        state = self._backward.pop()
        self.machine.local.base = state["base"]
        engine = self.active
        site = site_at_hand()
        for caller in state["callers"]:
            index = engine.names[caller][0]
            others = [actor for actor in state["actors"] if actor != caller]
            for actor in others:
                engine.order(caller, actor)
            if not any(engine.names[actor][0] == index for actor in others):
                continue
            accesses = [
                (address, where, True)
                for address, (where, _) in state["written"].items()
                if address // _SPACE == index and engine.knows(address)
            ]
            if accesses:
                engine.launch(caller, "backward", accesses, site, "gradient")
