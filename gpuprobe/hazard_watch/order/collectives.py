"""Collectives of torch.distributed.

A collective that a program starts with ``async_op=True`` runs on a stream of its process group:
that stream waits for the caller's current one first, and ``work.wait()`` makes the stream that is
current then wait for it (NCCL: ``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp``, ``collective``
and ``synchronizeStream``). gloo takes another stream for each collective of CUDA tensors
(``ProcessGroupGloo.cpp``); it is checked as NCCL is, for which programs are written. Its tensors
are kept until it is done. All others run on the current stream, or are waited for by torch itself
(DDP's reducer, functional collectives at the first use of their result).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload

from gpuprobe.hazard_watch.device import HOST
from gpuprobe.hazard_watch.names import site_at_hand
from gpuprobe.hazard_watch.order.source import OrderSource
from gpuprobe.hazards.events import (
    Allocation,
    EventDestroy,
    EventRecord,
    EventWait,
    ForgetStream,
    Free,
    HostAccess,
    Launch,
    Site,
    StreamOrder,
    StreamSynchronize,
)
from gpuprobe.hazards.footprint import Footprint, of_tensor
from gpuprobe.patching import Patches
from gpuprobe.torch_support.tensors import tensors_in
from gpuprobe.user_frames import PACKAGE, folder_of, outside

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work


_TORCH: Final = folder_of(torch)
_DISTRIBUTED: Final = f"{_TORCH}distributed/distributed_c10d.py"
# Between a Python call and its operator: torch.compile's guards, the dispatcher.
_BETWEEN: Final = (
    PACKAGE,
    *(f"{_TORCH}{name}" for name in ("_dynamo/", "_compile.py", "_ops.py", "utils/", "autograd/")),
)
_HOST_SPACE: Final = 1 << 61  # addresses of host tensors that collectives work on
_NO_DEVICE: Final = -1


class Collectives:
    """The work handles of one check."""

    def __init__(self, source: OrderSource) -> None:
        self._source = source
        self._groups: dict[object, int] = {}
        self._events: dict[int, tuple[weakref.ref[Work], int, int, int, list[int]]] = {}
        self._pending: dict[int, int] = {}  # by storage: the event of a functional collective
        # The newest handle, with its thread, until the program has it: without it, Python would
        # create another object. It must not stay longer: it keeps the collective's tensors alive.
        self._newest: tuple[int, Work] | None = None
        self._count = 0
        self.waiting: FrameType | None = None  # the frame that waits for a handle
        # The number of collectives by host storage that a group's thread uses.
        self.flying: dict[int, int] = {}
        self._host: dict[int, tuple[weakref.ref[Work], int, list[int]]] = {}

    def install(self, patches: Patches) -> None:
        """Report the waits of handles, if this torch has torch.distributed."""
        import torch.distributed as dist

        if not dist.is_available():
            return
        patches.add(self._ended)
        from torch._C._distributed_c10d import Work

        waited = self._waited

        def following(name: str) -> Any:
            original = getattr(Work, name)

            def method(work: Work, *args: Any, **kwargs: Any) -> Any:
                before, self.waiting = self.waiting, sys._getframe(1)
                try:
                    result = original(work, *args, **kwargs)
                finally:
                    self.waiting = before
                if name != "is_completed" or result:
                    waited(work)
                return result

            method.__name__ = name
            return method

        # C++ code can wait for a future without a Python call: requesting one counts as a wait.
        for name in ("wait", "synchronize", "is_completed", "get_future"):
            patches.set(Work, name, following(name))

    def launched(self, func: OpOverload, args: tuple[Any, ...]) -> int | None:
        """The number of the stream that a collective runs on: a negative one of its process group;
        None for the caller's stream. Call `started` after its launch.
        """
        names = [argument.name for argument in func._schema.arguments]
        if "async_op" in names:
            at = names.index("async_op")
            if at < len(args) and not args[at]:
                return None
        if not self._from_python():
            return None
        from torch._C._distributed_c10d import ProcessGroup

        group = ProcessGroup.unbox(args[names.index("process_group")])
        return self.group_number(group.group_name)

    def group_number(self, key: object) -> int:
        """The stream number of a process group, by its name."""
        return self._groups.setdefault(key, -1 - len(self._groups))

    def _recorded(self, actor: int, site: Site) -> int:
        self._count += 1
        event = -self._count  # those of the program are positive
        self._source.active.apply(EventRecord(event, actor, site))
        return event

    def results_pending(self, actor: int, result: object, site: Site) -> None:
        """A functional collective was launched: `awaited` is called for its results
        (``torch/csrc/distributed/c10d/Functional.cpp``, ``wait_tensor``).
        """
        for tensor in tensors_in(result):
            key = tensor.untyped_storage()._cdata
            old = self._pending.pop(key, None)
            if old is not None:
                self._source.active.apply(EventDestroy(old))
            self._pending[key] = self._recorded(actor, site)

    def awaited(self, tensor: Tensor, index: int) -> None:
        """The current stream waits for the collective that ``tensor`` is a result of."""
        event = self._pending.pop(tensor.untyped_storage()._cdata, None)
        if event is not None:
            self._wait(event, index)
            self._source.active.apply(EventDestroy(event))

    def _wait(self, event: int, index: int) -> None:
        """The current stream of a device waits for an event."""
        engine, machine = self._source.active, self._source.machine
        waiter = engine.stream(index, machine.stream(index))
        engine.apply(EventWait(event, waiter, site_at_hand()))

    def started(
        self, actor: int, index: int, result: object, addresses: list[int], site: Site
    ) -> None:
        """A collective was launched: a wait for its handle waits for it. Its tensors, at
        ``addresses``, are kept until then.
        """
        work = _handle(result)
        event = self._recorded(actor, site)

        def gone(_: object, key: int = id(work)) -> None:
            found = self._events.pop(key, None)
            if found is not None:
                self._source.active.apply(EventDestroy(found[1]))

        self._events[id(work)] = (weakref.ref(work, gone), event, index, actor, addresses)
        self._newest = threading.get_ident(), work

    def _ended(self) -> None:
        self._newest = None

    def continued(self) -> None:
        """This thread calls another operator: the program has its last collective's handle."""
        if self._newest is not None and self._newest[0] == threading.get_ident():
            self._newest = None

    def finishing(self) -> bool:
        """Whether the current operator belongs to a handle, which finishes its collective in a wait
        (``ProcessGroupGloo.cpp`` copies the part of a reduce-scatter).
        """
        return outside(sys._getframe(1), _BETWEEN) is self.waiting

    def _waited(self, work: Work) -> None:
        source = self._source
        machine = source.machine
        if self._newest is not None and self._newest[1] is work:
            self._newest = None
        host = self._host.pop(id(work), None)
        if host is not None:
            self._landed(host[1], host[2])
            return
        found = self._events.get(id(work))
        if found is not None and found[0]() is work:
            _, event, index, actor, addresses = found
            self._wait(event, index)
            # The handle kept them ("stash" in ``ProcessGroupNCCL.cpp``); no stream does any longer.
            for address in addresses:
                source.active.apply(ForgetStream(address, actor))
            return
        # A handle of several collectives (coalesced), or one from before the check.
        for index in range(len(machine.devices)):
            waiter = source.active.stream(index, machine.stream(index))
            for number in self._groups.values():
                source.active.apply(StreamOrder(waiter, source.active.stream(index, number)))

    # -- host tensors

    def on_host(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        written: Sequence[bool],
        result: object,
        site: Site,
    ) -> None:
        """A collective of host tensors: a thread of the group uses them until the handle's wait
        (``ProcessGroupGloo.cpp``: ``AsyncWork``, ``runLoop``).
        """
        number = self.launched(func, args)
        if number is None:
            return
        engine, machine = self._source.engine, self._source.machine
        accesses, keys = [], []
        for value, write in zip(args, written, strict=False):
            for tensor in tensors_in(value):
                where = None if machine.place_of(tensor) != HOST else _footprint(tensor)
                if where is None:
                    continue
                key = tensor.untyped_storage()._cdata
                if key not in self.flying:
                    engine.apply(Allocation(key + _HOST_SPACE, tensor.untyped_storage().nbytes()))
                self.flying[key] = self.flying.get(key, 0) + 1
                keys.append(key)
                accesses.append((key + _HOST_SPACE, where, write))
        if not accesses:
            return
        actor = engine.stream(_NO_DEVICE, number)
        engine.apply(Launch(actor, func._schema.name.rpartition("::")[2], accesses, site))
        work = _handle(result)

        def gone(_: object, key: int = id(work)) -> None:
            found = self._host.pop(key, None)
            if found is not None:
                self._landed(None, found[2])

        self._host[id(work)] = (weakref.ref(work, gone), actor, keys)
        self._newest = threading.get_ident(), work

    def host_use(self, tensor: Tensor, write: bool, op: str, site: Site) -> None:
        """The host uses a tensor that a collective may still use."""
        key = tensor.untyped_storage()._cdata
        where = _footprint(tensor) if key in self.flying else None
        if where is not None:
            self._source.engine.apply(HostAccess(key + _HOST_SPACE, where, write, op, site))

    def _landed(self, actor: int | None, keys: list[int]) -> None:
        """The host has waited for a collective; without ``actor``, no wait is possible any more."""
        engine = self._source.engine
        if actor is not None:
            engine.apply(StreamSynchronize(actor, site_at_hand()))
        for key in keys:
            self.flying[key] -= 1
            if not self.flying[key]:
                del self.flying[key]
                engine.apply(Free(key + _HOST_SPACE))

    def _from_python(self) -> bool:
        """Whether a function of ``torch.distributed`` started it, which returns its handle to the
        program, and not C++ code of torch (DDP's reducer), which waits for it itself.
        """
        frame = outside(sys._getframe(2), _BETWEEN)
        return frame is not None and frame.f_code.co_filename == _DISTRIBUTED


def _handle(result: Any) -> Work:
    """The handle in a collective's results: alone, or the last of several."""
    from torch._C._distributed_c10d import Work

    return Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result)


def _footprint(tensor: Tensor) -> Footprint | None:
    item = tensor.element_size()
    start = tensor.untyped_storage()._cdata + _HOST_SPACE + tensor.storage_offset() * item
    return of_tensor(start, tensor.size(), tensor.stride(), item)
