"""What a step's record has apart from memory and time: collectives, and on which device modules,
inputs and batches are.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from gpuprobe.analysis.time_shares import joined_calls
from gpuprobe.model.run.communication import MOST_OPERATIONS, exchanges_of, operations
from gpuprobe.model.run.launches import NOT_COUNTED, StepLaunches, joined
from gpuprobe.model.run.session import BlindSpot, Placed
from gpuprobe.model.run.work import NOT_FOLLOWED, StepWork, joined_work
from gpuprobe.model.values import Bytes, ReadStatus, Unavailable
from gpuprobe.sampler.hooks.collectives import CollectiveCalls, Records
from gpuprobe.sampler.hooks.waits import TimedWaits, joined_host_waits, joined_waits
from gpuprobe.sampler.timeline import PhaseTimeline
from gpuprobe.sampler.tracing.tensors import MOST_NESTED, modules_of, plain_tensors
from gpuprobe.sampler.tracing.traces import Traces
from gpuprobe.torch_support.engine_reports import assumptions
from gpuprobe.torch_support.tensors import tensors_in

STEPS = 3
"""Steps in which placement is recorded. What is wrong is wrong from the start, and recording costs
time."""


class Placement:
    """The placements found since the last `take`; none after the first `STEPS` steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._found: dict[tuple[str, str, str, str], int] = {}
        self._before: tuple[Placed, ...] = ()
        self._called: dict[int, weakref.ref[Module]] = {}  # by id

    @property
    def active(self) -> bool:
        return self._steps < STEPS

    def inputs(self, values: tuple[object, ...]) -> None:
        """A model is called with these arguments."""
        # While torch.jit traces, reading a size would become part of the trace.
        if self.active and not torch.jit.is_tracing():
            for tensor in tensors_in(values, MOST_NESTED + 1):
                self._add("input", tensor)

    def called(self, model: Module) -> None:
        """A model, or a part of one, was called."""
        if self.active:
            self._called[id(model)] = weakref.ref(model)

    def batch(self, value: object) -> None:
        """A DataLoader returned this batch."""
        if self.active:
            for tensor in tensors_in(value, MOST_NESTED):
                self._add("batch", tensor)

    def _add(self, what: str, tensor: torch.Tensor) -> None:
        for plain in plain_tensors(tensor):
            kind = ""
            # Querying whether memory is pinned would create a CUDA context if there is none.
            if plain.device.type == "cpu" and torch.cuda.is_initialized():
                kind = "pinned" if plain.is_pinned() else "pageable"
            key = (what, "", str(plain.device), kind)
            self._found[key] = self._found.get(key, 0) + plain.numel() * plain.element_size()

    def take(
        self, models: Iterable[Module], optimizers: Iterable[Optimizer] = ()
    ) -> tuple[Placed, ...]:
        """The placements at the end of a step; empty if they are those of the step before.

        A model that is only on the CPU is left out unless it was called or one of ``optimizers``
        trains it: an average of the weights, a copy for a checkpoint and a model that ran before
        the recording belong there.
        """
        if not self.active:
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
            if stages or self._in_use(model, trained) or any(row.device != "cpu" for row in rows):
                found += rows
        found += [
            Placed(what, name, device, Bytes(size), kind)
            for (what, name, device, kind), size in sorted(self._found.items())
        ]
        self._found.clear()
        placed = tuple(found)
        if placed == self._before:
            return ()
        self._before = placed
        return placed

    def _in_use(self, model: Module, trained: set[int]) -> bool:
        for _, module in modules_of(model):
            ref = self._called.get(id(module))
            if ref is not None and ref() is module:
                return True
            if any(id(parameter) in trained for parameter in module._parameters.values()):
                return True
        return False


def _stages() -> list[Module]:
    """The modules of the pipeline stages that this process runs; empty without a pipeline. With
    one, the rest of its model (often built whole, on the CPU) belongs to other ranks.
    """
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None:
        return []
    base = pipelining._PipelineStageBase
    return [one.submod for one in gc.get_objects() if base in type(one).__mro__]


def place(model: Module) -> Iterator[Placed]:
    """The largest parts of a model that are each on one device. Shared tensors count once."""
    yield from _place(model, type(model).__name__, set())


def _place(module: Module, name: str, counted: set[int]) -> Iterator[Placed]:
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


def _by_device(modules: Iterable[Module], counted: set[int]) -> tuple[dict[str, int], set[int]]:
    """The bytes that these modules hold directly, by device, and the ids of their tensors; without
    ``counted`` ones, and without the buffers of one number on the CPU, such as the counter of
    torch's own `AveragedModel`: operators take them with tensors of a GPU.
    """
    found: dict[str, int] = {}
    new: set[int] = set()
    for module in modules:
        numbers = {
            id(tensor)
            for tensor in module._buffers.values()
            if tensor is not None and not tensor.dim() and tensor.device.type == "cpu"
        }
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or any(id(tensor) in ids for ids in (numbers, counted, new)):
                continue
            new.add(id(tensor))
            for plain in plain_tensors(tensor):
                device = str(plain.device)
                found[device] = found.get(device, 0) + plain.numel() * plain.element_size()
    return found, new


_LEFT_OUT = BlindSpot(
    f"operations with other ranks after the first {MOST_OPERATIONS:,} of a step",
    "communication by line and module does not include them; the totals by operation do",
)

_NO_WAITS = Unavailable("waits of the host are timed on GPUs only", ReadStatus.NOT_COLLECTED)
_IF = "the figures are those of a real GPU if this is so there"


class PerStep:
    """Collectives and placement of one recorder. A second record of a step (`Step`) contains what
    the first had, too.
    """

    def __init__(
        self,
        blind: Callable[[tuple[BlindSpot, ...]], None],
        timeline: PhaseTimeline,
        traces: Traces,
        on_fault: Callable[[Exception], None],
        *,
        on_gpu: bool = False,
    ) -> None:
        """``traces`` decide in which steps each operation is recorded; ``on_fault`` gets internal
        errors. ``on_gpu``: the program uses a GPU that is not simulated.
        """
        self._host_waits = TimedWaits() if on_gpu else None
        self._undo = [] if self._host_waits is None else self._host_waits.install()
        self.records = Records(lambda: timeline.started_ns, on_fault)
        self.records.on = traces.in_detail(0)
        self._traces = traces
        self._blind = blind
        self._complete = True
        self.collectives = CollectiveCalls(
            lambda spot: blind((spot,)), lambda: timeline.path, self.records
        )
        self.placement = Placement()
        self._last: tuple[int, dict[str, Any]] = (-1, {})  # the step, and what it had

    def take(
        self, index: int, models: Iterable[Module], optimizers: Iterable[Optimizer]
    ) -> dict[str, Any]:
        """Everything since the last call, for the step ``index`` that ends now, as arguments of
        `assemble`.
        """
        found: dict[str, Any] = {
            "collectives": self.collectives.take(),
            "placement": self.placement.take(models, optimizers),
            "waited": self.collectives.waits.take(),
            "copied": self.collectives.copies.take(),
            "exchanges": exchanges_of(self.records.take()),
            "launches": self._launches(),
            "work": self._work(),
            "host_waits": _NO_WAITS if self._host_waits is None else self._host_waits.take(),
        }
        self.records.on = self._traces.in_detail(index + 1)
        before, earlier = self._last
        if before == index:
            found = self._joined(earlier, found)
        if self.records.left_out and self._complete:
            self._complete = False
            self._blind((_LEFT_OUT,))
        self._last = (index, found)
        return found

    def _launches(self) -> StepLaunches | Unavailable:
        trace = self._traces.launches
        found = None if trace is None else trace.take()
        return NOT_COUNTED if found is None else found

    def _work(self) -> StepWork | Unavailable:
        trace = self._traces.work
        return NOT_FOLLOWED if trace is None or not trace.on else trace.take()

    def end(self) -> None:
        """Remove the hooks, and record what a simulated GPU has assumed."""
        self.collectives.remove()
        while self._undo:
            self._undo.pop()()
        self._blind(tuple(BlindSpot(f"assumed: {text}", _IF) for text in assumptions()))

    def _joined(self, earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
        exchanges = (*earlier["exchanges"], *later["exchanges"])
        if operations(exchanges) > MOST_OPERATIONS:
            exchanges, self.records.left_out = earlier["exchanges"], True
        return {
            "collectives": joined_calls((*earlier["collectives"], *later["collectives"])),
            "placement": later["placement"] or earlier["placement"],
            "waited": joined_waits(earlier["waited"], later["waited"]),
            "copied": joined_waits(earlier["copied"], later["copied"]),
            "exchanges": exchanges,
            "launches": joined(earlier["launches"], later["launches"]),
            "work": joined_work(earlier["work"], later["work"]),
            "host_waits": joined_host_waits(earlier["host_waits"], later["host_waits"]),
        }
