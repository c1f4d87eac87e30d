"""``compute="shapes"``: values of whole numbers, truth values and small tensors only.

A storage is known or unknown as a whole. On the device one is known once an operator has written
it that was computed, and is never known if it holds more than `LIMIT` bytes of floating point. On
the host one is unknown once unknown values were copied to it. Unknown memory is not touched: it
costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gpuprobe.native.process import Collectives
from gpuprobe.native.values.aliases import parts_of
from gpuprobe.native.values.computing import Call, Computing
from gpuprobe.native.values.counts import LARGEST
from gpuprobe.native.values.draws import Key
from gpuprobe.native.values.exchanges import read_and_written
from gpuprobe.native.values.plans import HIDDEN_WRITES, MASKED, How, OperatorPlan, masked
from gpuprobe.native.values.reads import COUNT, EQUAL, TRUTH, Reads
from gpuprobe.native.values.skipping import BETWEEN, COPYING, INSIDE, Skipping

LIMIT: Final = 1 << 20
"""Bytes of a storage of floating point up to which it is computed."""
_Tensor: Final = torch.Tensor
_ON_HOST: Final = frozenset({"multinomial", "_grouped_mm"})
"""They read their arguments on the host, in C++: not if those are unknown."""
_FRESH: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
)


def tensors_in(values: Any) -> Iterator[Any]:
    """The tensors among arguments or results, in lists too."""
    for value in values:
        if isinstance(value, _Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


class Knowledge:
    """Which storages hold values that were computed. It keeps none alive."""

    def __init__(self, exchanged: Collectives) -> None:
        self._exchanged = exchanged
        self._awaited: dict[int, tuple[StorageWeakRef, int, int]] = {}
        """Storages that hold the results of collectives once those are taken."""
        self._device: dict[int, StorageWeakRef] = {}
        self._host: dict[int, StorageWeakRef] = {}
        self._purge_at = 4096

    def allows(self, tensor: Any) -> bool:
        """Whether a tensor may be known: its type and size."""
        dtype = tensor.dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            return True
        return all(part.untyped_storage().nbytes() <= LIMIT for part in parts_of(tensor))

    def known(self, tensor: Any) -> bool:
        """Whether the values of a tensor are computed."""
        if not tensor.is_cuda:
            return not self._host or all(
                part.untyped_storage()._cdata not in self._host for part in parts_of(tensor)
            )
        if not self.allows(tensor):
            return False
        if self._awaited:
            self._resolve(tensor)
        device = self._device
        return all(
            not part.numel() or part.untyped_storage()._cdata in device for part in parts_of(tensor)
        )

    def wait_for(self, tensor: Any, first: int, last: int) -> None:
        """The collectives with these numbers write ``tensor``: it is known if their results are."""
        storage = tensor.untyped_storage()
        self._awaited[storage._cdata] = StorageWeakRef(storage), first, last

    def _resolve(self, tensor: Any) -> None:
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            reference, first, last = self._awaited.pop(storage._cdata, (None, 0, 0))
            if reference is None or reference.expired():
                continue
            if self._exchanged.known(first, last):
                self._device[storage._cdata] = StorageWeakRef(storage)
            else:
                self._device.pop(storage._cdata, None)

    def learn(self, tensor: Any) -> None:
        """Values were computed and written."""
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            if self._awaited:
                self._awaited.pop(storage._cdata, None)
            if tensor.is_cuda:
                if storage._cdata not in self._device:
                    self._device[storage._cdata] = StorageWeakRef(storage)
            else:
                self._host.pop(storage._cdata, None)
        if len(self._device) > self._purge_at:
            self._purge()

    def forget(self, tensor: Any) -> None:
        """Unknown values were written."""
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            if self._awaited:
                self._awaited.pop(storage._cdata, None)
            if tensor.is_cuda:
                self._device.pop(storage._cdata, None)
            elif tensor.device.type == "cpu" and storage._cdata not in self._host:
                self._host[storage._cdata] = StorageWeakRef(storage)
        if len(self._host) > self._purge_at:
            self._purge()

    def forget_storage(self, key: int) -> None:
        """A storage on the device holds unknown values, by its number."""
        self._device.pop(key, None)

    def _purge(self) -> None:
        for table in (self._device, self._host):
            for key in [key for key, reference in table.items() if reference.expired()]:
                del table[key]
        self._purge_at = 2 * max(2048, len(self._device), len(self._host))


def _covers(tensor: Any) -> bool:
    """Whether a tensor covers all of its storage."""
    return bool(
        tensor.layout is torch.strided
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )


class ComputingShapes(Computing):
    """Computes operators of which all inputs are known and all results may be."""

    def __init__(self, skipping: Skipping, exchanged: Collectives, reads: Reads) -> None:
        super().__init__(skipping, exchanged)
        self.knowledge = Knowledge(exchanged)
        self.reads = reads
        self._run[How.SCALAR] = self._scalar
        self._run[How.ONLY] = self._only

    def _only(self, plan: OperatorPlan, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if plan.name in _FRESH and out.is_cuda and self.knowledge.allows(out):
            self.knowledge.learn(out)  # what the memory holds is what a program gets
        return out

    def _written(self, plan: OperatorPlan, args: Any, kwargs: Any) -> list[Any]:
        found: list[Any] = []
        for where in plan.written:
            if isinstance(where, str):
                found.append(kwargs.get(where))
            else:
                found.append(args[where] if where < len(args) else None)
        for where in HIDDEN_WRITES.get(plan.name, ()):
            found.append(args[where])
        return list(tensors_in(found))

    def _ready(self, plan: OperatorPlan, args: Any, kwargs: Any) -> bool:
        """Whether all that an operator reads is known."""
        return self._scan(plan, args, kwargs)[1]

    def _scan(self, plan: OperatorPlan, args: Any, kwargs: Any) -> tuple[bool, bool]:
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
            elif type(value) is torch.device:
                there = there or value.type == "cuda"
            elif isinstance(value, (list, tuple)):
                for item in tensors_in(value):
                    there = there or item.is_cuda
                    ready = ready and (known(item) or id(item) in skip)
        return there, ready

    def _settle(
        self, plan: OperatorPlan, ready: bool, key: Key | None, out: Any, args: Any, kwargs: Any
    ) -> Any:
        """Compute an operator that is ready and small enough, and note what is known now."""
        knowledge = self.knowledge
        fresh: tuple[Any, ...] = ()
        if plan.fresh:
            many = len(plan.func._schema.returns) > 1
            fresh = tuple(tensors_in([out[i] for i in plan.fresh] if many else (out,)))
        written = self._written(plan, args, kwargs) if plan.writes else []
        if self.capture is not None:
            # A replay writes unknown values.
            call = Call(plan, [], {}, None)
            for item in (*fresh, *written):
                call.results += [part.untyped_storage()._cdata for part in parts_of(item)]
            self.capture.calls.append(call)
        elif (
            ready
            and all(knowledge.allows(item) for item in fresh)
            and all(knowledge.allows(item) for item in written)
        ):
            call = self.lower(plan, args, kwargs) or Call(plan, list(args), kwargs, None)
            call.key = key
            if plan.fresh:
                call.results = self.targets(plan, out)
            out = super().compute(call, out)
            for item in tensors_in(out if isinstance(out, (tuple, list)) else (out,)):
                knowledge.learn(item)
            for item in written:
                knowledge.learn(item)
            return out
        for item in fresh:
            if not item.is_cuda:  # on the device what is new is unknown
                knowledge.forget(item)
        for item in written:
            knowledge.forget(item)
        return out

    def compute(self, call: Call, out: Any = None) -> Any:
        """A replay: what the graph wrote is unknown."""
        for key in call.results:
            self.knowledge.forget_storage(key)
        return out

    def _on_host(self, plan: OperatorPlan, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator on the host alone."""
        ready = not self.knowledge._host or self._ready(plan, args, kwargs)
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

    def _inside(self, how: int, run: Callable[[], Any]) -> Any:
        before = self._set(how)
        try:
            return run()
        finally:
            self._set(before)

    def _whole(self, plan: OperatorPlan, func: Any, args: Any, kwargs: Any) -> Any:
        there, ready = self._scan(plan, args, kwargs)
        if not there:
            return self._on_host(plan, func, args, kwargs)
        key = self._key(plan, args, kwargs) if ready else None
        if plan.name == "multinomial" and not ready:
            self.skipping.answer(1, 1)  # the probabilities are valid,
            self.skipping.answer(0, 1)  # and not all zero
        reads = self._reads()
        before = self._set(INSIDE)
        try:
            out = func(*args, **kwargs)
        finally:
            self._set(before)
        if self._reads() != reads and not self.may_read(plan):
            raise self.reads.refuse(f"what {plan.func} computes")
        return self._settle(plan, ready, key, out, args, kwargs)

    def _reading(self, plan: OperatorPlan, func: Any, args: Any, kwargs: Any) -> Any:
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

    def _counting(self, plan: OperatorPlan, func: Any, args: Any, kwargs: Any) -> Any:
        if self.capture is not None:
            return func(*args, **kwargs)
        if not self._ready(plan, args, kwargs):
            if not self.reads.unknown_as_nan:
                raise self.reads.refuse(f"{COUNT} {plan.name} finds")
            return self._largest(plan, func, args, kwargs)
        out = super()._counting(plan, func, args, kwargs)
        for item in tensors_in(out if isinstance(out, (tuple, list)) else (out,)):
            self.knowledge.learn(item)
        return out

    def _largest(self, plan: OperatorPlan, func: Any, args: Any, kwargs: Any) -> Any:
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

    def _copying(self, plan: OperatorPlan, func: Any, args: Any, kwargs: Any) -> Any:
        there, ready = self._scan(plan, args, kwargs)
        if not there:
            return self._on_host(plan, func, args, kwargs)
        out = self._inside(COPYING, lambda: func(*args, **kwargs))
        return self._settle(plan, ready, None, out, args, kwargs)

    def _exchanging(self, plan: OperatorPlan, func: Any, args: Any, kwargs: Any) -> Any:
        """What is received is known if it was where it was sent."""
        read, written = read_and_written(func, args, kwargs)
        if not any(item.is_cuda for item in (*read, *written)):
            return func(*args, **kwargs)
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
            call = Call(plan, [], {}, None)
            call.results = [item.untyped_storage()._cdata for item in written]
            self.capture.calls.append(call)
        for item in written:
            if self.capture is None and item.is_cuda and first and knowledge.allows(item):
                knowledge.wait_for(item, first, last)
            elif not (ready and not first):  # alone it is what this rank has sent
                knowledge.forget(item)
            else:
                knowledge.learn(item)
        return out

    def _flattening(self, plan: OperatorPlan, func: Any, args: Any, kwargs: Any) -> Any:
        return self._inside(INSIDE, lambda: func(*args, **kwargs))

    def _scalar(self, plan: OperatorPlan, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if self.capture is not None or self.knowledge.known(tensor):  # a capture refuses it
            return func(*args, **kwargs)
        how = TRUTH if tensor.dtype is torch.bool else "a number"
        value = self.reads.value(tensor.dtype, how)
        return bool(value) if tensor.dtype is torch.bool else value

    def _answering(self, plan: OperatorPlan, func: Any, args: Any, kwargs: Any) -> Any:
        if self._ready(plan, args, kwargs):
            return super()._answering(plan, func, args, kwargs)
        self._inside(INSIDE, lambda: func(*args, **kwargs))
        if plan.name == "equal" and args[0].shape != args[1].shape:
            return False
        return bool(self.reads.value(torch.bool, EQUAL))
