"""The figures of an estimate."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import pairwise, takewhile
from statistics import median
from typing import NamedTuple

import torch

from gpuprobe.allocator.replay import replay_trace
from gpuprobe.allocator.whatif import peaks_by_address_order, what_if
from gpuprobe.analysis.communication import transfers
from gpuprobe.analysis.evaluation import WITH_GRADIENTS
from gpuprobe.analysis.peak.peaks import device_categories, device_peaks
from gpuprobe.analysis.trace.parts import traced
from gpuprobe.catalogue.architectures import no_kernels
from gpuprobe.causes.recorded import CYCLE, EVALUATION
from gpuprobe.model.io.files import gc_paused
from gpuprobe.model.plans.estimate import (
    NOT,
    SEVERITY,
    DeviceEstimate,
    Estimate,
    EstimateCause,
    EstimateShare,
    PhasePeak,
    steps_until_full,
)
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.model.report import Report, ShareTable
from gpuprobe.model.run.communication import CollectiveRecord
from gpuprobe.model.run.recording import Recording
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import Bytes, Peak, Unavailable, available
from gpuprobe.native.measurement import DeviceRun, EngineRun
from gpuprobe.planning.first_epoch import STEPS_FOR_LINES, grows
from gpuprobe.planning.processes import NO_PROCESSES, OtherProcesses
from gpuprobe.planning.verdict import NeededMemory, verdict_of
from gpuprobe.recording.summary import summarize
from gpuprobe.reporters.sections.causes import effect_text
from gpuprobe.reporters.sections.parts import capitalized
from gpuprobe.step_time.recorded import step_time_of

_NOT_MODELLED = ("memory that libraries allocate without torch", "other programs on the same GPU")

_RANK_UNCERTAINTY = 0.02
"""Of the reserved memory of one of several ranks, in both directions. The error for published peaks
of torchtitan was up to 0.6% (``docs/verification/simulated-gpu.md``)."""


class DeviceFit(NamedTuple):
    """Whether a run fits on one device. ``low`` to ``high`` is the range of reserved memory,
    ``allocated_low`` to ``allocated_high`` that of the peak of allocated memory. ``others``: the
    processes that the program starts there. ``by_addresses``: the peaks depend on the order of the
    addresses that the driver allocates.
    """

    low: int
    high: int
    allocated_low: int
    allocated_high: int
    nccl_low: Bytes
    nccl_high: Bytes
    others: OtherProcesses
    verdict: str
    why: str
    by_addresses: bool = False


def device_fit(
    run: EngineRun, device: DeviceRun, others: OtherProcesses = NO_PROCESSES
) -> DeviceFit:
    """Whether the run fits on a device, next to the processes that it starts (``others``)."""
    model, trace = device.model, device.trace
    recorded = replay_trace(trace, torch=getattr(sys.modules.get("torch"), "__version__", ""))
    low = high = device.peak_reserved
    orders = peaks_by_address_order(trace, recorded)
    # The run itself had one order. The other one's effect is the difference of the two simulations.
    more_allocated = orders.ascending_allocated - orders.descending_allocated
    more_reserved = orders.ascending_reserved - orders.descending_reserved
    low, high = min(low, low + more_reserved), max(high, high + more_reserved)
    lowest = device.peak_allocated + min(0, more_allocated)
    peak = device.peak_allocated + max(0, more_allocated)
    low = max(lowest, low)
    simulated = high
    if run.ranks > 1:
        low, high = int(low * (1 - _RANK_UNCERTAINTY)), int(high * (1 + _RANK_UNCERTAINTY))
    need = NeededMemory(
        model.total_memory,
        peak,
        simulated,
        low,
        high,
        model.context_low + run.nccl_low + others.low,
        model.context_high + run.nccl_high + others.high,
    )
    verdict, why = verdict_of(
        need,
        lambda capacity: what_if(trace, recorded, run.settings, capacity=capacity),
    )
    return DeviceFit(
        low,
        high,
        lowest,
        peak,
        run.nccl_low,
        run.nccl_high,
        others,
        verdict,
        why,
        bool(more_allocated or more_reserved),
    )


def fullest(run: EngineRun, fits: Mapping[int, DeviceFit]) -> DeviceRun:
    """The device with the least room. ``fits`` are by the program's index of the device."""

    def need(device: DeviceRun) -> tuple[int, float]:
        fit, model = fits[device.index], device.model
        total = fit.high + model.context_high + fit.others.high
        return SEVERITY.get(fit.verdict, 1), total / model.total_memory

    return max(run.devices, key=need)


def device_rows(
    run: EngineRun, fits: Mapping[int, DeviceFit], recording: Recording
) -> tuple[DeviceEstimate, ...]:
    """A row for each device of several; no rows for a single device."""
    if len(fits) < 2:
        return ()
    tables = device_categories(recording)
    nothing = Unavailable("nothing was recorded of this device")
    return tuple(
        DeviceEstimate(
            device=f"cuda:{device.index}",
            gpu=device.model.name,
            verdict=fit.verdict,
            peak_allocated=Bytes(device.peak_allocated),
            peak_reserved=Bytes(device.peak_reserved),
            total_low=fit.low + device.model.context_low + fit.nccl_low + fit.others.low,
            total_high=fit.high + device.model.context_high + fit.nccl_high + fit.others.high,
            capacity=Bytes(device.model.total_memory),
            by_category=_shares(tables.get(f"cuda:{device.index}", nothing)),
        )
        for device in run.devices
        for fit in (fits[device.index],)
    )


def estimate_of(
    request: EstimateRequest,
    run: EngineRun,
    recording: Recording,
    others: Mapping[int, OtherProcesses],
    *,
    steps: int,
    collected: Mapping[int, int] = {},
    handler: str = "",
) -> Estimate:
    """The estimate of a run, from the device with the least room and the ``recording`` of the run's
    rank. ``others``: the memory of processes that the program started, by the GPU's number in the
    machine; ``steps``: the optimizer steps that it made. ``collected``: what Python's collector
    freed of each GPU when the program was stopped, in bytes. ``handler``: where the program handles
    an out-of-memory error, which never comes here.
    """
    fits = {
        device.index: device_fit(run, device, others.get(device.number, NO_PROCESSES))
        for device in run.devices
    }
    device = fullest(run, fits)
    fit, model, name = fits[device.index], device.model, f"cuda:{device.index}"
    with gc_paused():
        report = summarize(recording, top=1_000_000, device=name if len(run.devices) > 1 else "")
    time = step_time_of(
        recording.ranks[0], model.name, per_node=request.per_node, network=request.network
    )
    rows = device_rows(run, fits, recording)
    growing, causes = _growth(report, name, collected.get(device.index, 0))
    outside_high = model.context_high + fit.nccl_high + fit.others.high
    room = model.total_memory - fit.allocated_high - outside_high
    _assume(run, fit, growing if fit.verdict != NOT else 0, room)
    verdict_why = fit.why
    if handler and fit.verdict == NOT:
        verdict_why = (
            f"as it begins; it handles out-of-memory errors ({handler}) and may continue with "
            f"less: gpuprobe run --gpu {model.name} shows what it does"
        )
    sent = _sent(run, report)
    return Estimate(
        gpu=model.name,
        devices=run.count,
        steps=steps,
        peak_allocated=Bytes(device.peak_allocated),
        allocated_low=Bytes(fit.allocated_low),
        allocated_high=Bytes(fit.allocated_high),
        peak_reserved=Bytes(device.peak_reserved),
        reserved_low=Bytes(fit.low),
        reserved_high=Bytes(fit.high),
        context_low=Bytes(model.context_low),
        context_high=Bytes(model.context_high),
        capacity=Bytes(model.total_memory),
        verdict=fit.verdict,
        verdict_why=verdict_why,
        growth=Bytes(growing),
        growth_advice=_growth_advice(report, name) if growing else (),
        phases=_phases(recording, name),
        causes=causes[:_MOST_CAUSES],
        by_device=rows,
        attributed=Bytes(_traced(report)),
        by_category=_shares(report.categories),
        by_module=_shares(report.top_modules),
        by_line=_shares(report.top_lines),
        assumed=tuple(run.assumed),
        not_modelled=_NOT_MODELLED,
        settings=run.settings.conf,
        ranks=run.ranks,
        rank=run.rank,
        compute=run.compute,
        compute_why=request.why,
        compiled=report.compiled,
        communication=transfers(sent.values()),
        nccl_low=fit.nccl_low,
        nccl_high=fit.nccl_high,
        processes=fit.others.processes,
        processes_low=fit.others.low,
        processes_high=fit.others.high,
        torch=str(torch.__version__),
        no_kernels=_no_kernels(run),
        step_time=time,
    )


def _no_kernels(run: EngineRun) -> str:
    """That this build of torch has no kernels for a GPU of the run; or ""."""
    archs = torch.cuda.get_arch_list()
    models = {device.model.name: device.model for device in run.devices}.values()
    texts = (no_kernels(torch.__version__, archs, model.capability) for model in models)
    return next(filter(None, texts), "")


_MOST_CAUSES = 3


def _assume(run: EngineRun, fit: DeviceFit, growing: int, room: int) -> None:
    """Note what the figures of a device assume. ``growing``: the growth of a step if the run fits,
    ``room``: what is left of the GPU; bytes.
    """
    if fit.by_addresses:
        run.assume(
            "that the driver's addresses descend, as on ordinary Linux, or ascend, as in some "
            "cloud sandboxes: the peaks depend on it, and the ranges cover both"
        )
    if growing:
        more = steps_until_full(room, growing)
        run.assume(
            f"that memory stops growing: a step ended with {human_bytes(growing)} more than it "
            f"began with; if every step does, the GPU is full in about {more} more"
        )
    if run.ranks > 1:
        run.assume(
            f"that reserved memory is within {_RANK_UNCERTAINTY:.0%}: which blocks the streams of "
            "a distributed job can reuse depends on the versions of torch and its libraries"
        )
    for text in run.unused_assumptions:
        run.assume(f"--assume {text} was not used: that line needs no value")


def _growth(report: Report, device: str, waits: int) -> tuple[int, tuple[EstimateCause, ...]]:
    """The growth of a step in bytes, and the causes of the report. What Python's collector
    frees (``waits``, bytes) does not grow without end.
    """
    growing, causes = _growing(report, device), _causes(report)
    if not growing or waits < growing:
        return growing, causes
    if all(one.rule != CYCLE for one in causes):
        causes = (_of_cycles(waits), *causes)
    return 0, causes


def _sent(run: EngineRun, report: Report) -> dict[int, CollectiveRecord]:
    """The rank's collectives in the last complete step, by number. The first steps also set up
    communication.
    """
    if run.traffic is None:
        return {}
    records = dict(enumerate(run.traffic.records))
    whole = [row.step for row in report.steps.rows if row.step.ended_by != "end"]
    if not whole:
        return records
    start, end = whole[-1].start_ns, whole[-1].start_ns + whole[-1].duration_ns
    return {
        number: record
        for number, record in records.items()
        if isinstance(record.arrival_ns, int) and start <= record.arrival_ns < end
    }


def _traced(report: Report) -> int:
    """The sum of the tables: the peak, or the highest traced one if the peak has no trace."""
    if not isinstance(report.peak.traced, Unavailable):
        return report.peak.traced
    table = report.top_lines
    return 0 if isinstance(table, Unavailable) else available(table.total, 0)


def _growing(report: Report, device: str) -> int:
    """The growth of a step in bytes, if it is large enough to report in the last one; otherwise 0:
    the median of the steps since it began. The first step is not compared: optimizers create their
    state in it.
    """
    ends = [
        window.end.allocated
        for row in report.steps.rows
        if row.step.ended_by != "end"
        for window in row.step.windows
        if window.device == device
    ]
    known = [end for end in ends if isinstance(end, int)]
    if len(ends) < 3 or len(known) < len(ends):
        return 0
    grown = [after - before for before, after in pairwise(known)]
    if len(grown) == 2:
        del grown[0]  # one outlier of three would not count
    most = max(known)
    since = list(takewhile(lambda growth: grows(growth, most), reversed(grown)))
    return round(median(since)) if since else 0


def _growth_advice(report: Report, device: str) -> tuple[str, ...]:
    """What to change about memory that grows, and the reasons. The report knows the line if enough
    steps were run; peaks are compared from the third step on, when optimizers have their state.
    """
    peaks = [
        (row.step.index, window.peak_allocated)
        for row in report.steps.rows
        for window in row.step.windows
        if window.device == device and isinstance(window.peak_allocated, Peak)
    ]
    rises: list[str] = []
    if len(peaks) > 3:
        (first, early), (last, late) = peaks[2], peaks[-1]
        peaks_then = (
            f"{human_bytes(early.at_most)} in step {first}, and {human_bytes(late.at_most)}"
        )
        rises.append(f"The peak was {peaks_then} in step {last}.")
    if not isinstance(report.causes, Unavailable) and report.causes:
        cause = report.causes[0]
        return (f"{capitalized(cause.sentence)}.", f"{capitalized(cause.remedy)}.", *rises)
    if len(peaks) < STEPS_FOR_LINES:
        return (f"With --steps {STEPS_FOR_LINES}, an estimate names the line.",)
    return tuple(rises)


def _phases(recording: Recording, device: str) -> tuple[PhasePeak, ...]:
    """The peak of each phase, from the traces: the counters have a lower bound if an earlier phase
    needed more.
    """
    site = next((one for one in device_peaks(recording) if one.device == device), None)
    points = {} if site is None else traced(site).phases()
    ordered = sorted(points.items(), key=lambda item: (-item[1].bytes, item[0]))
    return tuple(PhasePeak(phase, Bytes(point.bytes)) for phase, point in ordered)


def _causes(report: Report) -> tuple[EstimateCause, ...]:
    """The causes of the report; and an evaluation with gradients, which may not be at the peak."""
    known = () if isinstance(report.causes, Unavailable) else report.causes
    found = [
        EstimateCause(one.rule, one.sentence, one.remedy, one.code, effect_text(one.effect))
        for one in known
    ]
    if all(one.rule != EVALUATION for one in found):
        found += [
            EstimateCause(
                EVALUATION,
                f"{row.finding.message} ({row.finding.location})",
                "run the evaluation without gradients",
                "with torch.no_grad():",
                "not tried",
            )
            for row in report.findings
            if row.finding.rule == WITH_GRADIENTS.id
        ][:1]
    return tuple(found)


def _of_cycles(freed: int) -> EstimateCause:
    return EstimateCause(
        CYCLE,
        f"{human_bytes(freed)} waited for Python's garbage collector when the program was stopped: "
        "reference cycles keep them, so memory grows until it runs",
        "break the cycles, or call gc.collect() where they arise; gpuprobe explain names them",
        "",
        f"up to {human_bytes(freed)} (freed by a collection at the end)",
    )


def _shares(table: ShareTable | Unavailable) -> tuple[EstimateShare, ...]:
    if isinstance(table, Unavailable):
        return ()
    return tuple(EstimateShare(str(row.key), Bytes(row.bytes)) for row in table.rows)
