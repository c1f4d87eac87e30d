"""What process groups over NCCL hold on to, and the buffers that they make.

* Lists of tensors of one size are sent as one tensor, of all ranks' parts, which ``all_gather`` and
  ``reduce_scatter`` allocate.
* From torch 2.8 on, an operation with ``async_op=True`` keeps its tensors, that buffer among them,
  until its ``Work`` is waited for. Waiting for ``Work.get_future()`` does not let go of them, and
  neither does dropping the ``Work``: the first operation of the group after the watchdog has seen
  this one done does. So what an optimizer of several ranks has sent (gradients, lists, what it
  padded them with) may be there until the next step's first operation, at the peak of the forward
  and backward pass.

Source: ``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp``: collective, workEnqueue, newLikeFlat,
WorkNCCL::synchronizeStream and Watchdog::runLoop; before 2.8 tensors were recorded on NCCL's stream
instead (pull request 150398), and counted as free as soon as they were.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from gpuprobe.model.memory import TraceAction
from gpuprobe.model.text import human_bytes
from gpuprobe.patching import Patches
from gpuprobe.torch_support.callers import TORCH
from gpuprobe.torch_support.tensors import tensors_in
from gpuprobe.torch_support.traffic import asynchronous, given_to, group_of
from gpuprobe.virtual.frames import caller, where
from gpuprobe.virtual.machine import Machine

_KEEPS_TENSORS: Final = (2, 8)
_ALLOC: Final = TraceAction.ALLOC.code
_QUEUED: Final = 1024
"""Launches that CUDA queues, after which the host waits for the first of them: an operation is done
once so many blocks were allocated after it, where the host has waited for nothing before."""
_LISTS: Final = {"allgather_": "output_tensors", "reduce_scatter_": "input_tensors"}


class _Kept:
    """The tensors of one operation, and the block of its buffer. ``work`` is what the program got:
    the same object as long as somebody has it.
    """

    def __init__(self, group: str, work: Any, tensors: list[Any], free: Callable[[], None]) -> None:
        self.place = where()
        self.group = group
        self.work = work
        self.tensors = tensors
        self.free = free
        self.done_at = 0
        self.is_done = False


class InFlight:
    """The operations that nobody has waited for: the values of ``Machine.unwaited``. ``over_nccl``:
    names of groups.
    """

    def __init__(self, machine: Machine, over_nccl: set[str], patches: Patches) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import Work

        self._machine = machine
        self._over_nccl = over_nccl
        self._kept: dict[int, _Kept] = machine.unwaited
        self._works: Any = Work
        self._listens: list[Any] = []
        self._allocations = 0
        self._most = 0  # bytes that were freed at one operation, and a line that had sent them
        self._sent_at = ""
        for name in ("wait", "synchronize"):
            patches.set(Work, name, self._then_released(getattr(Work, name)))
        c10d = dist.distributed_c10d
        destroy = self._with_group(c10d.destroy_process_group)
        patches.set_all(c10d, {"destroy_process_group": destroy}, "torch.distributed")
        machine.in_flight = self
        patches.add(self._end)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Any, do: Callable[[], Any]) -> Any:
        """An operator of ``c10d``, which ``do`` executes."""
        machine = self._machine
        given = given_to(func._schema, args, kwargs)
        place = max((machine.place_of(tensor) for tensor in tensors_in(args)), default=-1)
        if place < 0 or "process_group" not in given or machine.capture is not None:
            return do()
        group = str(group_of(given).group_name)
        if group not in self._over_nccl:
            return do()
        free = self._flattened(func, given, place)
        try:
            result = do()
        except BaseException:
            free()
            raise
        self._release(group)
        work = result[-1] if isinstance(result, tuple) else result
        kept = machine.torch >= _KEEPS_TENSORS and asynchronous(func._schema, given)
        if not kept or _called_by_torch():
            free()
        else:
            work = self._works.unbox(work)
            one = _Kept(group, work, list(tensors_in((args, kwargs))), free)
            one.done_at = self._allocations + _QUEUED
            self._kept[id(work)] = one
            self._listen()
        return result

    def host_has_waited(self) -> None:
        """For the device: all that was sent is done."""
        for kept in self._kept.values():
            kept.is_done = True

    def _flattened(self, func: Any, given: dict[str, Any], place: int) -> Callable[[], None]:
        """Allocate the one tensor of a list. What frees it."""
        listed = given.get(_LISTS.get(func._schema.name.removeprefix("c10d::"), ""))
        tensors = list(tensors_in(listed)) if listed is not None else []
        if not tensors or any(tensor.shape != tensors[0].shape for tensor in tensors):
            return _nothing
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if not nbytes:
            return _nothing
        device = self._machine.devices[place]
        return functools.partial(device.free, device.malloc(nbytes, self._machine.stream(place)))

    def _release(self, group: str) -> None:
        """What the watchdog has seen done, at another operation of the group."""
        done = [
            key
            for key, kept in self._kept.items()
            if kept.group == group and (kept.is_done or self._allocations >= kept.done_at)
        ]
        freed: Counter[str] = Counter()
        for key in done:
            place, before = self._kept[key].place, self._allocated()
            self._let_go(key)
            freed[place] += before - self._allocated()
        if freed.total() > self._most:
            self._most, self._sent_at = freed.total(), max(freed, key=freed.__getitem__)

    def _allocated(self) -> int:
        return sum(device.sim.allocated for device in self._machine.devices)

    def _let_go(self, key: int) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            kept.free()
        if not self._kept:
            self._listen()

    def _then_released(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            self._let_go(id(work))
            return result

        return waited

    def _with_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A process group lets go of what it keeps when it ends; all do if none is named."""

        @functools.wraps(original)
        def destroyed(group: Any = None) -> Any:
            name = None if group is None else str(getattr(group, "group_name", ""))
            result = original(group)
            for key, kept in list(self._kept.items()):
                if name in (None, kept.group):
                    self._let_go(key)
            return result

        return destroyed

    def _listen(self) -> None:
        """Count allocations as long as there is something to be released."""
        devices = self._machine.devices if self._kept else []
        for device in self._listens:
            if device not in devices:
                device.listeners.remove(self._event)
        for device in devices:
            if device not in self._listens:
                device.listeners.append(self._event)
        self._listens = [*devices]

    def _event(self, action: int, *rest: Any) -> None:
        self._allocations += action == _ALLOC

    def _end(self) -> None:
        for key in list(self._kept):
            self._let_go(key)
        self._machine.in_flight = None
        if self._most:
            self._machine.assume(
                f"{human_bytes(self._most)} at most are kept by collectives that were sent with "
                f"async_op=True (such as at {self._sent_at}), and that the program does not wait "
                "for, until the first one of the group after they are done: Work.wait() lets go of "
                "their tensors, waiting for Work.get_future() does not"
            )


def _called_by_torch() -> bool:
    """Whether C++ code of torch's sends something, which waits for the ``Work`` itself: what
    DistributedDataParallel broadcasts and compares at its start (``c10d/comm.cpp``,
    ``c10d/reducer.cpp``). What its reducer sends are buckets, which it keeps anyway, but for those
    of the first step.
    """
    from torch.distributed import distributed_c10d

    frame = caller()
    file = TORCH if frame is None else frame.f_code.co_filename
    return file.startswith(TORCH) and file != distributed_c10d.__file__


def _nothing() -> None:
    pass
