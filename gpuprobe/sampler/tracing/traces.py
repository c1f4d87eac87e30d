"""Which steps are traced, and when their traces are written (level ``trace``)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpuprobe.errors import UsageError
from gpuprobe.model.run.session import BlindSpot, Step
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Unavailable
from gpuprobe.patching import Patches
from gpuprobe.sampler.base import Sink
from gpuprobe.sampler.failures import Failures
from gpuprobe.sampler.timeline import PhaseSpan, PhaseTimeline
from gpuprobe.torch_support.engine_reports import call_log, launch_counter

if TYPE_CHECKING:
    from gpuprobe.model.needs import UsesCost
    from gpuprobe.sampler.tracing.calls import BackwardCalls, ModuleCalls
    from gpuprobe.sampler.tracing.cpu import CpuTrace
    from gpuprobe.sampler.tracing.cuda import CudaTrace
    from gpuprobe.sampler.tracing.held import HeldMemory
    from gpuprobe.sampler.tracing.launches import LaunchTrace
    from gpuprobe.sampler.tracing.tensors import Known
    from gpuprobe.sampler.tracing.uses import Uses
    from gpuprobe.sampler.tracing.work import WorkTrace

FIRST_STEPS = 3
"""Steps that are always traced: the one in which optimizer state is allocated, and two warm
ones."""

PEAK_STEPS = 32
"""New peaks whose trace is written immediately. A program that grows sets one in every step, and
each trace lists all live memory: after these, only a peak one percent higher is written."""

_GROWTH = 1.01

OTHER_THREAD = BlindSpot(
    "CPU storages created by other threads than the recorded one, which here includes the "
    "training thread",
    "'allocated' on the CPU and the traces do not include them; named tensors are complete",
)


def chosen_steps(text: str) -> Callable[[int], bool]:
    """A function for the steps, counted from 0, that ``"3,100-102"`` or ``"all"`` selects. Raises
    UsageError, also for a range without a step in it.
    """
    if text.strip() == "all":
        return lambda index: True
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(
                f"expected steps such as 3,100-102 or all, found {text!r}",
                hint="steps are counted from 0",
            )
        steps = range(int(first), int(last or first) + 1)
        if not steps:
            raise UsageError(
                f"no step is in {first}-{last}", hint=f"did you mean {int(last)}-{int(first)}?"
            )
        ranges.append(steps)
    return lambda index: any(index in steps for steps in ranges)


def exact_peak(spans: list[PhaseSpan]) -> int:
    """The largest peak of any device that is known exactly, in bytes; -1 if there is none."""
    return max(
        (m.exact_peak for s in spans for m in s.end.devices if m.exact_peak is not None),
        default=-1,
    )


class Traces:
    """The traces of one recording. On the CPU every event is recorded and the steps that matter are
    kept: the first few and those with a new peak. On CUDA the first few steps are traced, and the
    one after a step in which something unusual happened: a new peak after the warm-up, or a retry
    of the allocator. ``chosen`` replaces all of that by steps of the user's choice. On a simulated
    GPU the history of each step is recorded, which takes no time of a GPU there, so that the step
    in which memory runs out has one; it is written only of the steps above.

    The trace of the highest peak is never lost to `PEAK_STEPS`: it waits in memory, and is written
    when the session ends.
    """

    def __init__(
        self,
        sink: Sink,
        failures: Failures,
        chosen: Callable[[int], bool] | None = None,
    ) -> None:
        self._sink = sink
        self._failures = failures
        self._chosen = chosen
        self._records_all = False
        self._after_anomaly = -1  # the step that is traced because the one before was unusual
        self._anomalies = 0
        self._step = 0  # the last one that ended
        self._highest_peak = 0
        self._most_retries = 0
        self._timeline: PhaseTimeline | None = None
        self._on_fault: Callable[[Exception], None] = lambda error: None
        self.cpu: CpuTrace | None = None
        self.cuda: CudaTrace | None = None
        self.launches: LaunchTrace | None = None
        self.work: WorkTrace | None = None
        self.places: Any = None  # OperatorPlaces, if anything numbers them
        self.uses: Uses | None = None
        self.held: HeldMemory | None = None
        self.uses_cost: UsesCost | None = None
        """What noting them has cost, if that was requested; set by `stop`."""
        self._patches = Patches()
        self.peak = -1
        self._written_peak = -1
        self._written = 0
        self._waiting: tuple[Step | None, int, list[MemoryTrace]] | None = None

    def in_detail(self, index: int) -> bool:
        """Whether each operation with other ranks is recorded in the step of that index."""
        return index < FIRST_STEPS or (self._chosen is not None and self._chosen(index))

    # -- on and off

    @property
    def on(self) -> bool:
        """Whether there may be something to collect at the end of a step."""
        return self.cpu is not None or self.cuda is not None

    @property
    def modules(self) -> CpuTrace | ModuleCalls | None:
        """The receiver of module calls and of models' inputs."""
        return self.cpu if self.cuda is None else self.cuda.modules

    @property
    def backward(self) -> BackwardCalls | None:
        """The receiver of backward calls."""
        return None if self.cuda is None else self.cuda.backward

    def start_cpu(self, timeline: PhaseTimeline, on_fault: Callable[[Exception], None]) -> CpuTrace:
        """Follow every storage on the CPU from now on."""
        from gpuprobe.sampler.hooks.discover import live_tensors
        from gpuprobe.sampler.tracing.cpu import BLIND_SPOTS, CpuTrace

        self.cpu = CpuTrace(lambda: timeline.path, on_fault)
        self.cpu.start(live_tensors())
        self._blind(*BLIND_SPOTS)
        return self.cpu

    def start_cuda(
        self,
        timeline: PhaseTimeline,
        on_fault: Callable[[Exception], None],
        *,
        simulated: bool = False,
        uses: bool = False,
    ) -> None:
        """Record the allocator's history of the first steps, their launches if these can be
        counted, and the uses of memory if the GPUs are ``simulated`` or with ``uses``.
        """
        from gpuprobe.sampler.tracing.cuda import BLIND_SPOTS, CudaTrace

        self.cuda = cuda = CudaTrace()
        self._records_all = simulated
        self._blind(*BLIND_SPOTS)
        if simulated or uses or launch_counter() is not None:
            from gpuprobe.sampler.tracing.places import OperatorPlaces

            self.places = OperatorPlaces(cuda.modules, cuda.backward, on_fault)
        if simulated or uses:
            from gpuprobe.sampler.tracing.held import HeldMemory
            from gpuprobe.sampler.tracing.uses import Uses

            self.uses = cuda.uses = Uses(
                self.places,
                lambda: timeline.path,
                on_fault,
                timed=uses,
            )
            self.uses.traces_now = lambda: cuda.now(self._step + 1, {})
            self.uses.install(self._patches)
            self.held = HeldMemory(self.uses)
        self._timeline, self._on_fault = timeline, on_fault
        self.begin_step(0)

    def _follow_engine(self) -> None:
        """Count launches and log calls, if the simulated GPU does. In a process that a launcher
        started, it begins to at the first use of a GPU, after the recording.
        """
        cuda, timeline = self.cuda, self._timeline
        if cuda is None or timeline is None or self.places is None:
            return
        counter, log = launch_counter(), call_log()
        if self.launches is None and counter is not None:
            from gpuprobe.sampler.tracing.launches import LaunchTrace

            self.launches = LaunchTrace(counter, self.places, cuda.modules, lambda: timeline.path)
            timeline.path_changed = self.launches.path_changed
        if self.work is None and log is not None and self.uses is not None:
            from gpuprobe.sampler.tracing.work import WorkTrace

            self.work = WorkTrace(log, self.places, self._on_fault)
            self.uses.follow(self.work, self._patches)

    def begin_step(self, index: int) -> None:
        """Step ``index`` begins: switch the CUDA history on, if the step is traced."""
        if self.cuda is None:
            return
        self._follow_engine()
        if self.launches is not None:
            if self._is_traced(index):
                self.launches.begin()
            else:
                self.launches.stop()
        if self.work is not None:
            if self._is_traced(index):
                self.work.begin_step()
            else:
                self.work.stop()
        if self.uses is not None:
            self.uses.begin_step()
        if not self._is_traced(index) and not self._records_all:
            self.cuda.stop()
        else:
            refused = self.cuda.begin()
            if refused is not None:
                self._blind(refused)
                self._stop_cuda()

    def _is_traced(self, index: int) -> bool:
        if self._chosen is not None:
            return self._chosen(index)
        return index < FIRST_STEPS or index == self._after_anomaly

    def _check_for_anomalies(self, index: int, spans: list[PhaseSpan]) -> None:
        """Trace the next step if this one set a new peak or made the allocator retry."""
        marks = [mark for span in spans for mark in span.end.devices]
        peak = max(
            (m.peak_allocated for m in marks if isinstance(m.peak_allocated, int)), default=0
        )
        retries = max(
            (m.activity.alloc_retries for m in marks if not isinstance(m.activity, Unavailable)),
            default=0,
        )
        unusual = peak > self._highest_peak * _GROWTH or retries > self._most_retries
        self._highest_peak = max(peak, self._highest_peak)
        self._most_retries = max(retries, self._most_retries)
        if unusual and index + 1 >= FIRST_STEPS and self._anomalies < PEAK_STEPS:
            self._after_anomaly = index + 1
            self._anomalies += 1

    def pause(self) -> None:
        """Record nothing more; what is installed stays until `stop`. Never raises."""
        if self.cpu is not None:
            self.cpu.active = False
        if self.uses is not None:
            self.uses.stop()
        with contextlib.suppress(RuntimeError):  # CUDA in error
            self._stop_cuda()

    def stop(self) -> None:
        """Stop all traces."""
        self._write_later(self._step)
        if self.uses is not None:
            self.uses_cost = self.uses.cost()
        self._patches.undo()
        self._stop_cuda()
        if self.cpu is not None:
            self.cpu.stop()
            missed = self.cpu.missed()
            if missed is not None:
                self._blind(missed)

    def _stop_cuda(self) -> None:
        if self.launches is not None:
            self.launches.stop()
            self.launches = None
        if self.work is not None:
            self.work.stop()
            self.work = None
        if self.cuda is not None:
            self.cuda.stop()
            self.cuda = None

    # -- per step

    def collect(
        self,
        index: int,
        spans: list[PhaseSpan],
        known: Mapping[int, Known],
        *,
        out_of_memory: bool = False,
    ) -> tuple[str, ...]:
        """The names of the traces written for the step that ends now."""
        self._step = index
        self._write_later(index)
        if self.cpu is not None:
            return self._collect_cpu(self.cpu, index, spans, known, out_of_memory)
        if out_of_memory:
            # The exception still holds the frames, and so the tensors, of the failed step.
            if self.cuda is not None:
                return self._save(self.cuda.now(index, known))
            from gpuprobe.sampler.tracing.cuda import by_place, layout_now

            return self._save(layout_now(index, by_place(known)))
        if self.cuda is not None:
            traced = self._is_traced(index)
            self._check_for_anomalies(index, spans)
            if not traced:
                self.cuda.stop()
            return self._save(self.cuda.collect(index, known))
        return ()

    def _collect_cpu(
        self,
        cpu: CpuTrace,
        index: int,
        spans: list[PhaseSpan],
        known: Mapping[int, Known],
        out_of_memory: bool,
    ) -> tuple[str, ...]:
        cpu.mark_known(known)
        peak = exact_peak(spans)
        highest = peak > self.peak
        self.peak = max(self.peak, peak)
        kept = highest if self._chosen is None else False
        if not self._is_traced(index) and not kept and not out_of_memory:
            cpu.discard()
            return ()
        trace = cpu.collect(index)
        if (
            highest
            and self._written >= PEAK_STEPS
            and peak < self._written_peak * _GROWTH
            and not out_of_memory
        ):
            earlier = self._waiting[2] if self._waiting and self._waiting[1] == index else []
            self._waiting = (None, index, [*earlier, trace])
            return ()
        if highest:
            self._waiting = None
            self._written += 1
            self._written_peak = peak
        return self._save([trace])

    def step_written(self, step: Step) -> None:
        """Remember the record of the step whose trace is waiting."""
        if self._waiting is not None and self._waiting[1] == step.index:
            self._waiting = (step, *self._waiting[1:])

    def write_waiting(self) -> None:
        """Write the trace that waits, and the record of its step again, naming the trace."""
        if self._waiting is None:
            return
        step, _, traces = self._waiting
        if step is None:  # its record could not be written
            return
        self._waiting = None
        complete = dataclasses.replace(step, traces=(*step.traces, *self._save(traces)))
        with self._failures:
            self._sink.step(complete)

    def _save(self, traces: list[MemoryTrace]) -> tuple[str, ...]:
        names: list[str] = []
        for trace in traces:
            name = ""
            with self._failures:
                name = self._sink.trace(trace)
            if not name:
                continue
            names.append(name)
            if self.uses is not None:
                self.uses.saved(trace, name)
                if self.held is not None:
                    self.held.saved(trace, name)
        return tuple(names)

    def _write_later(self, step: int) -> None:
        """Write what the step used of the blocks of earlier traces."""
        for uses in () if self.uses is None else self.uses.take_later(step):
            with self._failures:
                self._sink.later_uses(uses)

    def _blind(self, *spots: BlindSpot) -> None:
        for spot in spots:
            with self._failures:
                self._sink.blind_spot(spot)
