"""Which modules, inputs and batches are on which device: gathered in a program's first steps."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gpuprobe.model.run.session import Placed
from gpuprobe.model.values import Bytes
from gpuprobe.sampler.tracing.tensors import MOST_NESTED, modules_of, plain_tensors
from gpuprobe.torch_support.tensors import tensors_in

STEPS = 3
"""Steps that are looked at. What is wrong is wrong from the start, and looking costs time."""


class Placement:
    """What was seen since the last `take`; nothing after `STEPS` of them."""

    def __init__(self) -> None:
        self._steps = 0
        self._seen: dict[tuple[str, str, str, str], int] = {}
        self._before: tuple[Placed, ...] = ()
        self._called: dict[int, weakref.ref[Any]] = {}  # by id

    @property
    def wanted(self) -> bool:
        return self._steps < STEPS

    def inputs(self, values: tuple[Any, ...]) -> None:
        """What a model is called with."""
        # While torch.jit traces, asking for a size would become part of what it traces.
        if self.wanted and not torch.jit.is_tracing():
            for tensor in tensors_in(values, MOST_NESTED + 1):
                self._see("input", tensor)

    def called(self, model: Any) -> None:
        """A model, or a part of one, was called."""
        if self.wanted:
            self._called[id(model)] = weakref.ref(model)

    def batch(self, value: Any) -> None:
        """What a DataLoader gave."""
        if self.wanted:
            for tensor in tensors_in(value, MOST_NESTED):
                self._see("batch", tensor)

    def _see(self, what: str, tensor: Any) -> None:
        for plain in plain_tensors(tensor):
            kind = ""
            # Asking whether memory is pinned would make a CUDA context where there is none.
            if plain.device.type == "cpu" and torch.cuda.is_initialized():
                kind = "pinned" if plain.is_pinned() else "pageable"
            key = (what, "", str(plain.device), kind)
            self._seen[key] = self._seen.get(key, 0) + plain.numel() * plain.element_size()

    def take(self, models: Iterable[Any], optimizers: Iterable[Any] = ()) -> tuple[Placed, ...]:
        """All of it at the end of a step; empty where it is as in the step before.

        A model on the CPU alone is left out unless it was called or one of ``optimizers`` trains
        it: an average of the weights, a copy for a checkpoint and what ran before the recording
        are rightly there.
        """
        if not self.wanted:
            return ()
        self._steps += 1
        trained = {
            id(parameter)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        stages = _stages()
        found: list[Placed] = []
        for model in stages or models:
            rows = list(place(model))
            if stages or self._ran(model, trained) or any(row.device != "cpu" for row in rows):
                found += rows
        found += [
            Placed(what, name, device, Bytes(size), kind)
            for (what, name, device, kind), size in sorted(self._seen.items())
        ]
        self._seen.clear()
        placed = tuple(found)
        if placed == self._before:
            return ()
        self._before = placed
        return placed

    def _ran(self, model: Any, trained: set[int]) -> bool:
        for _, module in modules_of(model):
            ref = self._called.get(id(module))
            if ref is not None and ref() is module:
                return True
            if any(id(parameter) in trained for parameter in module._parameters.values()):
                return True
        return False


def _stages() -> list[Any]:
    """The modules of the stages of a pipeline that this process runs; empty without a pipeline.
    What else it holds of its model then (it is often built whole, on the CPU) is the others'.
    """
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None:
        return []
    base = pipelining._PipelineStageBase
    return [one.submod for one in gc.get_objects() if base in type(one).__mro__]


def place(model: Any) -> Iterator[Placed]:
    """The largest parts of a model that are on one device each. Shared tensors count once."""
    yield from _place(model, type(model).__name__, set())


def _place(module: Any, name: str, counted: set[int]) -> Iterator[Placed]:
    whole = [part for _, part in modules_of(module)]
    by_device, new = _by_device(whole, counted)
    children = [(key, child) for key, child in module._modules.items() if child is not None]
    divided = len(by_device) > 1 and bool(children)
    if divided:
        by_device, new = _by_device([module], counted)
    counted |= new
    for device, size in by_device.items():
        yield Placed("module", name, device, Bytes(size), type(module).__name__)
    for key, child in children if divided else ():
        yield from _place(child, f"{name}.{key}", counted)


def _by_device(modules: Iterable[Any], counted: set[int]) -> tuple[dict[str, int], set[int]]:
    """The bytes that these modules hold themselves, and the tensors, without those counted."""
    found: dict[str, int] = {}
    new: set[int] = set()
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or id(tensor) in counted or id(tensor) in new:
                continue
            new.add(id(tensor))
            for plain in plain_tensors(tensor):
                device = str(plain.device)
                found[device] = found.get(device, 0) + plain.numel() * plain.element_size()
    return found, new
