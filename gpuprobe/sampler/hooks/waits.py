"""How long each phase of a step waited for other ranks, and spent in copies to a device.

A call of ``torch.distributed`` that blocks waits from its start to its end: for ranks that have not
reached it yet, and for the data. DistributedDataParallel waits at the end of the backward pass, in
C++: from the moment when all gradients of this rank are computed (all its buckets are ready) to the
end of the pass. That moment is known without a hook on each parameter: callbacks of the autograd
engine run in the order in which they were queued, when the graph is done, and the one queued here
at the start of the pass comes before the one in which the reducer waits for its buckets
(``Reducer::mark_variable_ready`` queues it when the last bucket is ready;
torch/csrc/distributed/c10d/reducer.cpp).

A call that moves a tensor to a device blocks the program until the copy has finished, unless the
memory is pinned and the call is non-blocking. Copies are measured only in jobs of several ranks,
where the other ranks wait for one that copies slowly: in calls of ``Tensor.to`` that name a device,
and of ``Tensor.cuda``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import torch

from gpuprobe.clocks import perf_counter_ns
from gpuprobe.model.run.session import HostWait
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.patching import patch
from gpuprobe.torch_support.tensors import tensors_in

Waited: TypeAlias = dict[str, int | Unavailable]
"""Phase of depth one to nanoseconds. Empty if there are no other ranks."""

_ON_GPU: Final = Unavailable(
    "the GPU waits for other ranks, not the program", ReadStatus.NOT_COLLECTED
)

BACKWARD: Final = "backward"


class Waits:
    """The time waited since the last `take`, by calls in all threads."""

    def __init__(self, phase: Callable[[], str]) -> None:
        """``phase`` returns the path of the current phase."""
        self._phase = phase
        self._lock = threading.Lock()
        self._waited: Waited = {}
        self._expected = False  # whether the next backward pass is a DistributedDataParallel's
        self._computed: int | Unavailable | None = None  # when its gradients were complete

    def install(self) -> list[Callable[[], None]]:
        """Measure what DistributedDataParallel waits for in C++; returns functions that undo it."""
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        restore = []
        post_forward = DistributedDataParallel._post_forward

        def _post_forward(module: DistributedDataParallel, output: object) -> object:
            found = post_forward(module, output)
            if module.require_backward_grad_sync and torch.is_grad_enabled():
                for tensor in tensors_in(found):
                    if tensor.requires_grad:
                        tensor.register_hook(self._backward_begins)
                        break
            return found

        restore.append(patch(DistributedDataParallel, "_post_forward", _post_forward))
        coalesced = getattr(dist, "_broadcast_coalesced", None)
        if coalesced is not None:  # of buffers, in the forward pass

            def _broadcast_coalesced(*args: Any, **kwargs: Any) -> Any:
                began = perf_counter_ns()
                try:
                    return coalesced(*args, **kwargs)
                finally:
                    self.add(perf_counter_ns() - began)

            restore.append(patch(dist, "_broadcast_coalesced", _broadcast_coalesced))
        return restore

    def expect(self) -> None:
        """The next backward pass exchanges gradients."""
        self._expected = True

    def add(self, spent_ns: int) -> None:
        """A call waited this long, in the current phase."""
        phase = self._phase().partition("/")[0]
        # In a backward pass that exchanges gradients, what follows them is counted as one.
        if phase == BACKWARD and self._computed is not None:
            return
        self._count(phase, spent_ns)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        on_gpu = gradient.device.type != "cpu"
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._graph_done(on_gpu))

    def _graph_done(self, on_gpu: bool) -> None:
        self._computed = _ON_GPU if on_gpu else perf_counter_ns()

    def backward_done(self) -> int | None:
        """A backward pass has ended. Returns when the gradients of one that exchanges them were
        complete, by ``time.perf_counter_ns``; None if that is unknown.
        """
        computed, self._computed = self._computed, None
        expected, self._expected = self._expected, False
        if isinstance(computed, int):
            self._count(BACKWARD, perf_counter_ns() - computed)
        elif computed is not None:
            self._count(BACKWARD, computed)
        elif expected:
            reason = "the end of its computation is unknown"
            self._count(BACKWARD, Unavailable(reason, ReadStatus.NOT_COLLECTED))
        return computed if isinstance(computed, int) else None

    def _count(self, phase: str, spent: int | Unavailable) -> None:
        with self._lock:
            self._waited[phase] = _sum(self._waited.get(phase, 0), spent)

    def take(self) -> Waited:
        """The time by phase since the last call; empty unless there are other ranks."""
        import torch.distributed as dist

        with self._lock:
            found, self._waited = self._waited, {}
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
            return {}
        return found or {BACKWARD: 0}


def joined_waits(one: Waited, two: Waited) -> Waited:
    """The sums of two steps' times."""
    return {phase: _sum(one.get(phase, 0), two.get(phase, 0)) for phase in {**one, **two}}


def _sum(one: int | Unavailable, two: int | Unavailable) -> int | Unavailable:
    if isinstance(one, Unavailable):
        return one
    return two if isinstance(two, Unavailable) else one + two


_DEVICES: Final = (torch.device, str, int, torch.Tensor)
"""Types of an argument of ``Tensor.to`` that names a device; ``bool`` does not."""


class TimedWaits:
    """The calls by which the host has waited for the GPU since the last `take`, in all threads.
    Other ways to read a tensor, such as ``float(loss)`` and ``if loss > 1``, are slots of its type
    in C, and not among them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler of the program may synchronise, too
        self._waits: dict[str, list[int]] = {}

    def install(self) -> list[Callable[[], None]]:
        """Measure from now on; returns functions that undo it."""
        owners: tuple[tuple[Any, str, str], ...] = (
            (torch.cuda, "synchronize", "torch.cuda.synchronize()"),
            (torch.cuda.Stream, "synchronize", "Stream.synchronize()"),
            (torch.cuda.Event, "synchronize", "Event.synchronize()"),
            *((torch.Tensor, name, f"Tensor.{name}()") for name in ("item", "tolist", "cpu")),
        )
        return [
            patch(owner, name, self._timed(getattr(owner, name), call))
            for owner, name, call in owners
        ]

    def _timed(self, original: Callable[..., Any], call: str) -> Callable[..., Any]:
        of_tensor = call.startswith("Tensor.")

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or (of_tensor and not any(map(_on_gpu, args[:1]))):
                return original(*args, **kwargs)
            began = perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                spent = perf_counter_ns() - began
                with self._lock:
                    sums = self._waits.setdefault(call, [0, 0])
                    sums[0] += 1
                    sums[1] += spent

        return timed

    def take(self) -> tuple[HostWait, ...]:
        """The calls since the last one of this, the longest first."""
        with self._lock:
            waits, self._waits = self._waits, {}
        return sorted_waits(HostWait(call, count, ns) for call, (count, ns) in waits.items())


def _on_gpu(value: object) -> bool:
    """Whether it is a tensor there, without the __torch_function__ of a subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return isinstance(value, torch.Tensor) and value.is_cuda


def sorted_waits(waits: Iterable[HostWait]) -> tuple[HostWait, ...]:
    return tuple(sorted(waits, key=lambda wait: (-wait.ns, wait.call)))


def joined_host_waits(
    one: tuple[HostWait, ...] | Unavailable, two: tuple[HostWait, ...] | Unavailable
) -> tuple[HostWait, ...] | Unavailable:
    """The sums of two parts of one step."""
    if isinstance(one, Unavailable) or isinstance(two, Unavailable):
        return two if isinstance(one, Unavailable) else one
    sums: dict[str, HostWait] = {}
    for wait in (*one, *two):
        before = sums.get(wait.call, HostWait(wait.call, 0, 0))
        sums[wait.call] = HostWait(wait.call, before.count + wait.count, before.ns + wait.ns)
    return sorted_waits(sums.values())


class Copies:
    """The time spent in copies since the last `take`, in the thread that installed this."""

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self._spent: dict[str, int] = {}
        self._thread = 0
        self._within = False

    def install(self) -> list[Callable[[], None]]:
        """Measure from now on; returns functions that undo it."""
        self._thread = threading.get_ident()
        return [
            patch(torch.Tensor, name, self._measured(getattr(torch.Tensor, name), always))
            for name, always in (("to", False), ("cuda", True))
        ]

    def _measured(self, original: Callable[..., Any], always: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if (
                torch.compiler.is_compiling()
                or self._within
                or threading.get_ident() != self._thread
                or not (always or _names_device(args, kwargs))
            ):
                return original(*args, **kwargs)
            self._within = True
            began = perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._within = False
                phase = self._phase().partition("/")[0]
                spent = perf_counter_ns() - began
                self._spent[phase] = self._spent.get(phase, 0) + spent

        return measured

    def take(self) -> dict[str, int]:
        """The nanoseconds by phase of depth one since the last call."""
        found, self._spent = self._spent, {}
        return found


def _names_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "device" in kwargs or "other" in kwargs:
        return True
    return len(args) > 1 and isinstance(args[1], _DEVICES) and not isinstance(args[1], bool)
