"""What a step exchanges with other ranks: calls of ``torch.distributed``, their bytes and time, and
in the first steps a record of each operation.

The functions of ``torch.distributed`` are Python, and FSDP2 calls them like any other code, so
wrappers around them record every call; of nested calls only the outermost counts. The functional
collectives, which distributed tensors call, are wrapped too. DistributedDataParallel exchanges
gradients in C++ (its reducer): those are counted from the sizes of its buckets, at each forward
pass whose backward pass will exchange gradients, unless a communication hook in Python exchanges
them, whose calls are recorded.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from gpuprobe.clocks import perf_counter_ns
from gpuprobe.model.place import SourceLine
from gpuprobe.model.run.communication import (
    MOST_OPERATIONS,
    CollectiveRecord,
    group_text,
    wire_bytes,
)
from gpuprobe.model.run.session import BlindSpot, Collective
from gpuprobe.model.values import Bytes, ReadStatus, Unavailable
from gpuprobe.patching import patch
from gpuprobe.sampler.hooks.waits import Copies, Waits
from gpuprobe.torch_support.callers import running_module, user_line
from gpuprobe.torch_support.tensors import tensors_in

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel

_NOT_BLOCKING: Final = Unavailable("the call does not wait for it", ReadStatus.NOT_COLLECTED)
_MESH: Final = "mesh_"
"""How ``DeviceMesh`` begins the description of a group: the name of the dimension follows."""


class Records:
    """The records since the last `take`, made in all threads. ``on``: whether any are requested.
    ``simulated``: GPUs are simulated, and a call returns when its operation has completed.
    """

    def __init__(
        self, started_ns: Callable[[], int], on_fault: Callable[[Exception], None]
    ) -> None:
        """``started_ns``: when the session began, by ``time.perf_counter_ns``. ``on_fault`` gets
        internal errors: they must not reach the program.
        """
        self.on = True
        self.simulated = False
        self.left_out = False  # whether a step had too many operations
        self._on_fault = on_fault
        self._started_ns = started_ns
        self._sequence: Counter[str] = Counter()
        self._records: list[CollectiveRecord] = []
        self._buckets: tuple[DistributedDataParallel, list[int]] | None = None

    def called(
        self,
        op: str,
        payload: int,
        group: Any,
        tensor: object,
        peer: int | None,
        span: tuple[int, int],
        blocks: bool,
    ) -> None:
        """A call has returned. ``group`` is the group as its caller names it; ``tensor`` the
        payload, or a list of tensors; ``span`` when it began and ended; ``blocks``: it returned no
        handle.
        """
        try:
            found = group_of(group)
            if found is None:
                return
            first = next(tensors_in(tensor), None)
            on_gpu = first is not None and first.device.type != "cpu"
            completed = blocks and (self.simulated or not on_gpu)
            dtype = "" if first is None else _name(first.dtype)
            self._add(
                op, payload, found, dtype, user_line(), running_module(), peer, span, completed
            )
        except Exception as error:  # noqa: BLE001 - it must not reach the program
            self.on = False
            self._on_fault(error)

    def expect(self, module: DistributedDataParallel, sizes: list[int]) -> None:
        """The next backward pass exchanges the buckets of a DistributedDataParallel."""
        self._buckets = (module, sizes)

    def backward_done(self, computed: int | None, now: int) -> None:
        """The backward pass has ended, at ``now``; its gradients were complete at ``computed``, if
        that is known.
        """
        expected, self._buckets = self._buckets, None
        if expected is None:
            return
        module, sizes = expected
        kinds = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
        dtype = _name(kinds.pop()) if len(kinds) == 1 else ""
        place, name = user_line(), type(module).__name__
        for size in sizes:
            span = (computed or 0, now)
            self._add(
                "all_reduce",
                size,
                module.process_group,
                dtype,
                place,
                name,
                None,
                span,
                bool(computed),
            )

    def _add(
        self,
        op: str,
        payload: int,
        group: ProcessGroup,
        dtype: str,
        place: SourceLine,
        module: str,
        peer: int | None,
        span: tuple[int, int],
        completed: bool,
    ) -> None:
        label, ranks = str(group.group_name), group.size()
        self._sequence[label] += 1
        if len(self._records) >= MOST_OPERATIONS:
            self.left_out = True
            return
        started = self._started_ns()
        described = str(group.group_desc)
        unknown = Unavailable("unknown", ReadStatus.NOT_COLLECTED)
        self._records.append(
            CollectiveRecord(
                group=label,
                axis=described.removeprefix(_MESH) if described.startswith(_MESH) else "",
                ranks=ranks,
                sequence=self._sequence[label],
                op=op,
                dtype=dtype,
                payload=Bytes(payload),
                wire=wire_bytes(op, payload, ranks),
                place=place,
                module=module,
                arrival_ns=span[0] - started if span[0] else unknown,
                completion_ns=span[1] - started if completed else _NOT_BLOCKING,
                members=group_text(dist.get_process_group_ranks(group)),
                peer=unknown if peer is None else peer,
            )
        )

    def take(self) -> list[CollectiveRecord]:
        """The records since the last call."""
        found, self._records = self._records, []
        return found


def group_of(group: Any) -> ProcessGroup | None:
    """The process group that a caller names: a group, its name, a mesh and one of its dimensions,
    or None for all ranks. Returns None for a list of ranks.
    """
    if group is None:
        return dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)
    if isinstance(group, tuple):
        return group[0].get_group(group[1])
    if isinstance(group, list):
        return None
    return group if hasattr(group, "group_name") else group.get_group()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DDP = "all_reduce (DistributedDataParallel)"

BLIND_SPOT = BlindSpot(
    "collectives of DistributedDataParallel, which its C++ code starts in the backward pass",
    # torch logs the sizes at the begin of a forward pass, and then forms the buckets again.
    "their count and bytes are those of its buckets (in the step in which torch forms these again, "
    "the count is that of before); their time is part of 'backward'",
)

_IN_BACKWARD = Unavailable("it overlaps the backward pass", ReadStatus.NOT_COLLECTED)

# The argument with what this rank contributes to each function: position and name. None: counted by
# the functions that it calls (those of objects pickle them first).
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


# The same for functional collectives (torch/distributed/_functional_collectives.py).
_FUNCTIONAL: dict[str, tuple[str, tuple[int, str] | None]] = {
    "all_gather_into_tensor_coalesced": ("all_gather", (0, "self")),
    "all_gather_single": ("all_gather", (0, "self")),
    "all_gather_single_autograd": ("all_gather", (0, "self")),
    "all_gather_single_coalesced": ("all_gather", (0, "self")),
    "all_gather_tensor": ("all_gather", (0, "self")),
    "all_gather_tensor_autograd": ("all_gather", (0, "self")),
    "all_reduce": ("all_reduce", (0, "self")),
    "all_reduce_coalesced": ("all_reduce", (0, "self")),
    "all_to_all_single": ("all_to_all", (0, "self")),
    "all_to_all_single_autograd": ("all_to_all", (0, "self")),
    "broadcast": ("broadcast", (0, "self")),
    "permute_tensor": ("all_to_all", (0, "self")),
    "reduce_scatter_single": ("reduce_scatter", (0, "self")),
    "reduce_scatter_single_autograd": ("reduce_scatter", (0, "self")),
    "reduce_scatter_single_coalesced": ("reduce_scatter", (0, "inputs")),
    "reduce_scatter_tensor": ("reduce_scatter", (0, "self")),
    "reduce_scatter_tensor_autograd": ("reduce_scatter", (0, "self")),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", (0, "inputs")),
    "wait_tensor": ("wait", None),
}

_KINDS = {
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "irecv": "recv",
    "isend": "send",
    "monitored_barrier": "barrier",
    "recv": "recv",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "scatter": "scatter",
    "send": "send",
}
_ENDINGS = ("_into_tensor", "_coalesced", "_single", "_tensor")


def _kind(name: str) -> str:
    """The operation of a function of ``torch.distributed``, by its name in `wire_bytes`; "" for
    functions that call others.
    """
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return _KINDS.get(name, "")


class _Nesting(threading.local):
    depth = 0
    inner = 0  # bytes of the calls inside the outermost one
    wire = 0  # bytes that these send
    counts = False  # whether the outermost one is the operation, and not its inner calls


class CollectiveCalls:
    """The calls since the last `take`, while installed. Counts those of all threads: FSDP2 calls
    from threads of the autograd engine.
    """

    def __init__(
        self,
        blind: Callable[[BlindSpot], None],
        phase: Callable[[], str] = lambda: "",
        records: Records | None = None,
    ) -> None:
        """``phase`` returns the path of the current phase. ``records`` gets each operation."""
        self._blind = blind
        self._records = records
        self.waits = Waits(phase)
        self.copies = Copies(phase)
        self._restore: list[Callable[[], None]] = []
        self._nesting = _Nesting()
        self._calls: dict[str, list[int]] = {}  # op -> count, bytes, ns, bytes on the wire
        self._lock = threading.Lock()
        # Buckets of DistributedDataParallel, their bytes, and what is sent for them.
        self._synced = [0, 0, 0]
        self._with_functional = False
        self.active = False

    def install(self) -> None:
        """Record from now on, if this torch has ``torch.distributed``."""
        if not dist.is_available():
            return
        self.active = True
        for name, payload in _PAYLOAD.items():
            original = getattr(dist.distributed_c10d, name, None)
            if original is None:  # which ones exist depends on torch's version
                continue
            wrapped = self._wrapped(name, original, payload, _kind(name))
            for owner in (dist.distributed_c10d, dist):
                if getattr(owner, name, None) is original:
                    self._restore.append(patch(owner, name, wrapped))
        if dist.is_initialized():
            self._functional()
        else:
            self._restore.append(patch(dist, "init_process_group", self._then_functional()))
        self._restore += self.waits.install()
        work = torch._C._distributed_c10d.Work
        self._restore.append(patch(work, "wait", self._wrapped("wait", work.wait, None, "")))

    def _functional(self) -> None:
        """Record functional collectives (importing them takes 60 ms) and copies, of a program that
        has a process group.
        """
        from torch.distributed import _functional_collectives as functional

        self._restore += self.copies.install()
        for name, (op, payload) in _FUNCTIONAL.items():
            original = getattr(functional, name, None)
            if original is not None:
                wrapped = self._wrapped(op, original, payload, "" if op == "wait" else op)
                self._restore.append(patch(functional, name, wrapped))

    def _then_functional(self) -> Callable[..., Any]:
        original = dist.init_process_group

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if self.active and not self._with_functional:
                self._with_functional = True
                self._functional()
            return found

        return init_process_group

    def remove(self) -> None:
        """Remove all wrappers. Safe to call twice."""
        self.active = False
        while self._restore:
            self._restore.pop()()

    def forward_done(self, module: Any) -> None:
        """A model was called. If it is data parallel and this thread records gradients, the next
        backward pass exchanges every bucket once.
        """
        if type(module).__name__ != "DistributedDataParallel" or not torch.is_grad_enabled():
            return
        if not module.require_backward_grad_sync:
            return
        self.waits.expect()
        if _hooked(module):
            return
        sizes = _bucket_sizes(module)
        if not any(self._synced) and DDP not in self._calls:
            self._blind(BLIND_SPOT)
        self._synced[0] += len(sizes)
        self._synced[1] += sum(sizes)
        ranks = module.process_group.size()
        self._synced[2] += sum(wire_bytes("all_reduce", size, ranks) for size in sizes)
        self._calls.setdefault(DDP, [0, 0, 0, 0])
        if self._records is not None and self._records.on:
            self._records.expect(module, sizes)

    def backward_done(self) -> None:
        """A backward pass has ended."""
        computed = self.waits.backward_done()
        if self._records is not None and self._records.on:
            self._records.backward_done(computed, perf_counter_ns())

    def take(self) -> tuple[Collective, ...]:
        """The calls since the last call of this, the most bytes first."""
        with self._lock:
            calls = {op: tuple(sums) for op, sums in self._calls.items() if sums[0]}
            for sums in self._calls.values():
                sums[:] = (0, 0, 0, 0)
        found = [
            Collective(op, count, Bytes(size), host_ns, Bytes(wire))
            for op, (count, size, host_ns, wire) in calls.items()
        ]
        buckets, size, wire = self._synced
        if buckets:
            self._synced = [0, 0, 0]
            found.append(Collective(DDP, buckets, Bytes(size), _IN_BACKWARD, Bytes(wire)))
        return tuple(sorted(found, key=lambda call: (-call.bytes, call.op)))

    def _wrapped(
        self, op: str, original: Callable[..., Any], payload: tuple[int, str] | None, kind: str
    ) -> Callable[..., Any]:
        """Wrap ``original``. ``kind``: its operation by its name in `wire_bytes`; "" if the
        functions that it calls are counted.
        """
        nesting = self._nesting
        names = list(inspect.signature(original).parameters) if kind else []
        group_argument = (names.index("group"), "group") if "group" in names else None
        peer = next(((names.index(name), name) for name in ("dst", "src") if name in names), None)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.active or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            size = 0 if payload is None else _size(_argument(args, kwargs, *payload))
            group = group_argument and _argument(args, kwargs, *group_argument)
            if nesting.depth:
                nesting.inner += size
                nesting.wire += _sent(kind, size, group)
                if nesting.counts:
                    return original(*args, **kwargs)
                began = perf_counter_ns()
                found = original(*args, **kwargs)
                record(args, kwargs, size, group, began, found)
                return found
            nesting.depth, nesting.inner, nesting.wire = 1, 0, 0
            nesting.counts = payload is not None
            began = perf_counter_ns()
            found = None
            try:
                found = original(*args, **kwargs)
                return found
            finally:
                spent = perf_counter_ns() - began
                nesting.depth = 0
                self.waits.add(spent)
                if payload is None:
                    self._count(op, nesting.inner, spent, nesting.wire)
                else:
                    self._count(op, size, spent, _sent(kind, size, group))
                record(args, kwargs, size, group, began, found)

        def record(
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            size: int,
            group: Any,
            began: int,
            found: Any,
        ) -> None:
            records = self._records
            if records is None or not records.on or not kind or payload is None:
                return
            to = _argument(args, kwargs, *peer) if peer and kind in ("send", "recv") else None
            records.called(
                kind,
                _whole(kind, size, group),
                group,
                _argument(args, kwargs, *payload),
                to,
                (began, perf_counter_ns()),
                found is None or (kind == "recv" and isinstance(found, int)),
            )

        return call

    def _count(self, op: str, size: int, spent: int, wire: int) -> None:
        with self._lock:
            sums = self._calls.setdefault(op, [0, 0, 0, 0])
            sums[0] += 1
            sums[1] += size
            sums[2] += spent
            sums[3] += wire


def _sent(kind: str, contribution: int, group: Any) -> int:
    """The bytes that this rank sends for an operation, given the bytes that it contributes."""
    if not kind or not contribution:
        return 0
    return wire_bytes(kind, _whole(kind, contribution, group), _size_of(group))


def _whole(kind: str, contribution: int, group: Any) -> int:
    """The payload of the operation: all that is gathered, of which this rank contributes a part."""
    return contribution * _size_of(group) if kind in ("all_gather", "gather") else contribution


def _size_of(group: Any) -> int:
    """The number of ranks in a group as a caller names it: the group, its name, a mesh, ranks."""
    if group is None:
        return dist.get_world_size() if dist.is_initialized() else 1
    if isinstance(group, str):
        return int(dist.distributed_c10d._resolve_process_group(group).size())
    if isinstance(group, tuple):  # a mesh, and one of its dimensions
        return int(group[0].size(group[1]))
    if isinstance(group, list):
        return sum(len(part) if isinstance(part, list) else 1 for part in group)
    return int(group.size())


def _hooked(module: DistributedDataParallel) -> bool:
    """Whether a communication hook in Python exchanges the gradients of a
    DistributedDataParallel.
    """
    return bool(getattr(module, "_comm_hooks", ()))


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


def _size(value: object) -> int:
    """The bytes of a tensor, or of a list of them."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_size(item) for item in value)
    return 0


def _bucket_sizes(module: DistributedDataParallel) -> list[int]:
    """The bytes of each bucket, from torch's own log of the module."""
    texts = module.logger._get_ddp_logging_data().strs_map
    text = texts.get("rebuilt_bucket_sizes") or texts.get("bucket_sizes", "")
    return [int(part) for part in text.replace(",", " ").split()]
