"""The work of traced steps on a simulated GPU: every operator with its sizes, and the calls to the
GPU in their order (`gpuprobe.model.run.work`).

`gpuprobe.sampler.tracing.uses` numbers the operators. Here each is given to the log of calls as it
begins, so that a launch has the number of its operator, and its work is noted when it returns.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Callable, Iterable
from threading import get_native_id
from typing import Any, Final

import torch
from torch._ops import OpOverload

from gpuprobe.model.run.work import (
    MOST_WORK,
    NO_SAMPLES,
    Action,
    StepWork,
    Work,
    WorkKind,
    WorkPlace,
    pack,
)
from gpuprobe.model.values import Unavailable
from gpuprobe.patching import Patches, when_imported
from gpuprobe.sampler.failures import from_program
from gpuprobe.sampler.tracing.places import OperatorPlaces
from gpuprobe.torch_support.engine_reports import CallLog, GpuCall
from gpuprobe.torch_support.operator_work import OperatorWork
from gpuprobe.torch_support.tensors import size_of, tensors_in
from gpuprobe.torch_support.thread_names import thread_name

_INDUCTOR: Final = "torch._inductor.runtime.triton_heuristics"
_TRITON: Final = "triton.runtime.jit"
_TEMPLATE: Final = "triton_tem_"
"""How Inductor names the kernels of its templates, which multiply matrices."""
_DOT: Final = re.compile(r"\btl\.dot(_scaled)?\b|\bwarpgroup_mma\b")
_CHANNELS: Final = 4  # of images, at most
_INDICES: Final = (torch.int64, torch.int32)
_VALUES: Final = frozenset((Action.RECORD, Action.WAIT, Action.HOST_WAITS_EVENT))
_OPERATORS: Final = {
    Action.COPY: (WorkKind.COPY, "copy"),
    Action.FILL: (WorkKind.ELEMENTS, "fill"),
    Action.COLLECTIVE: (WorkKind.COLLECTIVE, "collective"),
}
_HOST_ONLY: Final = (1 << 32) - 1
"""The last number of an operator in the log of calls."""
_BY_RANK: Final = frozenset(("AllGather", "ReduceScatter", "Gather", "Scatter"))
"""Collectives whose calls have the bytes of one rank; all that is moved is as much of each."""

_DEEPEST: Final = 3  # containers in a model's arguments

NumberKernel = Callable[[], tuple[int, int, str]]
"""Numbers a kernel that is launched without an operator: its number, its place and the phase."""


class WorkTrace:
    """The work of steps, while this is on."""

    def __init__(
        self, log: CallLog, places: OperatorPlaces, on_fault: Callable[[Exception], None]
    ) -> None:
        """``on_fault`` gets internal errors, after which nothing more is noted."""
        self._on_fault = on_fault
        self._log = log
        self._places = places
        self._known = OperatorWork()
        self.begin = log.begin
        """Called with the number of an operator as it begins; returns the argument of `end`."""
        self.end = log.end
        self.on = False
        self.capturing = False
        """Whether a CUDA graph is captured: its operators run again when it is replayed."""
        self._captured: dict[int, tuple[Work | None, int, str]] = {}
        self._forget()

    def _forget(self) -> None:
        self._noted: dict[int, tuple[Work | None, int, str]] = {}
        self._host_only: dict[tuple[int, str], int] = {}  # by place and phase, one number for all
        self._tokens: dict[Any, int] = {}
        self._images: dict[Any, int] = {}
        self._samples: dict[Any, int | Unavailable] = {}
        self._threads: dict[int, str] = {}

    def install(self, patches: Patches, number_kernel: NumberKernel) -> None:
        """Follow Triton's kernels until ``patches`` are undone."""
        patches.add(when_imported(_INDUCTOR, lambda: self._follow_inductor(patches, number_kernel)))
        patches.add(when_imported(_TRITON, lambda: self._follow_triton(patches, number_kernel)))

    def begin_step(self) -> None:
        """A step that is traced begins."""
        if not self.on:
            self.on = self._log.start()
            self._forget()

    def stop(self) -> None:
        """Stop, and forget what was noted."""
        if self.on:
            self.on = False
            self._log.stop()
            self._forget()

    def note(
        self,
        number: int,
        place: int,
        phase: str,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
    ) -> None:
        """An operator has returned."""
        thread = get_native_id()
        if thread not in self._threads:  # it may have ended when the step does
            self._threads[thread] = thread_name(thread)
        work = self._known.of(op, args, kwargs, result)
        self._note(number, work, place, phase)
        if work is not None and phase.startswith("forward"):
            self._count_inputs(work, args)

    def note_host_only(self, place: int, phase: str) -> None:
        """An operator is called that takes the time of the host alone, such as a view: none of its
        calls is for a GPU.
        """
        number = self._host_only.get((place, phase))
        if number is None:
            number = self._host_only[place, phase] = _HOST_ONLY - len(self._host_only)
            self._note(number, None, place, phase)
        self._log.note(number)

    def _note(self, number: int, work: Work | None, place: int, phase: str) -> None:
        if len(self._noted) < MOST_WORK:
            self._noted[number] = work, place, phase
        if self.capturing and len(self._captured) < MOST_WORK:
            self._captured[number] = work, place, phase

    def _count_inputs(self, work: Work, args: tuple[Any, ...]) -> None:
        """Add up what goes through embeddings and first convolutions, by their weights."""
        if work.operator == "aten::embedding" and len(args) > 1:
            weight, indices = args[0], args[1]
            if isinstance(weight, torch.Tensor) and isinstance(indices, torch.Tensor):
                key = indices.dim() == 1, tuple(weight.shape), weight.data_ptr()
                self._tokens[key] = self._tokens.get(key, 0) + indices.numel()
        elif work.kind is WorkKind.CONVOLUTION and work.sizes[1] <= _CHANNELS:
            sizes = work.sizes[1:]
            self._images[sizes] = self._images.get(sizes, 0) + work.sizes[0]

    def model_called(self, module: torch.nn.Module, arguments: object) -> None:
        """A whole model is called in a forward pass: count the rows of its first input."""
        if self.on:
            self._add_samples(id(module), rows_of_inputs(module, arguments))

    def _add_samples(self, key: object, rows: int | Unavailable) -> None:
        before = self._samples.get(key, 0)
        if isinstance(before, Unavailable) or isinstance(rows, Unavailable):
            self._samples[key] = before if isinstance(before, Unavailable) else rows
        else:
            self._samples[key] = before + rows

    def graph_called(self, inputs: list[object], phase: str) -> None:
        """A compiled graph is called: it has no operators to be counted, so its inputs are."""
        if not self.on:
            return
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        key: Any = (False, *(t.shape for t in tensors))
        if phase.startswith("forward"):
            rows = _rows_of_graph(tensors)
            if isinstance(rows, Unavailable) or rows:
                self._add_samples(key, rows)
        for sums, counts in (
            (self._tokens, [t.numel() for t in tensors if t.dtype in _INDICES and t.dim() > 1]),
            (
                self._images,
                [
                    t.shape[0]
                    for t in tensors
                    if t.dim() == 4 and t.shape[1] <= _CHANNELS and not t.requires_grad
                ],
            ),
        ):
            if counts:
                sums[key] = sums.get(key, 0) + max(counts)

    # -- kernels of Triton

    def _follow_inductor(self, patches: Patches, number_kernel: NumberKernel) -> None:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        def work_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
            return inductor_work(kernel, args)

        self._follow(patches, CachingAutotuner, number_kernel, work_of)

    def _follow_triton(self, patches: Patches, number_kernel: NumberKernel) -> None:
        from triton.runtime.jit import JITFunction

        self._follow(patches, JITFunction, number_kernel, triton_work)

    def _follow(
        self,
        patches: Patches,
        kind: Any,
        number_kernel: NumberKernel,
        work_of: Callable[[Any, tuple[Any, ...], dict[str, Any]], Work],
    ) -> None:
        before = kind.run

        @functools.wraps(before)
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            number = 0
            if self.on and not kwargs.get("warmup"):
                try:
                    number, place, phase = number_kernel()
                    self._note(number, work_of(kernel, args, kwargs), place, phase)
                except Exception as error:  # an internal error must not end the program
                    if from_program(error):
                        raise
                    number = 0
                    self.stop()
                    self._on_fault(error)
            if not number:
                return before(kernel, *args, **kwargs)
            outer = self.begin(number)
            try:
                return before(kernel, *args, **kwargs)
            finally:
                self.end(outer)

        patches.set(kind, "run", run)

    # -- the step

    def take(self) -> StepWork:
        """The work since the last call."""
        calls, complete = self._log.take()
        works: dict[Work, int] = {}
        known: dict[int, int] = {id(None): 0}  # numbers of works by identity: their hash is slow
        places: dict[WorkPlace, int] = {}
        where: dict[tuple[int, str], int] = {}
        names: dict[str, int] = {}
        streams: dict[tuple[int, int], int] = {}
        operators: dict[int, int] = {0: 0}
        kinds, at_places = array("I"), array("I")
        actions, at_streams, of, values = array("B"), array("H"), array("I"), array("Q")
        threads: dict[int, int] = {}
        issued = array("H")
        for call in calls:
            action, device, stream, operator, value, _, thread, _ = call
            number = operators.get(operator)
            if number is None:
                number = 0
                noted = self._noted.get(operator) or self._captured.get(operator)
                if noted is not None:
                    work, place, phase = noted
                    at = where.get((place, phase))
                    if at is None:
                        line, module, _ = self._places.places[place]
                        shown = WorkPlace(phase, str(line), module)
                        at = where[place, phase] = places.setdefault(shown, len(places))
                    kind = known.get(id(work))
                    if kind is None and work is not None:
                        kind = known[id(work)] = works.setdefault(work, len(works)) + 1
                    kinds.append(kind or 0)
                    at_places.append(at)
                    number = len(kinds)
                operators[operator] = number
            if action in _OPERATORS:
                value = works.setdefault(_moved(call), len(works)) + 1
            elif action not in _VALUES:
                value = 0
            at = streams.get((device, stream))
            if at is None:
                name = f"cuda:{device}/{stream}" if device >= 0 else "host"
                at = streams[device, stream] = names.setdefault(name, len(names))
            actions.append(action._value_)
            at_streams.append(at)
            of.append(number)
            values.append(value)
            issued.append(threads.setdefault(thread, len(threads)))
        made = StepWork(
            works=tuple(works),
            places=tuple(places),
            streams=tuple(names),
            operators=pack((kinds, at_places)),
            entries=pack((actions, at_streams, of, values)),
            complete=complete and len(self._noted) < MOST_WORK,
            tokens=self._most_tokens(works),
            images=max(self._images.values(), default=0),
            samples=self._all_samples(),
            threads=tuple(self._threads.get(n) or thread_name(n) for n in threads),
            issued=pack((issued,)),
        )
        self._forget()
        return made

    def _most_tokens(self, works: Iterable[Work]) -> int:
        """Indices of the largest embedding. One for each sample (of a user, an item) is no token:
        indices of one dimension are tokens if there is attention, which mixes them.
        """
        mixed = any(work.kind is WorkKind.ATTENTION for work in works)
        return max((n for (flat, *_), n in self._tokens.items() if mixed or not flat), default=0)

    def _all_samples(self) -> int | Unavailable:
        """Rows of the first inputs of all models that were called, if these are as many."""
        sums = dict.fromkeys(self._samples.values())
        if len(sums) > 1:
            return Unavailable("several models are called, with different numbers of rows")
        return next(iter(sums), NO_SAMPLES)


def rows_of_inputs(module: torch.nn.Module, arguments: object) -> int | Unavailable:
    """The rows of the first tensor that a model gets, its samples, as far as that can be known."""
    tensors = [tensor for tensor in tensors_in(arguments, _DEEPEST) if tensor.dim()]
    if not tensors:
        return Unavailable("the model gets no tensors")
    first, *others = tensors
    if first.dim() == 1 and first.dtype not in _INDICES:
        return Unavailable("the model's first input has one dimension")
    rows = first.shape[0]
    if any(other.dim() > 1 and other.shape[0] != rows for other in others):
        return Unavailable("the model's inputs have different first dimensions")
    if any(vars(part).get("batch_first") is False for part in module.modules()):
        return Unavailable("a module of the model may have the batch second (batch_first=False)")
    return int(rows)


def _rows_of_graph(tensors: Iterable[torch.Tensor]) -> int | Unavailable:
    """The rows of what a compiled graph gets, apart from parameters, if each has as many: these are
    samples then; 0 if it gets nothing else, as after a graph break.
    """
    rows = {
        tensor.shape[0]
        for tensor in tensors
        if tensor.dim() > 1 and tensor.is_floating_point() and not tensor.requires_grad
    }
    if len(rows) == 1:
        return int(rows.pop())
    return Unavailable("the inputs of a compiled graph do not show them") if rows else 0


def _moved(call: GpuCall) -> Work:
    """The work of a copy, a fill or a collective."""
    kind, operator = _OPERATORS[call.action]
    if call.action is Action.FILL:
        return Work(operator, kind, "uint8", written=call.value)
    if call.action is Action.COPY:
        return Work(operator, kind, "uint8", variant=call.what, read=call.value, written=call.value)
    payload = call.value * (max(1, call.group[0]) if call.what in _BY_RANK else 1)
    return Work(operator, kind, sizes=call.group, variant=call.what, read=payload)


def inductor_work(kernel: Any, args: tuple[Any, ...]) -> Work:
    """The work of one of Inductor's kernels: each of its tensors once, by the names that Inductor
    gives them (``in_ptr0``, ``in_out_ptr0``, ``out_ptr0``).
    """
    name = str(getattr(kernel.fn, "__name__", "a kernel"))
    names = list(getattr(kernel.fn, "arg_names", ()))
    read = written = 0
    largest: torch.Tensor | None = None
    for at, value in enumerate(args):
        if not isinstance(value, torch.Tensor):
            continue
        size = size_of(value)
        argument = names[at] if at < len(names) else ""
        if argument.startswith("in_out"):
            read, written = read + size, written + size
        elif argument.startswith("out"):
            written += size
        else:
            read += size
        if largest is None or size > size_of(largest):
            largest = value
    dtype = "" if largest is None else str(largest.dtype).removeprefix("torch.")
    if name.startswith(_TEMPLATE):
        return Work(f"Triton template {name}", WorkKind.OTHER, dtype, read=read, written=written)
    # The name ends with a number, another one in each graph.
    return Work(name.rstrip("0123456789_"), WorkKind.COMPILED, dtype, read=read, written=written)


def triton_work(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
    """The work of a Triton kernel of the program: each of its tensors once; unknown if it
    multiplies matrices.
    """
    name = str(getattr(getattr(kernel, "fn", kernel), "__name__", "a Triton kernel"))
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    moved = sum(map(size_of, tensors))
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    kind = WorkKind.COMPILED
    if _DOT.search(str(getattr(kernel, "src", ""))):
        kind, name = WorkKind.OTHER, f"Triton kernel {name} (matrix products)"
    return Work(name, kind, dtype, read=moved)
