"""One run on simulated GPUs, which is recorded and measured: what an estimate is made from."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from gpuprobe.catalogue.architectures import no_kernels
from gpuprobe.errors import (
    DataError,
    DoesNotFit,
    GpuprobeError,
    ProgramFailed,
    TooLarge,
    UnknownValue,
    ValueNeeded,
)
from gpuprobe.kept_files import KeptFiles
from gpuprobe.model.plans.estimate import MAY_NEED_MORE, Estimate
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.model.text import human_bytes, plural
from gpuprobe.native.measurement import NativeMeasurement
from gpuprobe.planning.figures import estimate_of
from gpuprobe.planning.first_epoch import STEPS_FOR_LINES, EpochLimit, FirstEpoch
from gpuprobe.planning.peers import Job
from gpuprobe.planning.processes import (
    OtherProcesses,
    ProcessRecorder,
    Stalled,
    TimeIsOver,
    assumption_text,
    interrupted,
    started_processes,
)
from gpuprobe.planning.program import described, handler_of
from gpuprobe.recording.files import scratch_recording
from gpuprobe.recording.load import load
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.sampler.environment import as_rank
from gpuprobe.sampler.failures import program_error
from gpuprobe.sampler.hooks.optimizer_steps import Enough, made_optimizer
from gpuprobe.sampler.processes.children import following
from gpuprobe.sampler.program import Program, restored_if_it_fails, signals_restored
from gpuprobe.sampler.recorder import Recorder
from gpuprobe.torch_support.callers import beyond_any_gpu, of_host_memory, place_in

_LEAST_STEPS: Final = 2
"""Of a figure: the first one makes the optimizer's state, and only the second has it while its
activations exist."""
Progress = Callable[[int, str], None]


class Attempt(NamedTuple):
    """An estimate, and the first ``place`` whose decision or size depends on a value that was not
    computed ("" for none). ``too_large``: why all values are too much for a second run ("" if they
    are not), from what they cost. ``seconds``: how long computing all of them should take.
    """

    estimate: Estimate
    place: str = ""
    too_large: str = ""
    seconds: float = 0.0


class NeededValues(NamedTuple):
    """As `NativeSession.unknown_read` and ``refused``."""

    decided: str
    largest: str
    refused: ValueNeeded | None


class EstimatedFunction:
    """Calls a function ``steps`` times, or the one that its first call returns."""

    unused = "build the model inside the function, on the device: Model().cuda()"
    """The hint if nothing is allocated on the device."""

    def __init__(self, step: Callable[[], Any], steps: int) -> None:
        self._step = step
        self._steps = steps
        self.others: dict[int, OtherProcesses] = {}
        """The memory of processes that were started, by the GPU's number in the machine."""
        self.waits = False
        """Whether the run was stopped while it waited for one of them."""
        self.collected: dict[int, int] = {}
        """What Python's collector freed of each GPU when the run was stopped, in bytes."""
        self.handler = ""
        """Where an out-of-memory error is handled, as ``file:line``."""
        self.trained: NeededValues | None = None
        """The values that the training steps needed, if something else was run after them."""

    def progress(self, report: Progress | None) -> Progress | None:
        """What is called with the number of each step and its phase: ``report``."""
        return report

    def __call__(self, measured: NativeMeasurement, recorder: Recorder) -> int:
        """Run it; returns the number of steps."""
        done = 0
        current = self._step
        while done < self._steps:
            with recorder.step():
                answer = current()
            if callable(answer) and current is self._step and not done:
                current = answer
                answer = None
                continue
            del answer
            done += 1
        return done


class EstimatedCell(EstimatedFunction):
    """Calls a function once: its training steps are detected, as those of a program."""

    unused = (
        "what earlier cells made is on the CPU: choose the device, and make model and optimizer, "
        "in this cell"
    )

    def __call__(self, measured: NativeMeasurement, recorder: Recorder) -> int:
        """Run it; returns how many steps it made: of its optimizer, or backward passes if it has
        none.
        """
        counted = FirstEpoch(EpochLimit(sys.maxsize))
        with counted.watch():
            self._step()
            return counted.steps


class EstimatedProgram(EstimatedFunction):
    """Runs a program until it ends or has made the requested optimizer steps, and the evaluation
    that follows (`FirstEpoch`). A second run raises `TooLarge` if this machine's memory is too
    small for its tensors.
    """

    unused = (
        "the program ran on the CPU: move model and data to the GPU if "
        "torch.cuda.is_available(), or with an option of the script (after --)"
    )

    def __init__(self, program: Program, request: EstimateRequest) -> None:
        super().__init__(program.run, request.steps)
        self._bounded = bool(request.why)
        self._most = request.max_seconds
        # Of several ranks, none may make a step that the others do not.
        more = int(request.ranks == 1 and request.steps == STEPS_FOR_LINES - 1)
        self._epoch = FirstEpoch(EpochLimit(request.steps, for_growth=more))
        self.handler = handler_of(program.argv[0])

    def progress(self, report: Progress | None) -> Progress | None:
        """``report``, and the evaluation after it."""

        def phase(step: int, path: str) -> None:
            if report is not None:
                report(step, path)
            self._epoch.phase(step, path)

        return phase

    def __call__(self, measured: NativeMeasurement, recorder: Recorder) -> int:
        """Run the program; returns how many steps it made: of its optimizer, or backward passes if
        it has none.
        """
        epoch = self._epoch
        epoch.on_stop = recorder.stop
        epoch.on_end = lambda: self._keep_needed(measured)
        epoch.on_stop_in_training = self._collect
        kept = KeptFiles()
        with restored_if_it_fails(), kept.keep(), epoch.watch(), scratch_recording() as scratch:
            self._run(measured, recorder, scratch.parent)
            steps = epoch.steps
            if not steps:
                _refuse_untrained(measured)
            processes = started_processes(scratch.parent, measured.models())
            self.others = processes.needs
            if processes.used:
                measured.session.assume(assumption_text(processes.used))
            measured.include(processes.assumed, processes.unknown_reads)
        for note in kept.notes:
            measured.session.assume(note)
        return steps

    def _keep_needed(self, measured: NativeMeasurement) -> None:
        """Keep the values that the training steps needed: an evaluation follows."""
        self.trained = NeededValues(*measured.unknown_read(), measured.session.refused())

    def _run(self, measured: NativeMeasurement, recorder: Recorder, folder: Path) -> None:
        """Run the program to its end. ``folder``: for what the processes that it starts leave."""
        epoch = self._epoch
        try:
            started = following(ProcessRecorder(folder, self._steps))
            with interrupted(folder, self._most), started, signals_restored():
                self._step()
        except (Exception, Enough, SystemExit, UnknownValue) as error:  # noqa: BLE001 - in the result
            if not epoch.ended_by(error):
                self._ended(measured, error, epoch.steps)
        if epoch.ended:
            self._collect()
            measured.session.assume(epoch.assumption("--steps"))
            recorder.epoch = epoch.end()

    def _ended(self, measured: NativeMeasurement, error: BaseException, steps: int) -> None:
        """The program ended by an exception in its training, after ``steps``."""
        if isinstance(error, Enough):
            self._stopped(measured, steps, error)
        elif isinstance(error, SystemExit):
            if error.code not in (None, 0):
                text = f"the program ended with exit code {error.code}"
                raise _failed(measured, text) from None
        elif isinstance(error, (GpuprobeError, UnknownValue)):
            raise error
        else:
            assert isinstance(error, Exception)
            # A size beyond any GPU is an answer, not a bug that a traceback would show.
            cause = None if beyond_any_gpu(error) else error
            raise self._error(measured, error) from cause

    def _stopped(self, measured: NativeMeasurement, steps: int, end: Enough) -> None:
        """The program was ended, after ``steps``. Raises ProgramFailed if its time was over before
        it had made enough of them for a figure.
        """
        self.waits = isinstance(end, Stalled)
        where = f"after step {steps} (--steps)"
        if isinstance(end, TimeIsOver):
            least = min(_LEAST_STEPS, self._steps)
            if steps < least:
                raise ProgramFailed(
                    f"the program made {steps} training steps in {self._most:g} s, of the {least} "
                    "that an estimate needs",
                    hint="give it more time: --max-seconds N; or less to compute: --compute shapes",
                )
            where = f"after {self._most:g} s (--max-seconds), {steps} of "
            where += plural(self._steps, "step")
        if not made_optimizer():
            where += ", counted by backward passes as it has no optimizer"
        if self.waits:
            where = (
                "where the program waited for a process that it had started, which was "
                f"stopped after step {self._steps} (--steps)"
            )
        measured.session.assume(
            f"stopped {where}: later code, such as an evaluation or a checkpoint, {MAY_NEED_MORE}"
        )

    def _error(self, measured: NativeMeasurement, error: Exception) -> BaseException:
        """What to raise for an error of the program."""
        if of_host_memory(error):
            return self._without_host_memory(error)
        size = beyond_any_gpu(error)
        if size:
            return DoesNotFit(
                f"does not fit on any GPU: {place_in(error)} requests {human_bytes(size)} at once, "
                "more than this machine has addresses for",
                hint="gpuprobe fit searches the largest batch that fits",
            )
        text = f"the program failed at {place_in(error)}: {described(error)}"
        if program_error(error).lacks_launcher:
            return ProgramFailed(text, hint="torchrun sets it: --ranks N, for one rank of N")
        if without := self._without_kernels():
            return ProgramFailed(text, hint=without)
        return _failed(measured, text)

    @staticmethod
    def _without_kernels() -> str:
        """That this torch has no kernels for the GPU; or ""."""
        if not torch.cuda.is_initialized():
            return ""
        capability = torch.cuda.get_device_capability()
        return no_kernels(torch.__version__, torch.cuda.get_arch_list(), capability)

    def _without_host_memory(self, error: Exception) -> TooLarge | ProgramFailed:
        if self._bounded:
            return TooLarge("this machine does not have enough memory for its tensors")
        return ProgramFailed(
            f"this machine does not have enough memory for a tensor that the program "
            f"creates on the CPU at {place_in(error)}: create it on the GPU (with "
            "torch.device('cuda'))"
        )

    def _collect(self) -> None:
        """Run Python's collector, and note what it frees: nothing of the program runs after."""
        if not torch.cuda.is_initialized():
            return
        devices = range(torch.cuda.device_count())
        before = [torch.cuda.memory_allocated(device) for device in devices]
        gc.collect()
        self.collected = {
            device: max(0, was - torch.cuda.memory_allocated(device))
            for device, was in zip(devices, before, strict=True)
        }


def measure(
    run: EstimatedFunction,
    request: EstimateRequest,
    job: Job | None = None,
    progress: Progress | None = None,
) -> Attempt:
    """Run and measure it, as a rank if there is a job. The recording is kept at the request's
    ``output``. ``progress`` is called with the number of the step and its phase.

    Raises what `estimate_program` of `gpuprobe.planning.estimates` raises.
    """
    measured = NativeMeasurement(request, job)
    with nullcontext(Path(request.output)) if request.output else scratch_recording() as path:
        with _as_rank(job, measured.count):
            recorder = _recorder(path, request)
        recorder.progress = run.progress(progress)
        measured.recorded(recorder.now_ns)
        measured.session.assume_unknown()
        measured.session.start()
        try:
            with _as_rank(job, measured.count), recorder:
                steps = run(measured, recorder)
            trained = run.trained or NeededValues(
                *measured.unknown_read(), measured.session.refused()
            )
            refused = trained.refused
            if refused is not None:  # and the program caught it
                raise refused
        except UnknownValue as unknown:
            raise unknown.error from None
        finally:
            measured.session.stop()
        recording = load(path)  # other ranks may be writing their parts
        ranks = tuple(one for one in recording.ranks if one.session.rank == request.rank)
        mine = replace(recording, ranks=ranks)
        outcome = measured.run(mine)
        if not outcome.devices:
            raise _unused(run, outcome.count)
        found = estimate_of(
            request,
            outcome,
            mine,
            run.others,
            steps=steps,
            collected=run.collected,
            handler=run.handler,
        )
    _, largest = measured.unknown_read()  # of an evaluation too, whose decisions need no memory
    computed = measured.session.computed
    return Attempt(
        found,
        trained.decided or largest,
        measured.session.too_large(),
        0.0 if computed is None else computed.cost.seconds,
    )


def _as_rank(job: Job | None, gpus: int) -> AbstractContextManager[None]:
    """Inside, this process is that rank of a job whose processes have so many GPUs."""
    if job is None:
        return as_rank(0, 0, 1)
    return as_rank(job.rank, job.rank % gpus, job.ranks, job.environment(gpus))


def _recorder(path: Path, request: EstimateRequest) -> Recorder:
    """What records the run; a second one replaces the recording of the first."""
    again, rank = bool(request.why), request.one_rank
    return Recorder(
        RecordingWriter.create(path, rank=rank, world_size=request.ranks, force=again),
        level="trace",
        argv=tuple(sys.argv),
        warn=lambda text: None,
        trace_steps="all",
    )


def _unused(run: EstimatedFunction, gpus: int) -> DataError:
    """The error for a run that used none of its GPUs."""
    if not gpus:
        return DataError("the program hides all GPUs", hint="it sets CUDA_VISIBLE_DEVICES")
    if not run.others:
        return DataError("nothing was allocated on the GPU", hint=run.unused)
    return DataError(
        "only processes that the program starts use the GPU, not the program itself"
        + (" before it waits for one that was stopped (--steps)" if run.waits else ""),
        hint="estimate what one of them runs, as a script; of a job with --ranks N"
        + ("; or more --steps than they make" if run.waits else ""),
    )


def _failed(measured: NativeMeasurement, text: str) -> ProgramFailed:
    """The error for a program that failed: ValueNeeded if an unknown value may have caused it."""
    decided, bounded = measured.unknown_read()
    place = decided or bounded
    if not place:
        return ProgramFailed(text)
    what = "a value was assumed" if decided else "the largest size was assumed for one"
    return ValueNeeded(
        f"{text}; {what} that was not computed ({place}), which it may need",
        hint="compute the values: --compute real, compute='real'",
        place=place,
    )


def _refuse_untrained(measured: NativeMeasurement) -> None:
    """Raise ValueNeeded if a program has an optimizer and made no step, after it decided by a value
    that was not computed: its figures are not those of training.
    """
    decided, bounded = measured.unknown_read()
    if not (decided or bounded):
        return
    if made_optimizer():
        place = decided or bounded
        raise ValueNeeded(
            f"no training step was made, after {place} decided by a value that was not computed",
            hint="compute the values: --compute real, compute='real'",
            place=place,
        )
