"""The recorder: turns what hooks report into steps, without disturbing the program.

Every entry point that the program's code runs through is guarded: an internal error of gpuprobe
switches the recorder off and is reported once, and the training continues.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from os import getpid
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from gpuprobe.bytecode import write_whole
from gpuprobe.clocks import perf_counter_ns
from gpuprobe.errors import UsageError
from gpuprobe.model.findings import Finding
from gpuprobe.model.io.files import gc_paused
from gpuprobe.model.run.holders import Holder
from gpuprobe.model.run.session import MOST_INCOMPLETE, BlindSpot, EpochEnd, SessionEnd
from gpuprobe.recursion import with_room
from gpuprobe.sampler import environment
from gpuprobe.sampler.base import Mark, Sink
from gpuprobe.sampler.failures import Failures, described, from_program, program_error
from gpuprobe.sampler.hooks.optimizer_steps import OptimizerCalls, StepOwner
from gpuprobe.sampler.hooks.wrapping import block, in_context
from gpuprobe.sampler.sources import HostMemory, MarkReader
from gpuprobe.sampler.step_writer import StepWriter
from gpuprobe.sampler.timeline import (
    COMPILED,
    MANY_PHASES,
    OTHER,
    Passes,
    PhaseSpan,
    PhaseTimeline,
    counters_rose,
)
from gpuprobe.sampler.tracing.traces import OTHER_THREAD, Traces, chosen_steps, exact_peak
from gpuprobe.torch_support import compile_notes

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from gpuprobe.model.needs import UsesCost
    from gpuprobe.sampler.hooks.torch_hooks import Hooks
    from gpuprobe.sampler.tracing.tensors import Known

LEVELS = ("counters", "trace")

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
_log = logging.getLogger("gpuprobe")


def _guarded(method: _F) -> _F:
    """Guard a method that the program's own code runs through: it never raises, and what it reads
    of tensors does not go through the program's ``__torch_function__``.
    """

    @functools.wraps(method)
    def guarded(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        if not self._active:
            return None
        if threading.get_ident() != self._thread and not self._in_backward():
            return None
        try:
            with self._no_torch_function():
                return with_room(method, self, *args, **kwargs)
        except Exception as error:
            if from_program(error):
                raise
            with_room(self.fault, error)
            return None

    return guarded  # type: ignore[return-value]


NO_USES = BlindSpot(
    "the uses of memory: they are noted for GPUs only, and there is none",
    "what the memory is needed for is unknown",
)


class Recorder:
    """Records a program's training steps. A context manager, created by `gpuprobe.record`.

    Steps are detected at each ``optimizer.step()``, unless the program marks them with `step` or
    `wrap`. Phases are detected by hooks; `phase` adds named ones.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        model: Module | Sequence[Module] | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        level: str = "counters",
        argv: Sequence[str] = (),
        warn: Callable[[str], None] = _log.warning,
        trace_steps: str = "",
        uses: bool = False,
    ) -> None:
        """``model`` and ``optimizer`` may each be one or a list; without them they are detected.

        ``warn`` gets the one line that is shown when something in gpuprobe fails. ``trace_steps``:
        see `chosen_steps`. ``uses``: at level ``trace``, also note which operators use the memory
        of a GPU that is not simulated (on a simulated one they always are), and time that
        (`uses_cost`). Raises UsageError for an unknown level or for steps that cannot be parsed.
        """
        if level not in LEVELS:
            raise UsageError(f"unknown level {level!r}", hint=f"one of: {', '.join(LEVELS)}")
        self._sink = sink
        self._level = level
        self._uses = uses
        self._argv = tuple(argv)
        self._failures = Failures(warn)
        self._given = None if model is None else _listed(model)
        self._models: list[weakref.ref[Module]] = []
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet(_listed(optimizer))
        self._active = False
        self._compiled_before = compile_notes.counts()
        self._thread = threading.get_ident()
        self._pid = getpid()
        self._searches = level == "trace"  # for what holds tensors
        self._host: HostMemory | None = None
        self._timeline: Any = None  # a PhaseTimeline, from __enter__ on
        self._again: Callable[[Mark], Mark] | None = None  # of the timeline's MarkReader
        self._finished = self._stopped = False
        self._error: BaseException | None = None  # what ended the program
        self._hooks: Hooks | None = None
        self._per_step: Any = None  # PerStep, from __enter__ on
        self._step_writer: Any = None  # a StepWriter, from __enter__ on
        self._traces = Traces(
            sink, self._failures, chosen_steps(trace_steps) if trace_steps else None
        )
        # The step being recorded.
        self._index = 0
        self._manual = False
        self._in_step = False
        self._optimizer_calls = OptimizerCalls()
        self._infer_forward = False
        self._out_of_memory = False
        self._passes = Passes()
        self._in_engine: Callable[[], bool] = lambda: False  # of torch, from __enter__ on
        self._no_torch_function: Callable[[], AbstractContextManager[object]] = (
            nullcontext  # likewise
        )
        self._inference: Any = None  # InferenceSteps, from __enter__ on
        self._evaluations: Any = None  # Evaluations, likewise
        self._end_sharing: Callable[[], None] = lambda: None  # of torch's memory history
        self.progress: Callable[[int, str], None] | None = None
        """Called with the number of the step and the path of its phase when that changes, and when
        a model is called. Set before the recording begins."""
        self.incomplete_processes: Sequence[int] = ()
        """What the end of the recording has of that name. Set before `finish`."""
        self.epoch: EpochEnd | None = None
        """Likewise."""
        self.kept_files: Sequence[str] = ()
        """Likewise."""
        self._held: tuple[Holder, ...] = ()
        self._last: list[PhaseSpan] = []
        self._last_traces: tuple[str, ...] = ()
        self._step_owner = StepOwner()
        self._known_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    @property
    def uses_cost(self) -> UsesCost | None:
        """What noting the uses of memory has cost, once the recording was stopped; None if they
        were not requested.
        """
        return self._traces.uses_cost

    # -- life

    def __enter__(self) -> Recorder:
        """Start recording. Imports torch. Raises OSError if nothing can be written, UsageError if a
        trace is requested that nothing can read. Another failure is one warning, and nothing is
        recorded.
        """
        self._start(nullcontext())
        return self

    def _start(self, writing: AbstractContextManager[object]) -> None:
        """Start recording. The session is written inside ``writing``."""
        write_whole()
        import torch

        from gpuprobe.sampler.hooks.torch_hooks import in_engine

        self._thread = threading.get_ident()
        self._in_engine = in_engine
        self._no_torch_function = torch._C.DisableTorchFunction
        self._step_writer = StepWriter(self._sink, self._failures, self._traces, self.fault)
        # device_count queries NVML, if it can: it creates no context and blocks no fork.
        cuda = torch.version.cuda is not None and torch.cuda.device_count() > 0
        self._host = HostMemory()
        reader = MarkReader([], self._host)
        simulated = False
        devices: tuple[str, ...] = ("cpu",)
        if cuda:
            simulated = not self._step_writer.read_cuda(reader)
            devices = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
        self._timeline, self._again = PhaseTimeline(reader), reader.again
        if self.progress is not None:
            self._timeline.progress = self._report_progress
        session = environment.session(self._argv, self._level, devices, simulated=simulated)
        about = environment.describe()
        with writing:
            self._sink.session(session, about)
        self._active = True
        if cuda:
            from gpuprobe.torch_support.memory_history import history

            self._end_sharing = history.install()
        if self._level == "trace" and cuda:
            self._traces.start_cuda(
                self._timeline, self.fault, simulated=simulated, uses=self._uses
            )
        elif self._uses:
            self._blind((NO_USES,))
        _in_forked_processes(self._forget)
        try:
            with self._no_torch_function():
                self._install_hooks(reader, cuda=cuda, simulated=simulated)
        except Exception as error:
            if from_program(error):
                raise
            self.fault(error)

    def _install_hooks(self, reader: MarkReader, *, cuda: bool, simulated: bool) -> None:
        from gpuprobe.sampler.hooks.evaluation import Evaluations
        from gpuprobe.sampler.hooks.inference import InferenceSteps
        from gpuprobe.sampler.hooks.per_step import PerStep
        from gpuprobe.sampler.hooks.torch_hooks import Hooks

        self._inference = InferenceSteps(self._inferred)
        self._evaluations = Evaluations()
        if self._traces.places is not None:
            self._traces.places.in_generate = self._inference.in_generate
        if self._level == "trace" and not cuda:
            reader.sources.append(self._traces.start_cpu(self._timeline, self.fault))
            self._timeline.restart()
        self._per_step = PerStep(
            self._blind,
            self._timeline,
            self._traces,
            self.fault,
            on_gpu=cuda and not simulated,
        )
        self._per_step.records.simulated = simulated
        self._per_step.collectives.install()
        self._hooks = Hooks(self, self._given)
        self._hooks.install(every_module=self._traces.on)
        if self._given is not None:
            self.found_models(self._given)

    def start_guarded(self) -> None:
        """`__enter__` for a program that gpuprobe runs: a failure is one warning, and what cannot
        be written is lost.
        """
        try:
            self._start(self._failures)
        except Exception as error:  # the program must run, recorded or not
            if from_program(error):
                raise
            self.fault(error)

    def now_ns(self) -> int:
        """The time since the session began, by the clock of its steps. Only while the recorder
        runs.
        """
        started: int = self._timeline.started_ns
        return perf_counter_ns() - started

    def set_argv(self, argv: Sequence[str]) -> None:
        """Set the command line to record, if it is not this process's."""
        self._argv = tuple(argv)

    def without_holders(self) -> None:
        """Do not search for what holds tensors: the search takes as long as a small program."""
        self._searches = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        self.finish(error)
        return False

    def stop(self, error: BaseException | None = None) -> None:
        """Write the remaining steps and remove every hook; `finish` still writes the end. ``error``
        is what ended the program. Never raises; safe to call twice.
        """
        if getpid() != self._pid or self._stopped:
            return
        self._stopped = True
        self._error = error
        try:
            if self._active:
                self._thread = threading.get_ident()  # training may have run in another thread
                self._end_of_session(error)
            if self._active:
                self._write_waiting()
            if self._step_writer is not None:
                self._failures.texts += self._step_writer.finish()
        finally:  # a signal handler of the program may raise meanwhile
            self._uninstall()

    def found(self, finding: Finding) -> None:
        """Record a finding of another part of gpuprobe (a hazard). Before `finish`."""
        if getpid() == self._pid and not self._finished:
            with self._failures:
                self._sink.finding(finding)

    def blind_spot(self, spot: BlindSpot) -> None:
        """Record what the figures do not include. Before `finish`."""
        if getpid() == self._pid and not self._finished:
            self._blind((spot,))

    def finish(self, error: BaseException | None = None) -> None:
        """Write pending records, remove all hooks and close. Never raises; safe to call twice."""
        if getpid() != self._pid or self._finished:
            return
        with gc_paused():  # the interpreter's end collects anyway
            self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        self.stop(error)
        self._finished = True
        error, line = self._error, self._timeline
        if self._host is None:  # never started: the program did not import torch
            with self._failures:
                self._sink.session(
                    environment.session(self._argv, self._level, ()), environment.describe()
                )
        else:
            self._host.close()
        held = self._holders(error)
        if self._traces.held is not None:
            for rows in self._traces.held.take():
                with self._failures:
                    self._sink.held(rows)
        ended = None if error is None else program_error(error)
        if error is not None and ended is not None and self._host is not None:
            with self._failures:
                from gpuprobe.torch_support.callers import place_in

                ended = replace(ended, place=place_in(error))
        with self._failures:
            self._sink.end(
                SessionEnd(
                    duration_ns=0 if line is None else line.last_ns - line.started_ns,
                    error=ended,
                    gpuprobe_faults=tuple(self._failures.texts),
                    compiled=compile_notes.since(self._compiled_before),
                    gpus=environment.gpu_names(),
                    holders=held,
                    pinned=() if self._traces.uses is None else self._traces.uses.pinned.lines,
                    incomplete_processes=tuple(self.incomplete_processes[:MOST_INCOMPLETE]),
                    epoch=self.epoch,
                    kept_files=tuple(self.kept_files),
                )
            )
        with self._failures:
            self._sink.close()

    def _holders(self, error: BaseException | None) -> tuple[Holder, ...]:
        """What holds tensors at the end, at level trace."""
        if not self._searches or self._host is None:
            return ()
        from gpuprobe.torch_support.holding.search import largest_holders, with_earlier

        try:
            with self._no_torch_function():
                if self._traces.held is not None:
                    from gpuprobe.sampler.tracing.held import frames_of

                    running = () if error is None else frames_of(error)
                    self._traces.held.search(self._index, frames=running, error=error, ended=True)
                return with_earlier(largest_holders(error, frames=()), self._held)
        except Exception as fault:  # noqa: BLE001 - the program's objects may be in any state
            self.fault(fault)
            return ()

    def _search_for_holders(self) -> None:
        """Search the functions that run, which may have returned at the end: after 4 steps, 8, 16
        and so on.
        """
        done = self._index
        if not self._searches or done < 4 or done & (done - 1):
            return
        from gpuprobe.torch_support.holding.search import largest_holders

        self._held = largest_holders(frames=[sys._getframe()])
        if self._traces.held is not None:
            self._traces.held.search(done - 1, frames=[sys._getframe()])

    def so_far(self) -> None:
        """Write what the open step has used, if its peaks rose: the process may end here. Any
        thread may call this.
        """
        if self._active and (self._in_step or not self._manual):
            self._step_writer.write_so_far(self._index, self._timeline)

    # -- what the program calls

    @block
    def step(self) -> Iterator[None]:
        """One training step. Once used, steps are no longer detected automatically.

        Raises UsageError inside another step: steps do not nest.
        """
        if self._in_step and self._active and threading.get_ident() == self._thread:
            raise UsageError("a step is already open: steps do not nest")
        self._begin_step()
        try:
            yield
        finally:
            self._end_step()

    @block
    def phase(self, name: str) -> Iterator[None]:
        """A named phase inside the current one. ``/`` in the name is replaced."""
        self._begin_phase(name)
        try:
            yield
        finally:
            self._end_phase()

    def wrap(self, step_fn: _F) -> _F:
        """Return ``step_fn`` wrapped so that each call is one step; coroutine functions are
        supported. A call inside an open step is part of that step.
        """
        return in_context(step_fn, self.step_of_call)

    def step_of_call(self) -> AbstractContextManager[None]:
        """A step, unless one is open already."""
        return nullcontext() if self._in_step and self._active else self.step()

    # -- what the hooks report

    def _in_backward(self) -> bool:
        """Whether this is a thread of the autograd engine, in a backward pass that the recorded
        thread waits for.
        """
        return self._passes.depth > 0 and self._in_engine()

    def _forget_raised(self) -> None:
        """Leave the optimizer phase, if an exception ended it."""
        if self._optimizer_calls.forget_raised():
            self._timeline.leave()

    @_guarded
    def begin(self, phase: str, *, evaluation: bool = False) -> None:
        """A phase begins: ``forward``, ``backward``, ``recompute`` or ``data``. ``evaluation``: the
        forward pass of a model in eval mode.
        """
        self._forget_raised()
        if phase == "forward":
            self._inference.begins()
            phase = self._pass(evaluation and bool(self._known_optimizers))
            self._report_progress(phase)
        if phase == "backward" and self._evaluations.backward_begins():
            self._timeline.was_training()
        if phase == "backward" and self._traces.backward is not None:
            self._traces.backward.called()
        self._passes.begins(phase, self._timeline)

    def _pass(self, evaluation: bool) -> str:
        """The phase of a forward pass: ``evaluation`` if no backward pass is known to follow."""
        if self._passes.depth or self._inference.nested:
            return "forward"
        phase = self._evaluations.phase_of(evaluation)
        if phase == "forward":
            self._evaluations.trains()
        return phase

    @_guarded
    def end(self, phase: str) -> None:
        """A phase ends, by an exception too."""
        if phase == "backward" and self._traces.backward is not None:
            self._traces.backward.returned()
        if not self._passes.ends(phase):
            return
        if phase == "backward":
            self._per_step.collectives.backward_done()
        if phase == "forward":
            self._inference.ends()
        self._timeline.leave(sticky=phase == "forward" and not self._passes.depth)
        if phase == "data" and self._infer_forward:
            self._forward_from_here()

    @_guarded
    def inputs(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is called with these arguments."""
        if self._traces.work is not None and self._timeline.path.startswith("forward"):
            self._traces.work.model_called(module, (args, kwargs))
        if self._per_step.placement.active:
            self._per_step.placement.inputs((*args, *kwargs.values()))
        if self._traces.modules is not None:
            self._traces.modules.mark_inputs((args, kwargs), inference=self._inference.infers())

    @_guarded
    def outputs(self, result: object) -> None:
        """A model returns this: it may have state that the next call gets, such as KV caches."""
        self._evaluations.returned(result)
        if self._traces.modules is not None and self._inference.infers():
            self._traces.modules.mark_kept(result)

    @_guarded
    def loaded(self, batch: object) -> None:
        """A DataLoader returns this batch."""
        self._per_step.placement.batch(batch)

    @_guarded
    def forward_done(self, module: Module) -> None:
        """A model's forward returned."""
        self._per_step.placement.called(module)
        self._per_step.collectives.forward_done(module)
        if self._inference.ends_step(module):
            self._inferred()

    @_guarded
    def _inferred(self) -> None:
        """A call of a model, or of its ``generate``, was a step."""
        if self._traces.launches is not None:
            self._traces.launches.call_begins(False, False)  # what follows decodes nothing
        if not self._manual and not self._passes.depth:
            self._last, self._last_traces = [], ()
            self._close_step("inference")
            self._last, self._last_traces = [], ()

    @_guarded
    def found_models(self, models: list[Module]) -> None:
        """Replace the models found earlier by these."""
        self._models = [weakref.ref(model) for model in models]
        self._inference.watch(models)
        if self._traces.modules is not None:
            self._traces.modules.name_modules(models)

    @_guarded
    def compiles(self) -> None:
        """The program uses torch.compile: no module hooks from here on."""
        self._infer_forward = True
        self._blind((COMPILED,))

    def _forward_from_here(self) -> None:
        self._timeline.enter("forward")
        self._timeline.leave(sticky=True)

    def module_begins(self, module: Module) -> None:
        """The forward of any module begins; called while allocations are traced."""
        cuda = self._traces.cuda
        if (
            cuda is None
            or not self._active
            or threading.get_ident() != self._thread
            or not cuda.modules.enter_inner(module)
        ):
            self._module_begins(module)

    @_guarded
    def _module_begins(self, module: Module) -> None:
        if self._traces.modules is None:
            return
        if self._traces.launches is not None and self._traces.launches.outside_modules:
            decodes = self._inference.decodes(module)
            self._traces.launches.call_begins(decodes, self._inference.mixed)
        self._traces.modules.enter_module(module)

    def module_ends(self, module: Module) -> None:
        """The forward of any module ends."""
        cuda = self._traces.cuda
        if cuda is not None and self._active and threading.get_ident() == self._thread:
            cuda.modules.leave_module()
        else:
            self._module_ends()

    @_guarded
    def _module_ends(self) -> None:
        if self._traces.modules is not None:
            self._traces.modules.leave_module()

    def optimizer_begins(self, optimizer: Optimizer, caller: FrameType) -> None:
        """``optimizer.step`` is called; ``caller`` is its frame."""
        mine = self._active and getpid() == self._pid
        # The thread that trains is recorded; if a hook steps the optimizer, the one that runs
        # backward().
        if (
            mine
            and not self._step_owner.known
            and not self._optimizer_calls
            and not self._in_backward()
        ):
            if self._traces.cpu is not None and threading.get_ident() != self._thread:
                self._blind((OTHER_THREAD,))
            self._thread = threading.get_ident()
        self._optimizer_begins(optimizer, caller)

    @_guarded
    def _optimizer_begins(self, optimizer: Optimizer, caller: FrameType) -> None:
        self._forget_raised()
        self._optimizer_calls.begin(caller)
        if optimizer not in self._known_optimizers:
            self._known_optimizers.add(optimizer)
            self._inference.trains()
            self._optimizers.add(optimizer)
            if self._hooks is not None:
                self._hooks.search_again()
        if len(self._optimizer_calls) == 1:
            self._timeline.enter("optimizer")
            if self._traces.cpu is not None:  # gradients may be gone when the step ends
                self._traces.cpu.mark_known(self._walk())

    @_guarded
    def optimizer_ends(self, optimizer: Optimizer) -> None:
        """``optimizer.step`` returned: the end of a step, unless the program marks its steps."""
        self._optimizer_calls.end()
        if self._optimizer_calls:
            return
        if self._manual:
            self._timeline.leave()
            return
        if self._step_owner.amends(optimizer, last=bool(self._last)):
            self._index -= 1
        else:
            self._last, self._last_traces = [], ()
        self._close_step("optimizer", leave=True)

    # -- steps

    @_guarded
    def _report_progress(self, path: str) -> None:
        if self.progress is not None:
            self.progress(self._index, path)

    def _begin_step(self) -> None:
        self._manual = self._in_step = True
        self._timeline.skip()
        if self._traces.cpu is not None:
            self._traces.cpu.discard()

    @_guarded
    def _end_step(self) -> None:
        self._in_step = False
        self._last, self._last_traces = [], ()
        self._close_step("user")

    @_guarded
    def _begin_phase(self, name: str) -> None:
        self._forget_raised()
        self._timeline.enter(str(name).replace("/", "_") or "phase")

    @_guarded
    def _end_phase(self) -> None:
        self._timeline.leave()

    def _walk(self) -> dict[int, Known]:
        from gpuprobe.sampler.tracing.tensors import walk

        return walk(self._living(), self._optimizers)

    def _living(self) -> list[Module]:
        """The models that are alive."""
        return [model for model in (ref() for ref in self._models) if model is not None]

    def _close_step(self, ended_by: str, *, leave: bool = False) -> None:
        """End the step here (``leave``: and its last phase), and write it, with what an earlier
        record of it had. The collector does not run meanwhile: what is put together here would
        make it walk all objects of the program, several times in each step that is traced.
        """
        with gc_paused():
            self._write_step(ended_by, leave=leave)
        self._traces.begin_step(self._index)
        self._timeline.restart(self._again)  # our own work belongs to no phase
        if self._infer_forward and not self._manual:
            self._forward_from_here()

    def _write_step(self, ended_by: str, *, leave: bool) -> None:
        spans = self._last + self._timeline.cut(leave=leave)
        if self._timeline.overflowed:
            self._timeline.overflowed = False
            self._blind((MANY_PHASES,))
        living = self._living()
        traces = self._step_writer.write(
            self._index,
            spans,
            living,
            self._optimizers,
            earlier_traces=self._last_traces,
            out_of_memory=self._out_of_memory,
            ended_by=ended_by,
            origin_ns=self._timeline.started_ns,
            **self._per_step.take(self._index, living, self._optimizers),
        )
        self._last, self._last_traces = spans, traces
        self._index += 1
        if self._evaluations is not None:
            for finding in self._evaluations.step_ends():
                with self._failures:
                    self._sink.finding(finding)
        if ended_by != "end":
            self._search_for_holders()

    @_guarded
    def _end_of_session(self, error: BaseException | None) -> None:
        if self._manual and not self._in_step:
            return
        if self._index and error is None and not self._tail_matters():
            return
        if not self._models and self._hooks is not None:
            self._hooks.search_again()
        self._last, self._last_traces = [], ()
        self._out_of_memory = error is not None and program_error(error).out_of_memory
        self._close_step("end")

    @_guarded
    def _write_waiting(self) -> None:
        self._traces.write_waiting()

    def _tail_matters(self) -> bool:
        """Whether anything happened after the last step: evaluation, for example, or a new peak."""
        spans = self._timeline.cut()
        self._timeline.put_back(spans)
        # The last call of a DataLoader reports that it is exhausted; and a forward phase that is
        # only inferred always follows an optimizer.
        idle = {OTHER, "data"} | ({"forward"} if self._infer_forward else set())
        return (
            exact_peak(spans) > self._traces.peak
            or counters_rose(spans[0].start, spans[-1].end)
            or any(s.path not in idle for s in spans)
        )

    # -- starting and stopping

    def _blind(self, spots: Sequence[BlindSpot]) -> None:
        for spot in spots:
            with self._failures:
                self._sink.blind_spot(spot)

    def _uninstall(self) -> None:
        """Remove every hook from the program."""
        self._active = False
        try:
            if self._hooks is not None:
                self._hooks.remove()
            if self._inference is not None:
                self._inference.remove()
            if self._per_step is not None:
                self._per_step.end()
            self._traces.stop()
            self._end_sharing()
        except Exception as error:  # noqa: BLE001 - this must not end the program either
            self._failures.texts.append(described(error))

    def fault(self, error: Exception) -> None:
        """Handle an internal error: stop recording, and report it once."""
        self._failures.fault(error, self._pause)

    def _forget(self) -> None:
        self._active = False  # a forked child shares the memory, not the recording
        if self._per_step is not None:
            self._per_step.collectives.active = False
        if self._traces.cpu is not None:
            self._traces.cpu.active = False
        if self._traces.launches is not None:
            self._traces.launches.stop()
        if self._traces.uses is not None:
            self._traces.uses.stop()

    def _pause(self) -> None:
        # The hooks stay, and do nothing, until `stop`: this may be inside one of them, or in
        # another thread, while torch iterates over the list that contains them.
        self._active = False
        if self._per_step is not None:
            self._per_step.collectives.active = False
        self._traces.pause()


def _in_forked_processes(method: Callable[[], None]) -> None:
    """Call a bound method in each process that is forked off, as long as its object is alive."""
    ref = weakref.WeakMethod(method)

    def call() -> None:
        found = ref()
        if found is not None:
            found()

    os.register_at_fork(after_in_child=call)


def _listed(value: _T | Sequence[_T] | None) -> list[_T]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [cast(_T, value)]
