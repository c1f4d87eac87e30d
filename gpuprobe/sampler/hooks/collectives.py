"""What a step exchanges with other ranks: calls of ``torch.distributed``, their bytes and time.

The functions of ``torch.distributed`` are Python, and FSDP2 calls them like anybody else, so
functions around them see every call; only the outermost counts, where one calls another. What
DistributedDataParallel exchanges its reducer does in C++: it is counted from the sizes of its
buckets, at each forward pass whose backward pass will exchange gradients.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from gpuprobe.model.run.session import BlindSpot, Collective
from gpuprobe.model.values import Bytes, ReadStatus, Unavailable
from gpuprobe.patching import patch

DDP = "all_reduce (DistributedDataParallel)"

BLIND_SPOT = BlindSpot(
    "collectives of DistributedDataParallel: its C++ code starts them in the backward pass",
    "their count and bytes are those of its buckets; their time is part of 'backward'",
)

_IN_BACKWARD = Unavailable("it overlaps the backward pass", ReadStatus.NOT_COLLECTED)

# Where each function is given what this rank hands over: position and name of the argument.
# None: it is counted by what it calls (the functions of objects pickle them first).
_PAYLOAD: dict[str, tuple[int, str] | None] = {
    "all_gather": (1, "tensor"),
    "all_gather_coalesced": (1, "input_tensor_list"),
    "all_gather_into_tensor": (1, "input_tensor"),
    "all_gather_object": None,
    "all_gather_single": (1, "input_tensor"),
    "all_reduce": (0, "tensor"),
    "all_reduce_coalesced": (0, "tensors"),
    "all_to_all": (1, "input_tensor_list"),
    "all_to_all_single": (1, "input"),
    "barrier": None,
    "batch_isend_irecv": None,
    "broadcast": (0, "tensor"),
    "broadcast_object_list": None,
    "gather": (0, "tensor"),
    "gather_object": None,
    "irecv": (0, "tensor"),
    "isend": (0, "tensor"),
    "monitored_barrier": None,
    "recv": (0, "tensor"),
    "reduce": (0, "tensor"),
    "reduce_scatter": (1, "input_list"),
    "reduce_scatter_single": (1, "input"),
    "reduce_scatter_tensor": (1, "input"),
    "scatter": (0, "tensor"),
    "scatter_object_list": None,
    "send": (0, "tensor"),
}


class _Nesting(threading.local):
    depth = 0
    inner = 0  # bytes of the calls inside the outermost one


class CollectiveCalls:
    """The calls since the last `take`, while installed. Counts those of all threads: FSDP2's are
    made by the threads of the autograd engine.
    """

    def __init__(self, blind: Callable[[BlindSpot], None]) -> None:
        self._blind = blind
        self._restore: list[Callable[[], None]] = []
        self._nesting = _Nesting()
        self._calls: dict[str, list[int]] = {}  # op -> count, bytes, ns
        self._lock = threading.Lock()
        self._synced = [0, 0]  # buckets and bytes of DistributedDataParallel
        self.active = False

    def install(self) -> None:
        """Watch from now on, where this torch has ``torch.distributed`` at all."""
        import torch.distributed as dist

        if not dist.is_available():
            return
        self.active = True
        for name, payload in _PAYLOAD.items():
            original = getattr(dist.distributed_c10d, name, None)
            if original is None:  # not every torch has every one
                continue
            watched = self._watched(name, original, payload)
            for owner in (dist.distributed_c10d, dist):
                if getattr(owner, name, None) is original:
                    self._restore.append(patch(owner, name, watched))
        work = torch._C._distributed_c10d.Work
        self._restore.append(patch(work, "wait", self._watched("wait", work.wait, None)))

    def remove(self) -> None:
        """Put everything back. Safe to call twice."""
        self.active = False
        while self._restore:
            self._restore.pop()()

    def forward_done(self, module: Any) -> None:
        """A model was called. If it is data parallel and this thread records gradients, the
        backward pass to come exchanges every bucket once.
        """
        if type(module).__name__ != "DistributedDataParallel" or not torch.is_grad_enabled():
            return
        if not module.require_backward_grad_sync:
            return
        sizes = _bucket_sizes(module)
        if not any(self._synced) and DDP not in self._calls:
            self._blind(BLIND_SPOT)
        self._synced[0] += len(sizes)
        self._synced[1] += sum(sizes)
        self._calls.setdefault(DDP, [0, 0, 0])

    def take(self) -> tuple[Collective, ...]:
        """What was called since the last time, the most bytes first."""
        with self._lock:
            calls = {op: tuple(sums) for op, sums in self._calls.items() if sums[0]}
            for sums in self._calls.values():
                sums[:] = (0, 0, 0)
        found = [
            Collective(op, count, Bytes(size), host_ns)
            for op, (count, size, host_ns) in calls.items()
        ]
        buckets, size = self._synced
        if buckets:
            self._synced = [0, 0]
            found.append(Collective(DDP, buckets, Bytes(size), _IN_BACKWARD))
        return tuple(sorted(found, key=lambda call: (-call.bytes, call.op)))

    def _watched(
        self, op: str, original: Callable[..., Any], payload: tuple[int, str] | None
    ) -> Callable[..., Any]:
        nesting = self._nesting

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.active or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            size = 0 if payload is None else _size(_argument(args, kwargs, *payload))
            if nesting.depth:
                nesting.inner += size
                return original(*args, **kwargs)
            nesting.depth, nesting.inner = 1, 0
            began = time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                spent = time.perf_counter_ns() - began
                nesting.depth = 0
                self._count(op, size if payload is not None else nesting.inner, spent)

        return watched

    def _count(self, op: str, size: int, spent: int) -> None:
        with self._lock:
            sums = self._calls.setdefault(op, [0, 0, 0])
            sums[0] += 1
            sums[1] += size
            sums[2] += spent


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


def _size(value: Any) -> int:
    """The bytes of a tensor, or of a list of them."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_size(item) for item in value)
    return 0


def _bucket_sizes(module: Any) -> list[int]:
    """The bytes of each bucket, as torch's own log of the module has them."""
    texts = module.logger._get_ddp_logging_data().strs_map
    text = texts.get("rebuilt_bucket_sizes") or texts.get("bucket_sizes", "")
    return [int(part) for part in text.replace(",", " ").split()]
