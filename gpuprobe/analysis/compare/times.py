"""The predicted and the measured time of a step, where a program was recorded on a simulated GPU
and on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Annotated

from gpuprobe.analysis.time_shares import full_steps, time_shares
from gpuprobe.model.plans.step_time import StepTime
from gpuprobe.model.record import record
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.run.session import DeviceWindow, HostWait, Step
from gpuprobe.model.values import Count, Nanoseconds, ReadStatus, Unavailable
from gpuprobe.step_time.recorded import DATA, job_time_of, step_time_of, the_gpu_of
from gpuprobe.step_time.speeds import clock_of

NOT_RECORDED = Unavailable("not recorded", ReadStatus.NOT_COLLECTED)


@record(frozen=True)
class PhaseGap:
    """A phase of the step: predicted, and measured on the GPU, between the same two marks."""

    phase: str
    predicted_ns: Nanoseconds
    measured_ns: Nanoseconds


@record(frozen=True)
class MeasuredClock:
    """The clock of the multiprocessors in steps of the measured run, by NVML, while the GPU was not
    idle: MHz. ``sheet``: at which the data sheet's peaks are; ``kept``: low and high, the share of
    it that the prices of products assume under load, empty where they assume none. ``slowed``: why
    it was below its maximum, with the number of readings.
    """

    readings: Count
    low: Count
    median: Count
    high: Count
    sheet: Count
    kept: tuple[float, ...]
    slowed: tuple[tuple[str, Count], ...]


@record(frozen=True)
class MeasuredStepTime:
    """``measured_ns``: the median of ``steps`` steps on the host. ``data_ns``: how long the host
    waited for data in the mean step; ``collectives_ns``: how long collectives blocked it; ``waits``
    what it waited for the GPU, by the call, in ``steps`` steps. ``phases``: what has a time on the
    GPU, the largest difference first; empty without such times.
    """

    predicted: StepTime
    gpu: Annotated[str, "that it was measured on, as torch names it"]
    steps: Count
    measured_ns: Nanoseconds
    data_ns: Nanoseconds
    phases: tuple[PhaseGap, ...]
    collectives_ns: Nanoseconds = Nanoseconds(0)
    waits: tuple[HostWait, ...] | Unavailable = NOT_RECORDED
    clock: MeasuredClock | Unavailable = NOT_RECORDED

    @property
    def inside(self) -> bool:
        """Whether the measured time is in the predicted range."""
        return self.predicted.low_ns <= self.measured_ns <= self.predicted.high_ns


def measured_step_time(one: Recording, two: Recording) -> MeasuredStepTime | Unavailable | None:
    """The two times, if one was recorded on a simulated GPU and the other on a GPU: None if not,
    Unavailable if there is no prediction. Raises DataError for damaged ones.
    """
    sides = sorted((one, two), key=lambda side: not _simulated(side))
    if [_simulated(side) for side in sides] != [True, False]:
        return None
    simulated, real = sides
    gpu = the_gpu_of(real.ranks[0])
    shares = time_shares(real.ranks[0].steps)
    if gpu is None or shares is None:
        return None
    predicted = _predicted(simulated, gpu[0])
    if isinstance(predicted, Unavailable):
        return predicted
    steps = full_steps(real.ranks[0].steps)
    durations = [step.duration_ns for step in steps]
    data_ns = sum(phase.ns for phase in shares.phases if phase.path == DATA) // shares.steps
    on_gpu = {
        phase.path: phase.gpu_ns // shares.gpu_steps for phase in shares.phases if shares.gpu_steps
    }
    expected = {row.name: row.ns for row in predicted.by_phase}
    gaps = [
        PhaseGap(name, expected.get(name, Nanoseconds(0)), Nanoseconds(ns))
        for name, ns in on_gpu.items()
        if ns or name in expected
    ]
    gaps.sort(key=lambda gap: -abs(gap.measured_ns - gap.predicted_ns))
    return MeasuredStepTime(
        predicted,
        gpu[1],
        len(durations),
        Nanoseconds(round(median(durations))),
        Nanoseconds(data_ns),
        tuple(gaps),
        Nanoseconds(shares.collectives_ns // shares.steps),
        _waits(steps),
        _clock((steps, real.ranks[0].steps), gpu[0]),
    )


def _waits(steps: Sequence[Step]) -> tuple[HostWait, ...] | Unavailable:
    """The sums of all steps, the longest first."""
    sums: dict[str, HostWait] = {}
    for step in steps:
        if isinstance(step.host_waits, Unavailable):
            return step.host_waits
        for wait in step.host_waits:
            before = sums.get(wait.call, HostWait(wait.call, 0, 0))
            sums[wait.call] = HostWait(wait.call, before.count + wait.count, before.ns + wait.ns)
    return tuple(sorted(sums.values(), key=lambda wait: (-wait.ns, wait.call)))


def _clock(choices: Iterable[Sequence[Step]], gpu: str) -> MeasuredClock | Unavailable:
    """The clock in the steps that have a reading, of the first choice with one: a short run has it
    in its first step only. That of an idle GPU is no measure.
    """
    sheet = clock_of(gpu)
    windows: list[DeviceWindow] = []
    read: list[tuple[int, tuple[str, ...]]] = []
    for steps in choices:
        windows = [window for step in steps for window in step.windows]
        read = read or [
            (window.sm_clock, window.slowed)
            for window in windows
            if not isinstance(window.sm_clock, Unavailable) and "idle" not in window.slowed
        ]
    if not read or sheet is None:
        reasons = (window.sm_clock for window in windows)
        failed = (reason for reason in reasons if isinstance(reason, Unavailable))
        return next((one for one in failed if one.status is ReadStatus.ERROR), NOT_RECORDED)
    clocks = sorted(mhz for mhz, _ in read)
    slowed = Counter(why for _, reasons in read for why in reasons)
    return MeasuredClock(
        len(clocks),
        clocks[0],
        round(median(clocks)),
        clocks[-1],
        round(sheet[0]),
        sheet[1] or (),
        tuple(slowed.most_common()),
    )


def _simulated(recording: Recording) -> bool:
    return bool(recording.ranks) and recording.ranks[0].session.virtual


def _predicted(simulated: Recording, gpu: str) -> StepTime | Unavailable:
    """On the GPU of the measurement; of several ranks, on the one that they were recorded on."""
    ranks: tuple[RankRecording, ...] = tuple(simulated.ranks)
    return step_time_of(ranks[0], gpu) if len(ranks) == 1 else job_time_of(ranks)
