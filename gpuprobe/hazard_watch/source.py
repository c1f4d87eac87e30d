"""Translates operators, copies and the host's accesses to events of the engine."""

from __future__ import annotations

import functools
import operator
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from gpuprobe.clocks import perf_counter
from gpuprobe.hazard_watch import host_access as host_watch
from gpuprobe.hazard_watch import rows
from gpuprobe.hazard_watch.device import HOST, PINNED, untraced
from gpuprobe.hazard_watch.host_integers import HostIntegers, flat, on_host
from gpuprobe.hazard_watch.names import site_at_hand
from gpuprobe.hazard_watch.operators import (
    SYNCS_FIRST,
    Plan,
    fills_uninitialized,
    needs_temporary,
)
from gpuprobe.hazard_watch.order.collectives import Collectives
from gpuprobe.hazard_watch.order.processes import Processes
from gpuprobe.hazard_watch.streams import PINNED_SPACE, StreamSource
from gpuprobe.hazards.events import (
    FUNCTIONAL,
    BlockAccess,
    HostAccess,
    Launch,
    Operator,
    RecordStream,
    Shape,
    Site,
    StreamWait,
)
from gpuprobe.hazards.footprint import Footprint
from gpuprobe.hazards.untracked import untrack
from gpuprobe.torch_support.callers import passed_on
from gpuprobe.torch_support.operator_calls import left_out, recording
from gpuprobe.torch_support.tensors import is_meta, parts, storage_key

# Python code reports a request for an array's memory since 3.12 (PEP 688); NumPy's C code never.
_UNREPORTED: Final = (
    "random numbers written into one, nditer, writes through a memoryview"
    if sys.version_info >= (3, 12)
    else "readinto, memoryview, struct, random numbers written into one, nditer"
)
_NEVER_CHECKED: Final = (
    "kernels outside torch's dispatcher (Triton, custom extensions, NCCL): declare them with "
    "gpuprobe.declare_access",
    "host threads are assumed to be ordered as Python ran them",
)
_C_CODE: Final = (
    f"what C code does with NumPy arrays over pinned memory ({_UNREPORTED}): name it with "
    "gpuprobe.declare_access(..., host=True)"
)
_Tensors: TypeAlias = Tensor | Sequence[Tensor]
_Accesses: TypeAlias = list[BlockAccess]
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_STEPS: Final = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
_PASSING_INTEGERS: Final = frozenset({"arange", "_to_copy", "copy_", *_STEPS})
"""Operators whose results may have integers that are known on the host."""
_Shapes: TypeAlias = list[tuple[int, tuple[int, ...]]]
_CALLERS: Final = 5
"""Frames of gpuprobe up to that of `EventSource._kernel`, from `EventSource.operator` on."""


def malloc_async() -> bool:
    """Whether the program selects CUDA's stream-ordered allocator."""
    settings = (
        os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    )
    return any("cudaMallocAsync" in text for text in settings)


def _by_place(accesses: _Accesses) -> tuple[_Accesses, _Accesses]:
    """The accesses to pinned memory, and those to a device's."""
    pinned: _Accesses = []
    device: _Accesses = []
    for address, where, write in accesses:
        (pinned if address >= PINNED_SPACE else device).append((address, where, write))
    return pinned, device


_P = ParamSpec("_P")


def _guarded(
    method: Callable[Concatenate[EventSource, _P], None],
) -> Callable[Concatenate[EventSource, _P], None]:
    """A method as `EventSource.guarded` calls it."""

    @functools.wraps(method)
    def guarded(source: EventSource, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        source.guarded(method, source, *args, **kwargs)

    return guarded


class EventSource(StreamSource):
    """What a program does on torch's CUDA, as events of the engine. ``broken``: why the check ended
    early, or "". Everything is in program order.

    Reports run in the program's own threads, or in the autograd engine's. A failure of this code
    ends the check, and is reported; the program continues.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arrays = 0  # NumPy arrays over pinned memory
        self._plans: dict[int, Plan] = {}
        """By identity: operators have a hash in Python, which takes as long as a view."""
        self.collectives = Collectives(self)
        self.processes = Processes(self)
        self.compiled_calls = 0
        self._compiled_inputs: set[int] = set()  # addresses, of the graph that runs
        self._left_out = left_out.calls
        self._lock = threading.RLock()  # autograd's threads report too

    def guarded(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call our own code; if it fails, the check ends and the program continues."""
        if self.broken:
            return
        try:
            with self._lock:
                if self._queue:
                    self.drain()
                if self.machine.in_backward:
                    self.machine.enter_node()
                call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - reported as a gap of the coverage
            self.broken = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"

    def coverage(self) -> list[str]:
        """Blind spots of this check, for its end."""
        sent = self.processes.sent
        compiled = left_out.since(self._left_out)
        gaps = {
            f"{self.engine.unknown_events} waits for events recorded outside the check"
            "": self.engine.unknown_events,
            _C_CODE: self.arrays,
            f"{self.uncharged_graphs} replays of CUDA graphs captured before the check started"
            "": self.uncharged_graphs,
            "races with work queued before the check started": self.earlier,
            f"accesses by other processes to {sent} tensors sent to them": sent,
            "memory reused by cudaMallocAsync: checked as with torch's own caching allocator"
            "": malloc_async(),
            compiled: compiled,
            f"memory within compiled graphs, in {self.compiled_calls} calls: their inputs and "
            "results are checked": self.compiled_calls,
            f"everything after gpuprobe's own failure: {self.broken}": self.broken,
        }
        return [*_NEVER_CHECKED, *(line for line, happened in gaps.items() if happened)]

    # -- the backward pass

    def backward_begins(self, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A call of ``_engine_run_backward`` begins, with these arguments."""
        self.guarded(self._begin_backward, given, options)
        self.machine.in_backward += 1

    def backward_ends(self) -> None:
        """The call returned, or raised."""
        self.machine.in_backward -= 1
        self.guarded(self._end_backward)

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

    def operator(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        below: Callable[[Any, Any, Any], Any],
    ) -> Any:
        """An operator is called: see `gpuprobe.torch_support.operator_calls`."""
        began = perf_counter()
        try:
            result = below(func, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again
            self.guarded(self._leaves_used, args, kwargs)
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
        plan = self._plans.get(id(func))
        if plan is None:
            plan = self._plans[id(func)] = Plan(func)
        self._leaves_used(args, kwargs)
        index = self.device_of(args, kwargs, result)
        if index >= 0:
            self.machine.use(index)
            if self._is_new(result):  # and not an argument's memory
                self._tag_new(args, made=False)
                self._tag_new(kwargs.values(), made=False)
                self._tag_new((result,), made=True)
            name = plan.name
            if name == "lift_fresh":
                self._lifted(result, index)
            else:
                self.device_op(plan, func, args, kwargs, result, index)
                if name in _PASSING_INTEGERS and not kwargs.get("alpha"):
                    self._record_integers(name, args, result)
        else:
            self.host_op(plan, func, args, kwargs, result)

    def _leaves_used(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.machine.leaves_used(args, kwargs, _below)

    def graph_called(self, inputs: Sequence[object], written: Collection[int]) -> None:
        """A compiled graph is called. ``written``: the positions of the inputs that it changes."""
        accesses: _Accesses = []
        for at, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and value.is_cuda:
                self.add_accesses(accesses, value, at in written)
        self._compiled_inputs = {address for address, _, _ in accesses}
        self._compiled_launch(inputs, accesses)

    def graph_returned(self, results: Sequence[object]) -> None:
        """A compiled graph returned. Of its results, those that are inputs were read only, such as
        the parameters that its backward pass needs.
        """
        self._tag_new(results, made=True)
        accesses: _Accesses = []
        self.add_accesses(accesses, results, True)
        written = [access for access in accesses if access[0] not in self._compiled_inputs]
        self.compiled_calls += self._compiled_launch(results, written)

    def _compiled_launch(self, tensors: Sequence[object], accesses: _Accesses) -> bool:
        """Launch a part of a compiled graph on the device of its tensors. False without one."""
        index = self.device_of(tuple(tensors), {}, None)
        if index >= 0:
            self.machine.use(index)
            self._launch(index, "compiled graph", accesses, site_at_hand())
        return index >= 0

    def device_op(
        self,
        plan: Plan,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        index: int,
    ) -> None:
        self.collectives.continued()
        if self.collectives.waiting is not None and self.collectives.finishing():
            return
        if plan.launches:
            self._kernel(plan, func, args, kwargs, result, index)
        elif plan.copies:
            self._copies(plan, args, kwargs, result, index)
        elif plan.functional:
            self._functional(plan, func, args, kwargs, result, index)
        elif plan.uninitialized:
            self._uninitialized(plan, result, index)

    def _kernel(
        self,
        plan: Plan,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
        index: int,
    ) -> None:
        """An operator that launches a kernel, and makes the host wait in some cases."""
        if plan.like:
            args = (None, *args[1:])
        accesses, shapes = self._accesses(plan, func, args, kwargs, result)
        site = site_at_hand(_CALLERS)
        op = (plan.name, shapes)
        untrack(shapes)
        untrack(op)
        if plan.collective:
            number = self.collectives.launched(func, args)
            if number is not None:
                self._collective(index, number, op, accesses, result, site)
                return
        if plan.indexes:
            accesses = self._indices_moved(args[1], accesses, index, site)
        else:
            for address, _, _ in accesses:
                if address >= PINNED_SPACE:
                    accesses = self._read_by_host(accesses, plan.name, site)
                    break
        if plan.reason is None and not plan.indexes:  # nearly all
            self._launch(index, op, accesses, site)
            return
        reason = plan.sync_reason(args, kwargs)
        if reason in SYNCS_FIRST:
            self._sync(reason, site, index)
        self._launch(index, op, accesses, site)
        if reason is not None and reason not in SYNCS_FIRST:
            self._sync(reason, site, index)

    def _indices_moved(
        self, indices: Sequence[Tensor | None], accesses: _Accesses, index: int, site: Site
    ) -> _Accesses:
        """Copy indices in host memory first: the host waits for that, but not for the kernel
        (``indice.to(self.device())`` in TensorAdvancedIndexing.cpp). Returns the kernel's own
        accesses.
        """
        on_host = [
            item
            for item in indices
            if isinstance(item, torch.Tensor) and self.machine.place_of(item) < 0
        ]
        if not on_host:
            return accesses
        pinned, device = _by_place(accesses)
        if pinned:
            self._launch(index, ("copy", tuple(on_host[0].shape)), pinned, site)
        self._explicit_sync(index, site)
        return device

    def _uninitialized(self, plan: Plan, result: Any, index: int) -> None:
        """Uninitialised memory: deterministic algorithms fill it, on the current stream."""
        if self.active.many_streams and isinstance(result, torch.Tensor):
            touched = self.touch(result)
            if touched is not None:
                address, _ = touched
                self.active.allocated(address, site_at_hand())
        if not fills_uninitialized():
            return
        accesses: _Accesses = []
        self.add_accesses(accesses, result, True)
        if accesses:
            self._launch(index, (f"fill of {plan.name}", result.shape), accesses, site_at_hand())

    def _functional(
        self,
        plan: Plan,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
        index: int,
    ) -> None:
        """A collective whose results are complete after ``wait_tensor`` on them."""
        if plan.name == "wait_tensor":
            self.collectives.awaited(args[0], index)
            return
        accesses, shapes = self._accesses(plan, func, args, kwargs, result)
        number = self.collectives.group_number(next(reversed(args), None))
        site = site_at_hand()
        self._on_group(index, number, (plan.name, shapes), accesses, site, FUNCTIONAL)
        self.collectives.results_pending(self.active.stream(index, number), result, site)

    def _accesses(
        self,
        plan: Plan,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> tuple[_Accesses, _Shapes]:
        """An operator's reads and writes; and the shapes of its tensors by their first byte, so
        that a report shows the one that raced.
        """
        accesses: _Accesses = []
        shapes: _Shapes = []
        written = plan.written
        for at, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                write = written[at] and plan.writes(at, args)
                if plan.rows and at == 0 and self._add_rows(accesses, shapes, plan, args, write):
                    continue
                touched = self.touch(value)
                if touched is None:
                    self.add_accesses(accesses, parts(value), written[at])
                else:
                    address, where = touched
                    accesses.append((address, where, write))
                    shapes.append((where.low, tuple(value.shape)))
            elif type(value) is list or type(value) is tuple:
                self.add_accesses(accesses, value, written[at])
        if kwargs:
            names = self._argument_names(func)
            for name, value in kwargs.items():
                if isinstance(value, (torch.Tensor, list, tuple)):
                    self.add_accesses(accesses, value, written[names.index(name)])
        if plan.results:
            touched = self.touch(result) if isinstance(result, torch.Tensor) else None
            if touched is None:
                made: _Accesses = []
                self.add_accesses(made, result, True)
                # A result may be an argument itself (the weights of a cuDNN RNN).
                accesses += [
                    (address, where, True)
                    for address, where, _ in made
                    if (address, where, False) not in accesses
                ]
            else:
                address, where = touched
                accesses.append((address, where, True))
                shapes.append((where.low, tuple(result.shape)))
        return accesses, shapes

    def _add_rows(
        self, accesses: _Accesses, shapes: _Shapes, plan: Plan, args: tuple[Any, ...], write: bool
    ) -> bool:
        """Add the rows of the first argument that an index selects; with one stream too, as others
        may be used later. False: they are unknown.
        """
        whole = self.touch(args[0])
        if whole is None:
            return False
        address, where = whole
        pieces = rows.pieces(self.machine, plan.name, args, where)
        if pieces is None:
            return False
        for piece in pieces:
            accesses.append((address, piece, write))
            shapes.append((piece.low, args[0].shape))
        return True

    def _argument_names(self, func: OpOverload) -> list[str]:
        return [argument.name for argument in func._schema.arguments]

    def _collective(
        self, index: int, number: int, op: Operator, accesses: _Accesses, result: Any, site: Site
    ) -> None:
        """A collective on a stream of its process group, which waits for the current one. Its
        tensors are kept until the wait for its handle.
        """
        actor = self._on_group(index, number, op, accesses, site)
        addresses = [address for address, _, _ in accesses]
        self.collectives.started(actor, index, result, addresses, site)

    def _on_group(
        self, index: int, number: int, op: Operator, accesses: _Accesses, site: Site, note: str = ""
    ) -> int:
        """Launch on a stream of a process group after a wait for the current one."""
        engine = self.active
        if self._capture is not None:
            self._capture.accesses.update(dict.fromkeys(accesses))
        actor = engine.stream(index, number)
        engine.apply(StreamWait(actor, self._actor(index), site))
        for address, _, _ in accesses:
            engine.apply(RecordStream(address, actor))
        engine.apply(Launch(actor, op, accesses, site, note))
        self.record_names(actor, accesses, site)
        return actor

    def _read_by_host(self, accesses: _Accesses, op: str, site: Site) -> _Accesses:
        """Separate the host numbers that a kernel gets, which the host reads as it launches it
        (``TensorIterator::scalar_value``). Returns the kernel's own accesses.
        """
        pinned, device = _by_place(accesses)
        self._host_accesses(pinned, False, op, site)
        return device + [access for access in pinned if access[2]]

    def _host_accesses(self, accesses: _Accesses, write: bool, op: str, site: Site) -> None:
        """Report the reads, or the writes, as the host's own."""
        for address, where, writes in accesses:
            if writes == write:
                self.engine.apply(HostAccess(address, where, write, op, site))

    def _copies(
        self,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        index: int,
    ) -> None:
        """One copy, or a list of copies."""
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

    def _copy(self, target: Tensor, source: Tensor, blocking: bool, index: int) -> None:
        """Copies within a device, between devices, and to and from the host."""
        machine = self.machine
        to, from_ = machine.place_of(target), machine.place_of(source)
        accesses: _Accesses = []
        self.add_accesses(accesses, source, False)
        self.add_accesses(accesses, target, True)
        site = site_at_hand()
        shape = tuple(target.shape)
        if (
            not blocking
            and PINNED in (to, from_)
            and (to >= 0 or from_ >= 0)
            and needs_temporary(target, source, to_device=to >= 0)
        ):
            self._copy_staged(index, shape, accesses, site)
            return
        if to >= 0 and from_ >= 0 and to != from_:
            # torch orders both streams before and after (``copy_device_to_device`` in Copy.cu).
            one, other = self._actor(from_), self._actor(to)
            self.active.apply(StreamWait(one, other, site))
            self._launch(from_, ("copy", shape), accesses, site)
            self.active.apply(StreamWait(other, one, site))
            return
        self._launch(index, ("copy", shape), accesses, site)
        if to >= 0 and from_ >= 0:
            return
        if to >= 0:
            if from_ == PINNED and not blocking:
                return
            if host_watch.is_number(source):
                self._sync("number assigned to an element", site, index)
            elif not blocking:
                # The host waits until the source is staged, not until it has arrived (CUDA
                # runtime API: "API synchronization behavior").
                self.ledger.add("copy from pageable memory", site, allowed=self.allowed > 0)
            elif not source.numel():
                self._sync("copy from pageable memory", site, index)
            else:
                self._explicit_sync(index, site)
        elif to == PINNED and not blocking:
            return
        elif not blocking:
            self._sync("copy to host", site, index)
        else:
            self._explicit_sync(index, site)

    def _copy_staged(self, index: int, shape: Shape, accesses: _Accesses, site: Site) -> None:
        """A copy through pageable memory: the host itself reads or writes the pinned tensor. It
        waits for data from the device, and not for data that it sent (CUDA runtime API, "API
        synchronization behavior").
        """
        pinned, device = _by_place(accesses)
        self._host_accesses(pinned, False, "copy", site)
        self._launch(index, ("copy", shape), device, site)
        if any(write for _, _, write in pinned):
            self._explicit_sync(index, site)
        else:
            self.ledger.add("copy", site, allowed=True)
        self._host_accesses(pinned, True, "copy", site)

    def host_op(
        self,
        plan: Plan,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """An operator on host memory: uses of pinned buffers and of tensors in a collective are
        checked.
        """
        self.collectives.continued()
        if func.namespace == "c10d":
            self.collectives.on_host(func, args, plan.written, result, site_at_hand())
            return
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

    def _on_host(self, value: object, write: bool, op: str) -> None:
        """A tensor, or a list of tensors, that an operator on the host gets."""
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (list, tuple)):
                for item in value:
                    self._on_host(item, write, op)
            return
        if is_meta(value) or not (key := storage_key(value)):
            return
        if self.machine.registered:
            self.machine.place_of(value)  # adds the tag of a storage in there
        tag = self.machine.tags.get(key)
        if tag is not None:
            touched = self.touch(value) if tag.place == PINNED else None
            if touched is not None:
                address, where = touched
                self.engine.apply(HostAccess(address, where, write, op, site_at_hand()))
        elif self.collectives.flying:
            self.collectives.host_use(value, write, op, site_at_hand())

    @_guarded
    def host_use(self, tensor: Tensor, write: bool, op: str, note: str = "") -> None:
        """The host touches a pinned tensor without an operator."""
        touched = self.touch(tensor)
        if touched is not None:
            address, where = touched
            self.engine.apply(HostAccess(address, where, write, op, site_at_hand(), note))

    @_guarded
    def host_bytes(self, tensor: Tensor, where: Footprint, write: bool, op: str) -> None:
        """The host touches bytes of a pinned tensor's storage through NumPy; ``where`` is relative
        to its first byte.
        """
        tag = self.machine.tags.get(tensor.untyped_storage()._cdata)
        address = None if tag is None else self._address(tag)
        if tag is not None and address is not None:
            start = address + tag.offset
            where = where._replace(low=where.low + start, high=where.high + start)
            self.engine.apply(HostAccess(address, where, write, op, site_at_hand(), "numpy"))

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
        step, before = _STEPS[name], self.machine.known_integers(args[0])
        if before is None or args[0].dtype != result.dtype:
            return None
        values = [step(value, args[1]) for value in before]
        limits = torch.iinfo(result.dtype)
        return values if all(limits.min <= value <= limits.max for value in values) else None

    def _keep(self, tensor: Tensor, values: Sequence[int] | None) -> None:
        address = self.block_of(tensor)
        if address is not None:
            self.machine.integers.keep(address, tensor, values)

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
        site = site_at_hand()
        self._launch(index, ("copy", result.shape), accesses, site)
        if not host_watch.is_constructed():  # an index: like one that the program copies
            self._explicit_sync(index, site)
        elif result.numel():
            self._sync("new tensor from host values", site, index)

    @_guarded
    def device_read(self, tensor: Tensor, index: int, op: str) -> None:
        """The host reads a device's tensor without an operator, and waits for it."""
        accesses: _Accesses = []
        self.add_accesses(accesses, tensor, False)
        if not accesses:
            return
        site = site_at_hand()
        self._launch(index, (op, tensor.shape), accesses, site)
        self._sync(op, site, index)

    @_guarded
    def declared(self, reads: _Tensors, writes: _Tensors, stream: torch.cuda.Stream | None) -> None:
        """A kernel launched outside the dispatcher, with its declared accesses."""
        accesses: _Accesses = []
        self.add_accesses(accesses, reads, False)
        self.add_accesses(accesses, writes, True)
        machine = self.machine
        index = machine.local.device if stream is None else stream.device_index
        number = machine.stream(index) if stream is None else stream.cuda_stream
        actor = self.active.stream(index, number)
        if self._capture is not None:
            self._capture.accesses.update(dict.fromkeys(accesses))
        self.active.apply(Launch(actor, "declared kernel", accesses, site_at_hand()))

    def declared_on_host(self, reads: _Tensors, writes: _Tensors) -> None:
        """Host code outside the dispatcher, with its declared accesses to pinned tensors."""
        for value, write in ((reads, False), (writes, True)):
            for tensor in (value,) if isinstance(value, torch.Tensor) else value:
                if self.machine.place_of(tensor) == PINNED:
                    self.host_use(tensor, write, "declared C code")

    def aliased(self, tensor: Tensor, array: object) -> object:
        """Trace the uses of a NumPy array over pinned memory, as far as NumPy reports them."""
        from gpuprobe.hazard_watch.pinned_array import traced

        self.arrays += 1
        return traced(self, tensor, array)


@contextmanager
def _below() -> Iterator[None]:
    """The same within an operator; autograd records."""
    with untraced(), recording():
        yield


def _flat(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
