"""A run while it is being recorded: its current state, and a table of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from gpuprobe.analysis.communication import BY, communication_of, summed
from gpuprobe.analysis.growth import Forecast
from gpuprobe.analysis.inspection.steps import RECENT, Insight, RankFacts
from gpuprobe.analysis.time_shares import full_steps, time_shares
from gpuprobe.model.findings import Finding
from gpuprobe.model.machine.process import Neighbours
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import AllocatorActivity, DeviceWindow, Step
from gpuprobe.model.text import human_bytes, human_ns, plural
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.sections.parts import (
    Cell,
    Column,
    Row,
    Section,
    Table,
    bounds,
    duration,
    items,
    size,
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts that are not in the recording's steps; None while they are being read."""

    neighbours: Neighbours | Unavailable | None = None
    forecast: Forecast | Unavailable | None = None
    insight: Insight | Unavailable | None = None


def now_sections(rank: RankRecording, device: str, around: Surroundings) -> list[Section]:
    """The state of a rank on a device, from its newest steps."""
    found = {
        "pace": _pace(rank.steps),
        "memory": _memory(rank.steps, device),
        "outside torch": _non_tensor(rank.steps, device, around.neighbours),
        "forecast": _forecast(around.forecast),
        "left behind": _leaks(around.insight),
        "fragmentation": _fragmentation(around.insight),
        "allocator": _allocator(rank.steps, device),
        "collectives": _collectives(rank.steps),
        "communication": _communication(rank),
        "host waits": _syncs(rank.findings),
        "hazards": _hazards(rank.findings),
    }
    sections = [Section(title, items(lines)) for title, lines in found.items()]
    return [section for section in sections if section.parts]


def ranks_section(ranks: Sequence[RankFacts]) -> Section:
    """A row per rank; outliers are marked with ``◂``."""
    peaks = [facts.peak for facts in ranks if facts.peak is not None]
    owns = [facts.own_ns for facts in ranks if facts.own_ns is not None]
    worst = max(peaks) if len(peaks) > 1 and max(peaks) > 1.02 * median(peaks) else None
    slowest = max(owns) if len(owns) > 1 and max(owns) > 1.1 * median(owns) else None
    rows = []
    for facts in ranks:
        marks = []
        if worst is not None and facts.peak == worst:
            marks.append("highest peak")
        if slowest is not None and facts.own_ns == slowest:
            marks.append("slowest")
        state = facts.state + (f"  ◂ {', '.join(marks)}" if marks else "")
        durations = [_cell(value, duration) for value in (facts.step_ns, facts.own_ns)]
        sizes = [_cell(v, size) for v in (facts.peak, facts.reserved, facts.at_end)]
        rows.append(Row((str(facts.rank), str(facts.steps), *durations, *sizes, state)))
    columns = (
        Column("rank", 5, number=True),
        Column("steps", 7, number=True, gap=1),
        Column("step time", 10, number=True, gap=1),
        Column("own time", 10, number=True, gap=1),
        Column("peak", 11, number=True, gap=1),
        Column("reserved", 11, number=True, gap=1),
        Column("at end", 11, number=True, gap=1),
        Column("state", 0, gap=2, cut=False),
    )
    return Section(parts=(Table("ranks", columns, tuple(rows), indent=0),))


def _cell(value: int | None, made: Callable[[int], Cell]) -> Cell:
    return Cell("-") if value is None else made(value)


def _pace(steps: Sequence[Step]) -> list[str]:
    recent = full_steps(steps[-RECENT:]) if steps else []
    if not recent:
        return ["no step yet"]
    usual = round(median(step.duration_ns for step in recent))
    last = recent[-1]
    # From start to start: time between two steps slows a run down as well.
    spans = [b.start_ns - a.start_ns for a, b in pairwise(recent)]
    spans = [span for span in spans if span > 0]
    rate = f" · {1e9 * len(spans) / sum(spans):.2f} steps/s" if spans else ""
    lines = [
        f"last step {human_ns(last.duration_ns)} · median of {len(recent)} {human_ns(usual)}{rate}"
    ]
    on_gpu = [step.gpu_ns for step in recent if not isinstance(step.gpu_ns, Unavailable)]
    if on_gpu:
        lines[0] += f" · on the GPU {human_ns(round(median(on_gpu)))}"
    shares = time_shares(recent)
    if shares is not None and shares.duration_ns:
        parts = [(phase.path, phase.ns) for phase in shares.phases if phase.ns]
        if shares.outside_phases_ns > 0:
            parts.append(("between", shares.outside_phases_ns))
        lines.append(
            " · ".join(f"{name} {100 * ns / shares.duration_ns:.0f}%" for name, ns in parts[:6])
        )
    return lines


def _window(steps: Sequence[Step], device: str) -> DeviceWindow | None:
    return next((w for w in steps[-1].windows if w.device == device), None) if steps else None


def _memory(steps: Sequence[Step], device: str) -> list[str]:
    window = _window(steps, device)
    if window is None:
        if not steps:
            return ["no step yet"]
        host = steps[-1].host
        return [
            f"resident {_size(host.rss_end)} at the end of the step · peak {_bounds(host.rss_peak)}"
        ]
    end = window.end
    lines = [
        f"{device}: {_size(end.allocated)} allocated at the end of the step, "
        f"peak {_bounds(window.peak_allocated)}",
    ]
    if not isinstance(end.reserved, Unavailable):
        lines.append(
            f"{_size(end.reserved)} reserved, peak {_bounds(window.peak_reserved)} · "
            f"{_size(end.cached)} of it free for reuse"
        )
    for tensors in steps[-1].tensors:
        if tensors.device == device and tensors.by_category:
            named = sorted(tensors.by_category.items(), key=lambda item: -item[1])
            parts = [f"{c.words} {human_bytes(size)}" for c, size in named[:5] if size]
            if isinstance(tensors.rest, int) and tensors.rest:
                parts.append(f"everything else {human_bytes(tensors.rest)}")
            lines.append(" · ".join(parts))
    return lines


def _size(value: int | Unavailable) -> str:
    return "?" if isinstance(value, Unavailable) else human_bytes(value)


def _bounds(peak: Peak | Unavailable) -> str:
    return "?" if isinstance(peak, Unavailable) else bounds(peak).text


def _non_tensor(
    steps: Sequence[Step], device: str, around: Neighbours | Unavailable | None
) -> list[str]:
    if around is None:
        return ["asking the driver …"]
    if isinstance(around, Unavailable):
        return [*_recorded_non_tensor(steps, device), around.reason]
    window = _window(steps, device)
    reserved = window.end.reserved if window else Unavailable("no window")
    held: int | Unavailable = around.held
    if not isinstance(held, Unavailable) and not isinstance(reserved, Unavailable):
        held -= reserved
    elif not isinstance(held, Unavailable):
        held = Unavailable("memory reserved by torch is unknown")
    count = around.other_processes
    others = "no other process" if not count else plural(count, "other process")
    if count == 1:
        others = "1 other process"
    if count:
        others += f" {_size(around.others)}"
    return [
        f"{around.gpu}: this process outside torch {_size(held)} · {others} · "
        f"{_size(around.free)} of {_size(around.total)} free"
    ]


def _recorded_non_tensor(steps: Sequence[Step], device: str) -> Iterable[str]:
    """The program's last reading of the driver, which is not in every step."""
    for step in reversed(steps[-RECENT:]):
        window = _window((step,), device)
        if window is not None and not isinstance(window.not_torch, Unavailable):
            yield (
                f"{human_bytes(window.not_torch)} in use outside torch at the end of step "
                f"{step.index}: contexts, libraries, other processes"
            )
            return


def _forecast(found: Forecast | Unavailable | None) -> list[str]:
    if found is None:
        return ["…"]
    if isinstance(found, Unavailable):
        return [found.reason]
    lines = [found.in_words()]
    if isinstance(found.limit, Unavailable):
        lines.append(f"cannot estimate time to OOM: {found.limit.reason}")
    return lines


def _leaks(found: Insight | Unavailable | None) -> list[str]:
    leaks = found.leaks if isinstance(found, Insight) else found
    if leaks is None:
        return ["…"]
    if isinstance(leaks, Unavailable):
        return [leaks.reason]
    if not leaks.leaking:
        return [f"no line leaks more memory with every step ({leaks.steps} traced steps)"]
    return [f"+{human_bytes(line.per_step)} per step: {line.line}" for line in leaks.leaking[:3]]


def _fragmentation(found: Insight | Unavailable | None) -> list[str]:
    account = found.fragmentation if isinstance(found, Insight) else found
    if account is None:
        return ["…"]
    if isinstance(account, Unavailable):
        return [account.reason]
    total = account.total
    step = found.step if isinstance(found, Insight) else None
    when = "at the end" if step is None else f"at the end of step {step}"
    lines = [
        f"{human_bytes(total.free)} of {human_bytes(total.reserved)} reserved are free in "
        f"{total.holes} holes {when}; the largest is {human_bytes(total.largest_hole)}",
        f"{100 * total.external:.0f}% of the free bytes are outside it · rounding "
        f"{human_bytes(total.rounding)} · empty_cache would return {human_bytes(total.returnable)}",
    ]
    return lines if total.free else [lines[0].partition(" in ")[0] + f" {when}"]


def _allocator(steps: Sequence[Step], device: str) -> list[str]:
    counts = [
        w.activity
        for step in steps[-RECENT:]
        for w in step.windows
        if w.device == device and isinstance(w.activity, AllocatorActivity)
    ]
    if not counts:
        return ["allocator activity is counted on CUDA devices only"]
    allocs, frees = (
        sum(getattr(c, name) for c in counts) for name in ("device_allocs", "device_frees")
    )
    retries, ooms = (sum(getattr(c, name) for c in counts) for name in ("alloc_retries", "ooms"))
    return [
        f"in the last {plural(len(counts), 'step')}: {allocs} cudaMalloc, {frees} cudaFree, "
        f"{retries} retries, {ooms} out of memory"
    ]


def _collectives(steps: Sequence[Step]) -> Iterable[str]:
    shares = time_shares(steps[-RECENT:]) if steps else None
    if shares is None or not shares.collectives:
        return
    for call in shares.collectives[:3]:
        time = "" if isinstance(call.host_ns, Unavailable) else f", waited {human_ns(call.host_ns)}"
        wire = "" if isinstance(call.wire, Unavailable) else f", {human_bytes(call.wire)} sent"
        yield f"{call.op}: {plural(call.count, 'call')}, {human_bytes(call.bytes)}{wire}{time}"


def _communication(rank: RankRecording) -> Iterable[str]:
    """The largest communication, in the last step with operations recorded one by one."""
    found = communication_of(rank)
    if found is None:
        return
    wire = human_bytes(sum(row.wire for row in found.rows))
    yield f"step {found.step}: {wire} sent by this rank"
    for by in BY:
        for name, count, payload, sent in summed(found.rows, by)[:2]:
            calls = plural(count, "call")
            yield f"{name}: {calls}, {human_bytes(payload)}, {human_bytes(sent)} sent"


def _syncs(findings: Sequence[Finding]) -> list[str]:
    syncs = [finding for finding in findings if finding.kind == "implicit-sync"]
    if not syncs:
        return ["none recorded (gpuprobe run --hazards detects them)"]
    total = sum(finding.count for finding in syncs)
    places = "1 line" if len(syncs) == 1 else f"{len(syncs)} lines"
    lines = [f"{plural(total, 'implicit synchronisation')} at {places}"]
    for finding in sorted(syncs, key=lambda f: -f.count)[:3]:
        where = f" at {finding.location}" if finding.location else ""
        lines.append(f"{finding.count}× {finding.subject or finding.message}{where}")
    return lines


def _hazards(findings: Sequence[Finding]) -> list[str]:
    races = [finding for finding in findings if finding.kind != "implicit-sync"]
    if not races:
        return ["none recorded (gpuprobe run --hazards detects them)"]
    kinds = Counter(finding.kind for finding in races)
    lines = [", ".join(f"{count} {kind}" for kind, count in kinds.most_common())]
    for finding in races[-3:]:
        where = f" at {finding.location}" if finding.location else ""
        lines.append(f"{finding.message}{where}")
    return lines
