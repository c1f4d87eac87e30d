"""Creates baselines from recordings; recordings without the memory of others (`own_recording`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, compress, pairwise
from typing import Final, TypeAlias

from gpuprobe.allocator.whatif import reserved_alone
from gpuprobe.analysis.baseline.model import ACCOUNT_OF, PEAK, Baseline
from gpuprobe.analysis.blame.source import Source
from gpuprobe.analysis.compare.accounts import (
    Account,
    Naming,
    account_at,
    counted,
    device_allocs,
    growth,
    reserved_at,
)
from gpuprobe.analysis.completeness import missing_parts
from gpuprobe.analysis.peak.peaks import PeakSite, device_peaks, window_of
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.analysis.trace.parts import (
    AFTER,
    FIRST,
    LATER,
    Traced,
    TracePoint,
    full_steps,
    traced,
)
from gpuprobe.errors import DataError
from gpuprobe.model.actions import ALLOC, FREE_COMPLETED, FREE_REQUESTED
from gpuprobe.model.run.recording import RankRecording, Recording, TraceReader
from gpuprobe.model.run.session import DeviceWindow, Step
from gpuprobe.model.trace import COLUMNS, EventColumns, LiveColumns, MemoryTrace
from gpuprobe.model.values import Bytes, Peak, Unavailable
from gpuprobe.step_time.calibration import signature
from gpuprobe.step_time.predict import VERSION
from gpuprobe.step_time.recorded import job_time_of

ReadSources: TypeAlias = Callable[[Mapping[str, str]], Mapping[str, Source]]

WARM_UP: Final = 2  # steps: optimizer state is allocated in the first, caches settle by the second

_KINDS = {FIRST: "first step", LATER: "later steps", AFTER: "after the last step"}


def baseline_of(
    recording: Recording,
    *,
    device: str = "",
    syncs: Mapping[str, int] | None = None,
    races: Mapping[str, int] | None = None,
    precision: str = "",
    root: str = "",
    sources: ReadSources | None = None,
    figures_only: bool = False,
) -> Baseline:
    """The baseline of a recording.

    ``device`` is the GPU's name; ``syncs`` and ``races`` are counts of the whole run by place
    (``file:line in function``), None if hazards were not checked; ``precision`` are the number
    formats as text; ``root`` is the project's folder, by default the program's working directory.
    ``sources`` reads the source of files, given by name and path; with None the baseline has no
    sources. ``figures_only``: without accounts, only with the figures that a check compares.

    Without a full step, the baseline only has the peaks of the whole program. Without device
    memory, that of an incomplete recording has no figures; raises DataError for a complete one.
    """
    missing = missing_parts(recording)
    sites = [site for site in device_peaks(recording) if not isinstance(site.amount, Unavailable)]
    if not sites and missing:
        return Baseline({}, 0, {}, {}, missing=missing)
    if not sites:
        raise DataError(
            "no GPU memory was allocated: nothing to check",
            hint="is the model on the GPU? torch.cuda.is_available() is true on a simulated GPU",
        )
    site = max(sites, key=lambda found: found.amount.at_least)  # type: ignore[union-attr]
    steps = full_steps(site.rank.steps)
    naming = Naming(root or site.rank.session.cwd)
    environment = site.rank.environment
    torch = "" if isinstance(environment.torch, Unavailable) else environment.torch
    metrics = _metrics(site, steps)
    accounts: dict[str, Account] = {}
    for name, places in (("implicit_syncs_per_step", syncs), ("races", races)):
        if places is not None:
            total = sum(places.values())
            metrics[name] = -(-total // max(1, len(steps))) if name != "races" else total
            named = {naming.place(place): count for place, count in places.items()}
            accounts[ACCOUNT_OF[name]] = counted(named, total)
    time = job_time_of(recording.ranks)
    if not isinstance(time, Unavailable):
        metrics["step_time"] = time.expected_ns
        lines = Counter[str]()
        for row in time.by_line:
            lines[naming.place(row.name)] += row.ns
        accounts[ACCOUNT_OF["step_time"]] = counted(lines, time.expected_ns, "ns")
    found = traced(site)
    if figures_only:
        accounts = {}
    else:
        accounts = _with_common_calls(accounts | _accounts(found, steps, metrics, naming))
    return Baseline(
        environment={
            "allocator": environment.allocator_conf,
            "device": device or site.device.partition(":")[0],
            "level": site.rank.session.level,
            "torch": ".".join(torch.partition("+")[0].split(".")[:2]),
            **({"precision": precision} if precision else {}),
            **({"prices": f"{VERSION} {signature()}".strip()} if "step_time" in metrics else {}),
        },
        steps=len(steps),
        metrics=metrics,
        phases={name: point.bytes for name, point in _points(found)},
        accounts=accounts,
        sources={} if sources is None else sources(naming.files),
        missing=missing,
        rank=(site.rank.session.rank, len(recording.ranks)),
    )


def _with_common_calls(accounts: Mapping[str, Account]) -> dict[str, Account]:
    """Give each line the same `calls` in all accounts, so that it is recognised in another run. (In
    each account, ``calls`` are the functions that allocated most of its bytes.)
    """
    calls: dict[str, str] = {}
    for name in sorted(accounts, key=lambda name: (name != PEAK, name)):
        for line in accounts[name].lines:
            if line.calls:
                calls.setdefault(line.key, line.calls)
    return {
        name: replace(
            account,
            lines=tuple(replace(line, calls=calls.get(line.key, "")) for line in account.lines),
        )
        for name, account in accounts.items()
    }


def _points(found: Traced) -> list[tuple[str, TracePoint]]:
    """The highest points of phases and kinds of step; none if any step has no trace, since it may
    have been higher.
    """
    if not found.complete:
        return []
    phases = [(f"phase {name}", point) for name, point in sorted(found.phases().items())]
    kinds = found.kinds_of_step()
    return phases + [(_KINDS[kind], kinds[kind]) for kind in _KINDS if kind in kinds]


def _metrics(site: PeakSite, steps: list[Step]) -> dict[str, int]:
    found: dict[str, int] = {}
    assert not isinstance(site.amount, Unavailable)
    found["peak_allocated"] = site.amount.at_least
    if not isinstance(site.reserved, Unavailable):
        found["peak_reserved"] = site.reserved.at_least
    windows = [window for step in steps if (window := window_of(step.windows, site.device))]
    ends = [window.end.allocated for window in windows]
    known = [int(end) for end in ends if not isinstance(end, Unavailable)]
    if known:
        found["steady_allocated"] = known[-1]
    if len(known[WARM_UP:]) > 1:
        found["growth_per_step"] = _growth(_requested(windows)[WARM_UP:] or known[WARM_UP:])
    counts = [window.activity for window in windows[WARM_UP:]]
    allocs = [item.device_allocs for item in counts if not isinstance(item, Unavailable)]
    if allocs:
        found["device_allocs_after_warm_up"] = sum(allocs)
    return found


def _requested(windows: list[DeviceWindow]) -> list[int]:
    """The bytes that the program had requested at the end of each step, without the allocator's
    rounding; empty if unknown.
    """
    ends = [window.end.requested for window in windows]
    known = [int(end) for end in ends if not isinstance(end, Unavailable)]
    return known if len(known) == len(ends) else []


def _growth(ends: list[int]) -> int:
    """The bytes that a step leaves behind for good, rounded up: the growth of the minimum of the
    levels after it. That minimum must rise at least twice, or after each step: a cache that fills
    up once raises it once.
    """
    levels = list(accumulate(reversed(ends), min))[::-1]
    rises = sum(two > one for one, two in pairwise(levels))
    steps = len(levels) - 1
    if rises < 2 and rises < steps:
        return 0
    return -(-(levels[-1] - levels[0]) // steps)


def _accounts(
    found: Traced, steps: list[Step], metrics: Mapping[str, int], naming: Naming
) -> dict[str, Account]:
    """The accounts that the traces provide."""
    accounts: dict[str, Account] = {}
    peak = found.peak()
    # If the peak's step has no trace, the blocks that were alive are unknown.
    if peak is None or (not found.complete and not _is_the_peak(found, peak)):
        return accounts
    accounts[PEAK] = account_at(found, peak, naming, metrics["peak_allocated"], whole=True)
    if not found.complete:
        return accounts
    by_point = {peak: replace(accounts[PEAK], categories=(), modules=())}
    for name, point in _points(found):
        if point not in by_point:
            by_point[point] = account_at(found, point, naming, point.bytes)
        accounts[name] = by_point[point]
    if "peak_reserved" in metrics:
        accounts["reserved"] = reserved_at(found, metrics["peak_reserved"], naming)
    if not steps:
        return accounts
    ends = {
        step.index: point
        for step, point in zip(found.steps, found.ends, strict=True)
        if step.ended_by != "end"
    }
    last = account_at(found, ends[steps[-1].index], naming, metrics.get("steady_allocated", 0))
    if "steady_allocated" in metrics:
        accounts["steady"] = last
    if "growth_per_step" in metrics:
        start = ends[steps[WARM_UP].index]
        accounts["growth"] = growth(account_at(found, start, naming, start.bytes), last)
    if "device_allocs_after_warm_up" in metrics:
        accounts["device allocs"] = device_allocs(
            found, WARM_UP, metrics["device_allocs_after_warm_up"], naming
        )
    return accounts


def _is_the_peak(found: Traced, peak: TracePoint) -> bool:
    amount = found.site.amount
    return not isinstance(amount, Unavailable) and peak.bytes >= amount.at_least


Blocks = Mapping[str, Collection[int]]
"""Addresses of blocks that do not belong to the program, by device (``cuda:0``)."""


def own_recording(recording: Recording, others: Blocks) -> Recording:
    """The recording without the blocks of ``others``, which were alive before each of its traces.
    A test's figures are then the same alone and after other tests.

    Traces lose these blocks. Steps with a trace get their peaks, and the memory at their end, from
    it; reserved memory is what an allocator without these blocks would have reserved.
    """
    return replace(recording, ranks=tuple(_own_rank(rank, others) for rank in recording.ranks))


class _ChangedTraces:
    """Traces with a change that is made when they are read."""

    def __init__(self, traces: TraceReader, change: Callable[[MemoryTrace], MemoryTrace]) -> None:
        self._traces = traces
        self._change = change
        self.unreadable = traces.unreadable
        self.steps = traces.steps

    def __iter__(self) -> Iterator[MemoryTrace]:
        return map(self._change, self._traces)

    def of(self, step: Step) -> Iterator[MemoryTrace]:
        return map(self._change, self._traces.of(step))


def _own_rank(rank: RankRecording, others: Blocks) -> RankRecording:
    def own(trace: MemoryTrace) -> MemoryTrace:
        return without_blocks(trace, others.get(trace.device, ()))

    without = replace(rank, traces=_ChangedTraces(rank.traces, own))
    steps = []
    for step in rank.steps:
        traces = {trace.device: trace for trace in without.traces.of(step)}
        steps.append(_own_step(step, traces, others))
    return replace(without, steps=tuple(steps))


def _own_step(step: Step, traces: Mapping[str, MemoryTrace], others: Blocks) -> Step:
    windows = tuple(
        _own_window(window, traces[window.device])
        if others.get(window.device) and window.device in traces
        else window
        for window in step.windows
    )
    return replace(step, windows=windows)


def _own_window(window: DeviceWindow, trace: MemoryTrace) -> DeviceWindow:
    ledger = ledger_of(trace)
    allocated = ledger.allocated_after()
    end = replace(
        window.end, allocated=Bytes(allocated[-1]), active=Bytes(ledger.active_after()[-1])
    )
    reserved = window.peak_reserved
    if not isinstance(reserved, Unavailable):
        reserved = Peak.exactly(reserved_alone(trace))
    return replace(
        window, end=end, peak_allocated=Peak.exactly(max(allocated)), peak_reserved=reserved
    )


def without_blocks(trace: MemoryTrace, addresses: Collection[int]) -> MemoryTrace:
    """The trace without the blocks at ``addresses`` that were alive before its first event, and
    without the layout of segments, which may contain them.
    """
    gone = set(addresses)
    if not gone:
        return trace
    before = LiveColumns()
    _copied(before, trace.baseline, [address not in gone for address in trace.baseline.address])
    keep = []
    for code, address in zip(trace.events.action, trace.events.address, strict=True):
        theirs = address in gone and code in _FREED
        keep.append(not theirs)
        if address in gone and code in _OVER:
            gone.discard(address)  # the next block at this address belongs to the program
    events = EventColumns()
    _copied(events, trace.events, keep)
    return replace(trace, baseline=before, events=events, segments=())


_FREED = (FREE_REQUESTED, FREE_COMPLETED)
_OVER = (ALLOC, FREE_COMPLETED)


def _copied(to: EventColumns, source: EventColumns, keep: list[bool]) -> None:
    for name in COLUMNS:
        values = getattr(source, name)
        if len(values):  # an empty column means 0 in all rows
            getattr(to, name).extend(compress(values, keep))
