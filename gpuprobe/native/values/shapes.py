"""``compute="shapes"``: values of whole numbers, truth values and small tensors only.
``compute="auto"``: all values, until they cost more than a few seconds, which is known before they
are computed; from there on as shapes.

A storage is known or unknown as a whole. On the device one is known once an operator has written
it that was computed, and is never known if it holds more bytes of floating point than the limit. On
the host one is unknown once unknown values were copied to it. Unknown memory is not touched: it
costs nothing.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from gpuprobe.errors import NotModelled
from gpuprobe.model.text import human_bytes
from gpuprobe.native.process import ExchangedCollectives
from gpuprobe.native.values.aliases import parts_of
from gpuprobe.native.values.arguments import Args, Kwargs
from gpuprobe.native.values.budget import (
    AT_ONCE_MEMORY,
    AT_ONCE_OPERATIONS,
    OF_ONE_CALL,
    TEMPORARY,
    Cost,
    known_memory,
    temporary_memory,
)
from gpuprobe.native.values.computing import Call, Computing, Recorded, of_sparse
from gpuprobe.native.values.counts import LARGEST
from gpuprobe.native.values.draws import Key
from gpuprobe.native.values.exchanges import (
    CapturedCollective,
    check_captured,
    read_and_written,
)
from gpuprobe.native.values.plans import HIDDEN_WRITES, MASKED, How, OperatorPlan, masked
from gpuprobe.native.values.reads import COUNT, Reads
from gpuprobe.native.values.shared import SharedStorages
from gpuprobe.native.values.skipping import BETWEEN, COPYING, INSIDE, Skipping
from gpuprobe.native.values.unknown import PLACEHOLDER
from gpuprobe.torch_support.callers import place_now

_T = TypeVar("_T")

LIMIT: Final = 1 << 20
"""Bytes of a storage of floating point up to which it is computed."""
WHOLE_LIMIT: Final = AT_ONCE_MEMORY
"""The same of whole numbers and masks."""
_REFUSALS: Final = 16
"""Tensors that found no room, after which it is counted again what is kept."""
_Tensor: Final = torch.Tensor
_ON_HOST: Final = frozenset({"multinomial", "_grouped_mm"})
"""They read their arguments on the host, in C++: not if those are unknown."""
_FRESH: Final = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"),
        "_cudnn_init_dropout_state",  # no operator on the CPU reads it
    }
)
_MOST_NUMBERS: Final = 4096
"""Elements of a tensor up to which it is searched for unknown numbers that it was made of."""
_MOST_MASK: Final = 64 << 20
"""Bytes of a mask that is written because all numbers are finite."""
_UNSCALE: Final = "_amp_foreach_non_finite_check_and_unscale_"
_TESTS: Final = {
    "isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True,
}  # fmt: skip
_COMPARED: Final[dict[str, tuple[Callable[[float, float], bool], bool]]] = {
    "eq": (operator.eq, True),
    "ne": (operator.ne, False),
    "lt": (operator.lt, False),
    "le": (operator.le, True),
    "gt": (operator.gt, False),
    "ge": (operator.ge, True),
}
"""Comparisons: of Python's numbers, and of a finite number with itself."""
_COUNTED: Final = frozenset({"sum", "count_nonzero"})


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """The tensors among arguments or results, in lists too."""
    for value in values:
        if isinstance(value, _Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


class Knowledge:
    """Which storages hold values that were computed. It keeps none alive."""

    def __init__(
        self,
        exchanged: ExchangedCollectives,
        shared: SharedStorages,
        limit: float = LIMIT,
        most: float = math.inf,
    ) -> None:
        """``limit``: bytes of a storage of floating point that may be known. ``most``: of all that
        are known on the device at a time.
        """
        self.limit = limit
        self._room = most
        self._kept = 0
        """Bytes of the storages in `_device`, and of those that are freed since it was counted."""
        self._refused = 0
        self.shared = shared
        self._exchanged = exchanged
        self._awaited: dict[int, tuple[StorageWeakRef, int, int]] = {}
        """Storages that hold the results of collectives once those are taken."""
        self._device: dict[int, tuple[StorageWeakRef, int]] = {}
        """With their bytes."""
        self._host: dict[int, StorageWeakRef] = {}
        self._most: dict[int, tuple[StorageWeakRef, int]] = {}
        self._purge_at = 4096

    def allows(self, tensor: Tensor) -> bool:
        """Whether a tensor may be known: its type and size."""
        dtype = tensor.dtype
        whole = not (dtype.is_floating_point or dtype.is_complex)
        limit = max(self.limit, WHOLE_LIMIT) if whole else self.limit
        return all(part.untyped_storage().nbytes() <= limit for part in parts_of(tensor))

    def has_room(self, tensor: Tensor) -> bool:
        """Whether a tensor may become known: `allows`, and the bytes of all that are known."""
        if not self.allows(tensor):
            return False
        if not tensor.is_cuda:
            return True
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            if (
                storage._cdata not in self._device
                and self._kept + storage.nbytes() > self._room
                and not self._makes_room(storage.nbytes())
            ):
                return False
        return True

    def _makes_room(self, nbytes: int) -> bool:
        if not self._refused:
            self._purge()
            if self._kept + nbytes <= self._room:
                return True
        self._refused = (self._refused + 1) % _REFUSALS
        return False

    def known(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor are computed."""
        if not tensor.is_cuda:
            return not self._host or all(
                part.untyped_storage()._cdata not in self._host for part in parts_of(tensor)
            )
        if not self.allows(tensor):
            return False
        if self._awaited:
            for part in parts_of(tensor):
                self._resolve(part.untyped_storage())
        if self.shared.storages:
            return all(
                not part.numel() or self._known_storage(part.untyped_storage())
                for part in parts_of(tensor)
            )
        device = self._device
        return all(
            not part.numel() or part.untyped_storage()._cdata in device for part in parts_of(tensor)
        )

    def _known_storage(self, storage: UntypedStorage) -> bool:
        known = self.shared.known(storage._cdata)
        return storage._cdata in self._device if known is None else known

    def share(self, storage: UntypedStorage) -> None:
        """The program sends a storage to another process."""
        if self.shared.known(storage._cdata) is None:
            self._resolve(storage)
            self.shared.add(storage)
            self.shared.note(storage._cdata, storage._cdata in self._device)

    def wait_for(self, tensor: Tensor, first: int, last: int) -> None:
        """The collectives with these numbers write ``tensor``: it is known if their results are."""
        storage = tensor.untyped_storage()
        self._awaited[storage._cdata] = StorageWeakRef(storage), first, last

    def _resolve(self, storage: UntypedStorage) -> None:
        reference, first, last = self._awaited.pop(storage._cdata, (None, 0, 0))
        if reference is None or reference.expired():
            return
        if self._exchanged.known(first, last):
            self._keep(storage)
        else:
            self.forget_storage(storage._cdata)

    def _keep(self, storage: UntypedStorage) -> None:
        if storage._cdata not in self._device:
            size = storage.nbytes()
            self._device[storage._cdata] = StorageWeakRef(storage), size
            self._kept += size
        if self.shared.storages:
            self.shared.note(storage._cdata, True)

    def learn(self, tensor: Tensor) -> None:
        """Values were computed and written."""
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            if self._awaited:
                self._awaited.pop(storage._cdata, None)
            if tensor.is_cuda:
                self._keep(storage)
            else:
                self._host.pop(storage._cdata, None)
        if len(self._device) > self._purge_at:
            self._purge()

    def forget(self, tensor: Tensor) -> None:
        """Unknown values were written."""
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            if self._awaited:
                self._awaited.pop(storage._cdata, None)
            if tensor.is_cuda:
                self.forget_storage(storage._cdata)
            elif tensor.device.type == "cpu" and storage._cdata not in self._host:
                self._host[storage._cdata] = StorageWeakRef(storage)
        if len(self._host) > self._purge_at:
            self._purge()

    def bound(self, tensor: Tensor, most: int) -> None:
        """The elements of a tensor of counts are at most ``most``."""
        storage = tensor.untyped_storage()
        self._most[storage._cdata] = StorageWeakRef(storage), most

    def most(self, tensor: Tensor) -> int:
        """What the elements of an unknown tensor of counts can be at most; 0 of other tensors."""
        if not self._most:
            return 0
        reference, most = self._most.get(tensor.untyped_storage()._cdata, (None, 0))
        return most if reference is not None and not reference.expired() else 0

    def forget_storage(self, key: int) -> None:
        """A storage on the device holds unknown values, by its number."""
        _, size = self._device.pop(key, (None, 0))
        self._kept -= size
        if self.shared.storages:
            self.shared.note(key, False)

    def _purge(self) -> None:
        for key in [key for key, (reference, _) in self._device.items() if reference.expired()]:
            self._kept -= self._device.pop(key)[1]
        for key in [key for key, reference in self._host.items() if reference.expired()]:
            del self._host[key]
        for key in [key for key, (reference, _) in self._most.items() if reference.expired()]:
            del self._most[key]
        self._purge_at = 2 * max(2048, len(self._device), len(self._host))


def _covers(tensor: Tensor) -> bool:
    """Whether a tensor covers all of its storage."""
    return bool(
        tensor.layout is torch.strided
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )


def healthy_truth(name: str, args: Args) -> bool | None:
    """What a test or comparison of an unknown tensor gives for all of its elements, as they are
    finite; None if that depends on their values.
    """
    if not args or not isinstance(args[0], _Tensor) or not args[0].dtype.is_floating_point:
        return None
    if name in _TESTS:
        return _TESTS[name]
    rule = _COMPARED.get(name)
    if rule is None or len(args) < 2:
        return None
    compare, same = rule
    other = args[1]
    if isinstance(other, _Tensor):
        return same if _identical(args[0], other) else None
    if isinstance(other, float) and not math.isfinite(other):
        return compare(0.0, other)
    return None


def _identical(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    return bool(
        one.layout is other.layout is torch.strided
        and one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
    )


def _made_of_unknown(tensor: Tensor) -> bool:
    """Whether a small host tensor was made of unknown numbers."""
    return bool(
        tensor.dtype in (torch.float32, torch.float64)
        and tensor.layout is torch.strided
        and 0 < tensor.numel() <= _MOST_NUMBERS
        and (tensor == PLACEHOLDER).any()
    )


class ComputingShapes(Computing):
    """Computes operators of which all inputs are known and all results may be."""

    def __init__(
        self,
        skipping: Skipping,
        exchanged: ExchangedCollectives,
        reads: Reads,
        cost: Cost,
        *,
        auto: bool = False,
    ) -> None:
        """``auto``: compute all values until ``cost`` exceeds `AT_ONCE_MEMORY` or
        `AT_ONCE_OPERATIONS`.
        """
        super().__init__(skipping, exchanged)
        shared = SharedStorages(skipping.shared_known)
        self.knowledge = Knowledge(exchanged, shared, math.inf if auto else LIMIT, known_memory())
        self.reads = reads
        self.cost = cost
        self.everything = auto
        """Whether all values have been computed so far."""
        self.ended = ""
        """Where and why they no longer are."""
        self._lost = False
        """Whether a collective of the graph that is replayed had no values: what follows may depend
        on it."""
        self._run[How.SCALAR] = self._scalar
        self._waiting: set[int] = set()
        """Threads in `wait_for`."""
        self._run[How.ONLY] = self._only

    def _spend(self, plan: OperatorPlan, args: Args, kwargs: Kwargs, results: object) -> bool:
        """Count an operator before it is computed; stop computing everything beyond the bounds.
        Whether it may be computed.
        """
        cost = self.cost
        operations = cost.add(plan.func, args, kwargs, results)
        more = temporary_memory(plan, args, kwargs)
        if self.everything:
            memory = cost.memory()
            if memory > AT_ONCE_MEMORY:
                self._stop(f"tensors of {human_bytes(memory)}")
            elif more > TEMPORARY:
                self._stop(f"{human_bytes(more)} on the host")
            elif cost.operations > AT_ONCE_OPERATIONS:
                self._stop(f"{cost.operations:.0e} floating-point operations")
        return more <= TEMPORARY and (self.everything or operations <= OF_ONE_CALL)

    def allows(self, operations: float, nbytes: int = 0, *, counted: bool = False) -> bool:
        memory, whole = self.cost.memory() + nbytes, self.cost.operations + operations
        if self.everything and memory > AT_ONCE_MEMORY:
            self._stop(f"tensors of {human_bytes(memory)}")
        elif self.everything and whole > AT_ONCE_OPERATIONS:
            self._stop(f"{whole:.0e} floating-point operations")
        if not counted:
            self.cost.operations = whole
        return self.everything

    def _stop(self, why: str) -> None:
        self.everything = False
        self.knowledge.limit = LIMIT
        self.ended = (
            f"all values were computed up to {place_now()}; with {why} that would take long, so "
            "later only whole numbers, masks and tensors of up to 1 MiB have values"
        )

    def written(self, tensor: Tensor) -> None:
        self.knowledge.learn(tensor)

    def counted(self, call: Call, result: object) -> None:
        self._spend(call.plan, call.args, call.kwargs, result)

    def computes(self, tensors: Iterable[object]) -> bool:
        """Whether what does not pass the dispatcher is computed, of these arguments."""
        return self.everything and all(self.knowledge.known(item) for item in tensors_in(tensors))

    def _only(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        out = func(*args, **kwargs)
        if plan.name in _FRESH:
            if plan.name == "lift_fresh" and self._unknown(out):
                self.knowledge.forget(out)
            elif out.is_cuda and self.knowledge.has_room(out):
                self.knowledge.learn(out)  # what the memory holds is what a program gets
        return out

    def _written(self, plan: OperatorPlan, args: Args, kwargs: Kwargs) -> list[Tensor]:
        found: list[Tensor] = []
        for where in plan.written:
            if isinstance(where, str):
                found.append(kwargs.get(where))
            else:
                found.append(args[where] if where < len(args) else None)
        for where in HIDDEN_WRITES.get(plan.name, ()):
            found.append(args[where])
        return list(tensors_in(found))

    def _ready(self, plan: OperatorPlan, args: Args, kwargs: Kwargs) -> bool:
        """Whether all that an operator reads is known."""
        return self._scan(plan, args, kwargs)[1]

    def _scan(self, plan: OperatorPlan, args: Args, kwargs: Kwargs) -> tuple[bool, bool]:
        """Whether an operator concerns the device, and whether all that it reads is known."""
        known = self.knowledge.known
        skip: set[int] = set()
        if plan.overwrites or plan.out:
            for item in self._written(plan, args, kwargs):
                if plan.out or _covers(item):
                    skip.add(id(item))
        there, ready = False, True
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, _Tensor):
                there = there or value.is_cuda
                ready = ready and (known(value) or id(value) in skip)
            elif type(value) is float:
                ready = ready and value != PLACEHOLDER
            elif type(value) is torch.device:
                there = there or value.type == "cuda"
            elif isinstance(value, (list, tuple)):
                for item in tensors_in(value):
                    there = there or item.is_cuda
                    ready = ready and (known(item) or id(item) in skip)
        return there, ready

    def _settle(
        self, plan: OperatorPlan, ready: bool, key: Key | None, out: Any, args: Args, kwargs: Kwargs
    ) -> Any:
        """Compute an operator that is ready and small enough, and note what is known now."""
        knowledge = self.knowledge
        fresh: tuple[Tensor, ...] = ()
        if plan.fresh:
            many = len(plan.func._schema.returns) > 1
            fresh = tuple(tensors_in([out[i] for i in plan.fresh] if many else (out,)))
        written = self._written(plan, args, kwargs) if plan.writes else []
        affordable = self._spend(plan, args, kwargs, out)
        if self.capture is not None:
            self._captured(plan, ready, key, out, args, kwargs, fresh, written)
            return out
        if ready and affordable and all(map(knowledge.has_room, (*fresh, *written))):
            call = self.lower(plan, args, kwargs) or Call(plan, list(args), kwargs, None)
            call.key = key
            try:
                if plan.fresh:
                    call.results = self.targets(plan, out)
                out = super().compute(call, out)
            except NotModelled as error:
                if not self.reads.reported:
                    raise
                self.reads.notes[f"the values of {plan.func} are not computed: {error}"] = None
            else:
                for item in (
                    *tensors_in(out if isinstance(out, (tuple, list)) else (out,)),
                    *written,
                ):
                    knowledge.learn(item)
                return out
        for item in fresh:
            if not item.is_cuda:  # on the device what is new is unknown
                knowledge.forget(item)
        for item in written:
            knowledge.forget(item)
        return out

    def _captured(
        self, plan: OperatorPlan, ready: bool, key: Key | None, out: Any, args: Args,
        kwargs: Kwargs, fresh: Sequence[Tensor], written: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Keep the call of a graph, for its replays; what they write is unknown if what it reads
        is.
        """
        call = self.lower(plan, args, kwargs) if ready and self.everything else None
        if call is not None:
            call.key = key
            if plan.fresh:
                call.results = self.targets(plan, out)
            for item in (*fresh, *written):
                self.knowledge.learn(item)  # for the next operators of the graph
        else:
            call = Call(plan, [], {}, None)
            for item in (*fresh, *written):
                self.knowledge.forget(item)
        for item in (*fresh, *written):
            call.storages += [part.untyped_storage()._cdata for part in parts_of(item)]
        assert self.capture is not None
        self.capture.calls.append(call)

    def compute(self, call: Call, out: Any = None) -> Any:
        """A call of a replay."""
        if self.everything and not self._lost and (call.args or call.kwargs):
            return super().compute(call, out)
        for key in call.storages:
            self.knowledge.forget_storage(key)
        return out

    def _on_host(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        """An operator on the host alone."""
        if self.knowledge._host:
            ready = self._ready(plan, args, kwargs)
        else:
            ready = not any(type(value) is float and value == PLACEHOLDER for value in args)
        out = func(*args, **kwargs)
        if not ready:
            outs = out if isinstance(out, (tuple, list)) else (out,)
            for item in (*tensors_in(outs), *self._written(plan, args, kwargs)):
                self.knowledge.forget(item)
        elif plan.overwrites and self.knowledge._host:
            for item in self._written(plan, args, kwargs):
                if _covers(item):
                    self.knowledge.learn(item)
        return out

    def _inside(self, how: int, run: Callable[[], _T]) -> _T:
        before = self._set(how)
        try:
            return run()
        finally:
            self._set(before)

    def _whole(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        there, ready = self._scan(plan, args, kwargs)
        if not there:
            return self._on_host(plan, func, args, kwargs)
        key = self._key(plan, args, kwargs) if ready else None
        if plan.name == _UNSCALE and not ready:
            return self._unscaled(plan, func, args, kwargs)
        if plan.name == "multinomial" and not ready:
            self.skipping.answer(1, 1)  # the probabilities are valid,
            self.skipping.answer(0, 1)  # and not all zero
        reads = self._reads()
        out = self.operated(plan, func, args, kwargs)
        if (
            self._reads() != reads
            and not self.may_read(plan)
            and not (ready and self.everything and of_sparse(args, kwargs))  # as in Computing
        ):
            raise self.reads.refuse(f"what {plan.func} computes")
        if not ready and self.capture is None:
            truth = healthy_truth(plan.name, args)
            if truth is not None and isinstance(out, _Tensor) and out.nbytes <= _MOST_MASK:
                return self._passed(out, truth)
        out = self._settle(plan, ready, key, out, args, kwargs)
        if not ready and plan.name in _COUNTED and args[0].dtype is torch.bool:
            self.knowledge.bound(out, args[0].numel() // max(1, out.numel()))
        return out

    def indices_of(self, tensor: Tensor) -> int:
        """How many indices of a sparse tensor differ: all, if they are unknown."""
        if self.knowledge.known(tensor._indices()):
            return super().indices_of(tensor)
        why, counts = LARGEST["_coalesce"]
        self.reads.largest(why)
        return next(iter(counts((tensor,))))[0]

    def _passed(self, out: Any, truth: bool) -> Any:
        """The result of a test that all finite numbers pass, or fail."""
        self.reads.healthy()
        if out.is_cuda:
            with self.below():
                self.aliases.of(out).fill_(truth)
            self.knowledge.learn(out)
        else:
            out.fill_(truth)
        return out

    def _unscaled(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        """Gradient scaling: unknown gradients are finite, so none is found that is not."""
        out = self._inside(INSIDE, lambda: func(*args, **kwargs))
        self.reads.notes["gradient scaling finds no overflow"] = None
        for item in args[0]:
            self.knowledge.forget(item)
        return out

    def _reading(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        if plan.name in MASKED and not masked(args):
            return self._whole(plan, func, args, kwargs)
        there, ready = self._scan(plan, args, kwargs)
        if not there:
            return self._on_host(plan, func, args, kwargs)
        if plan.name in _ON_HOST and not ready:
            return self._whole(plan, func, args, kwargs)
        key = self._key(plan, args, kwargs) if ready else None
        out = self._inside(BETWEEN, lambda: self._parts(plan, func, args, kwargs))
        return self._settle(plan, ready, key, out, args, kwargs)

    def _counting(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        if self.capture is not None:
            return func(*args, **kwargs)
        if not (self._ready(plan, args, kwargs) and self._spend(plan, args, kwargs, ())):
            if not self.reads.reported:
                raise self.reads.refuse(f"{COUNT} {plan.name} finds")
            return self._largest(plan, func, args, kwargs)
        out = super()._counting(plan, func, args, kwargs)
        for item in tensors_in(out if isinstance(out, (tuple, list)) else (out,)):
            self.knowledge.learn(item)
        return out

    def _largest(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        """An operator that counts elements which are unknown, with its largest result."""
        why, counts = LARGEST[plan.name]
        self.reads.largest(why)
        for value, size in counts(args):
            self.skipping.answer(value, size)
        try:
            out = self._inside(INSIDE, lambda: func(*args, **kwargs))
        finally:
            self.skipping.forget()
        return self._settle(plan, False, None, out, args, kwargs)

    def _copying(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        there, ready = self._scan(plan, args, kwargs)
        if not there:
            return self._on_host(plan, func, args, kwargs)
        source = args[1] if plan.name == "copy_" else args[0]
        if ready and isinstance(source, _Tensor) and not source.is_cuda and self._unknown(source):
            ready = False
        out = self._inside(COPYING, lambda: func(*args, **kwargs))
        out = self._settle(plan, ready, None, out, args, kwargs)
        if not ready and isinstance(source, _Tensor) and self.knowledge.most(source):
            self.knowledge.bound(out, self.knowledge.most(source))
        return out

    def _unknown(self, tensor: Tensor) -> bool:
        """Whether a small tensor that no operator has written was made of unknown numbers."""
        if tensor.numel() > _MOST_NUMBERS or not tensor.dtype.is_floating_point:
            return False
        with self.below():
            return _made_of_unknown(self.aliases.of(tensor) if tensor.is_cuda else tensor)

    def _exchanging(
        self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs
    ) -> object:
        """What is received is known if it was where it was sent."""
        read, written = read_and_written(func, args, kwargs)
        if not any(item.is_cuda for item in (*read, *written)):
            return func(*args, **kwargs)
        if self.carrier is not None:
            func = self.carrier(func, args, kwargs)
        knowledge = self.knowledge
        ready = all(knowledge.known(item) for item in read)
        self.exchanged.issued()
        before = self.exchanged.send_unknown(not ready)
        try:
            out = func(*args, **kwargs)
        finally:
            self.exchanged.send_unknown(before)
        first, last = self.exchanged.issued()
        if plan.func._schema.name.startswith("_c10d_functional"):
            written = list(tensors_in(out if isinstance(out, (tuple, list)) else (out,)))
        if self.capture is not None:
            self._captured_exchange(plan, ready, written)
            return out
        for item in written:
            if item.is_cuda and first and knowledge.has_room(item):
                knowledge.wait_for(item, first, last)
            elif not (ready and not first):  # alone it is what this rank has sent
                knowledge.forget(item)
            else:
                knowledge.learn(item)
        return out

    def _captured_exchange(self, plan: OperatorPlan, ready: bool, written: list[Tensor]) -> None:
        """Keep a collective of a graph, for its replays."""
        numbers = self.exchanged.captured()
        known = ready and self.everything and bool(numbers)
        if known:
            try:
                check_captured(plan.func)
            except NotModelled as error:
                if not self.reads.reported:
                    raise
                self.reads.notes[str(error)] = None
                known = False
        storages = tuple(StorageWeakRef(item.untyped_storage()) for item in written)
        assert self.capture is not None
        self.capture.calls += [CapturedCollective(number, known, storages) for number in numbers]
        if not numbers:  # of a rank that is alone
            call = Call(plan, [], {}, None)
            call.storages = [item.untyped_storage()._cdata for item in written]
            self.capture.calls.append(call)
        for item in written:
            if known:
                self.knowledge.learn(item)  # for the next operators of the graph
            else:
                self.knowledge.forget(item)

    def replay(self, calls: Iterable[Recorded]) -> None:
        self._lost = False
        super().replay(calls)

    def play(self, collective: CapturedCollective) -> None:
        known = collective.known and self.everything and not self._lost
        self.exchanged.issued()
        before = self.exchanged.send_unknown(not known)
        try:
            super().play(collective)
        finally:
            self.exchanged.send_unknown(before)
        if not (known and self.exchanged.known(*self.exchanged.issued())):
            self._lost = True
            for storage in collective.written:
                self.knowledge.forget_storage(storage.cdata)

    def _flattening(
        self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs
    ) -> object:
        if not self._ready(plan, args, kwargs):
            return self._inside(INSIDE, lambda: func(*args, **kwargs))
        out = super()._flattening(plan, func, args, kwargs)
        self.knowledge.learn(out)
        return out

    def _scalar(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        tensor = args[0]
        if self.capture is not None or self.knowledge.known(tensor):  # a capture refuses it
            return func(*args, **kwargs)
        self._inside(INSIDE, lambda: func(*args, **kwargs))  # the host waits for the GPU here
        if threading.get_ident() in self._waiting:
            return 0
        return self.reads.scalar(tensor, self.knowledge.most(tensor))

    def wait_for(self, tensor: Tensor) -> None:
        """Make the calls by which the host reads an unknown tensor of a GPU, whatever it finds: the
        copy, and the wait for all that is before it, are part of a step.
        """
        if tensor.numel() != 1:
            tensor.detach().cpu()
            return
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            torch.ops.aten._local_scalar_dense(tensor)
        finally:
            self._waiting.discard(thread)

    def _answering(
        self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs
    ) -> object:
        if self._ready(plan, args, kwargs):
            return super()._answering(plan, func, args, kwargs)
        self._inside(INSIDE, lambda: func(*args, **kwargs))
        if plan.name == "equal" and args[0].shape != args[1].shape:
            return False
        if _identical(args[0], args[1]):
            return True
        return self.reads.decide("whether two tensors are equal")
