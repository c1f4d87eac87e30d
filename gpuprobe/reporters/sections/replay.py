"""A replay: whether it is exact, its figures, and the effect of other settings."""

from __future__ import annotations

from collections.abc import Callable

from gpuprobe.allocator.replay import TraceReplay
from gpuprobe.allocator.results import ReplayResult, TraceResult
from gpuprobe.allocator.settings import to_conf
from gpuprobe.allocator.whatif import LIMITS, Range, SettingsAdvice, WhatIfOutcome
from gpuprobe.model.text import human_bytes, human_delta, plural
from gpuprobe.reporters.sections.parts import (
    Column,
    Facts,
    Line,
    Part,
    Row,
    Section,
    Table,
    bulleted,
)

_MAX_TRACES = 10  # of a recording of many steps: those that are not exact first


def replay_sections(result: ReplayResult) -> list[Section]:
    """The replay of each trace, and the limits of a what-if."""
    found = []
    if len(result.traces) > 1:
        exact = sum(trace.recorded.exact for trace in result.traces)
        text = f"{exact} of {len(result.traces)} traces replay exactly"
        found.append(Section(parts=(Line(text, indent=0),)))
    # Traces with a what-if first, then those that are not exact.
    order = sorted(result.traces, key=lambda t: (t.baseline is None, t.recorded.exact))
    found += map(_trace, order[:_MAX_TRACES])
    if len(order) > _MAX_TRACES:
        text = f"and {len(order) - _MAX_TRACES} more (all of them with --json)"
        found.append(Section(parts=(Line(text, indent=0),)))
    if result.empty:
        names = "; ".join(result.empty[:_MAX_TRACES])
        more = len(result.empty) - _MAX_TRACES
        text = f"no events, so nothing to replay: {names}{f' and {more} more' if more > 0 else ''}"
        found.append(Section(parts=(Line(text, indent=0),)))
    if any(trace.baseline is not None for trace in result.traces):
        found.append(Section("What a what-if leaves out", bulleted(LIMITS)))
    return found


def _trace(trace: TraceResult) -> Section:
    recorded = trace.recorded
    step = "" if recorded.step is None else f", step {recorded.step}"
    if trace.first_step is not None:
        step = f", steps {trace.first_step} to {recorded.step} together"
    title = f"{recorded.device}{step}: {recorded.events:,} events, {recorded.allocations:,}"
    facts = (
        ("settings", to_conf(recorded.settings) or "torch's defaults"),
        ("peak allocated", human_bytes(recorded.peak_allocated)),
        ("peak reserved", human_bytes(recorded.peak_reserved)),
        ("reserved at the end", human_bytes(recorded.final_reserved)),
        ("cudaMalloc or map calls", f"{recorded.device_allocs:,}"),
        ("cudaFree or unmap calls", f"{recorded.device_frees:,}"),
        ("retries, out of memory", f"{recorded.retries:,}, {recorded.ooms:,}"),
    )
    parts: list[Part] = [*_verdict(recorded), Facts(facts)]
    parts += [Line(note, label="note") for note in recorded.notes]
    if trace.baseline is not None:
        parts += _what_if(trace, trace.baseline)
    return Section(f"{title} allocations", tuple(parts))


def _verdict(recorded: TraceReplay) -> list[Line]:
    found = recorded.first_divergence
    if found is None:
        text = "every address, every segment and the final layout are reproduced"
        return [Line(f"replay exact: {text}")]
    return [
        Line(f"replay is NOT exact: it differs at event {found.event:,} ({found.action})"),
        Line(found.expected, "item", "the rules", indent=4),
        Line(found.observed, "item", "the trace", indent=4),
        Line(found.why, "item", "why", indent=4),
    ]


def _what_if(trace: TraceResult, baseline: WhatIfOutcome) -> list[Section]:
    parts: list[Part] = []
    if not trace.recorded.exact:
        text = "the recorded run was not reproduced, so the figures below may be wrong"
        parts.append(Line(f"UNVERIFIED: {text}"))
    capacity = "unlimited"
    if trace.capacity is not None:
        capacity = f"{human_bytes(trace.capacity)} ({trace.capacity_source})"
    found = [Section(parts=(*parts, Line(f"capacity: {capacity}")))]
    if trace.what_if is not None:
        change = trace.what_if.change or "the recorded settings"
        parts_of_what_if = (Line(change, "item", "what if"), *_comparison(baseline, trace.what_if))
        found.append(Section(parts=parts_of_what_if))
    if trace.advice is not None:
        found += _advice(trace.advice)
    return found


_Row = tuple[str, Callable[[WhatIfOutcome], Range], Callable[[int], str]]

_ROWS: tuple[_Row, ...] = (
    ("peak reserved", lambda o: o.peak_reserved, human_bytes),
    ("peak allocated", lambda o: o.peak_allocated, human_bytes),
    ("unused at peak reserved", lambda o: o.fragmentation, lambda ppm: f"{ppm / 10_000:.1f}%"),
    ("cudaMalloc or map calls", lambda o: o.device_allocs, lambda n: f"{n:,}"),
    ("cudaFree or unmap calls", lambda o: o.device_frees, lambda n: f"{n:,}"),
    ("retries", lambda o: o.retries, lambda n: f"{n:,}"),
)


def _comparison(baseline: WhatIfOutcome, outcome: WhatIfOutcome) -> tuple[Part, ...]:
    rows = [
        Row((name, _span(pick(baseline), show), _span(pick(outcome), show)))
        for name, pick, show in _ROWS
    ]
    rows.append(Row(("would run out of memory", _oom(baseline), _oom(outcome))))
    if outcome.served_after_all.most:
        served = _span(outcome.served_after_all, lambda n: f"{n:,}")
        rows.append(Row(("recorded OOMs served", "", served)))
    columns = (
        Column("", 24),
        Column("recorded*", 24, gap=1, number=True),
        Column("what if", 24, gap=1, number=True),
    )
    table = Table("recorded and what if", columns, tuple(rows), indent=4)
    open_questions = (
        Line(f"not recorded, so both ways are in the ranges: {question}", indent=4)
        for question in dict.fromkeys((*baseline.undecided, *outcome.undecided))
    )
    note = Line("* the recorded settings, simulated the same way", indent=4)
    return table, note, *open_questions


def _span(value: Range, show: Callable[[int], str]) -> str:
    if show(value.least) == show(value.most):
        return show(value.least)
    return f"{show(value.least)} to {show(value.most)}"


def _oom(outcome: WhatIfOutcome) -> str:
    if outcome.would_oom == 0:
        return "no"
    if outcome.would_oom == outcome.orders:
        return "yes"
    return f"in {outcome.would_oom} of {outcome.orders} orders"


def _advice(advice: SettingsAdvice) -> list[Section]:
    best = advice.best
    tried = f"{plural(len(advice.tried), 'setting')} tried"
    parts: tuple[Part, ...]
    if best is None:
        text = f"nothing helps: {tried}, none lowers peak reserved by 2% and 20 MiB"
        parts = (
            Line(text + (" or fits the capacity" if advice.baseline.would_oom else ""), "item"),
        )
    else:
        gain = (
            "fits, where the recorded settings run out of memory"
            if advice.fits
            else f"peak reserved {human_delta(-advice.gain)}, in the worst order of addresses"
        )
        parts = (
            Line(best.change, "item", "recommended"),
            Line(f"{gain} ({tried})", indent=4),
            *_comparison(advice.baseline, best),
        )
    rows = tuple(
        Row((_span(outcome.peak_reserved, human_bytes), _oom(outcome), outcome.change))
        for outcome in sorted(advice.tried, key=lambda o: (o.would_oom, o.peak_reserved.most))
    )
    columns = (
        Column("peak reserved", 24, number=True),
        Column("out of memory", 16, gap=2),
        Column("change", 0, gap=2, cut=False),
    )
    return [
        Section(parts=parts),
        Section(parts=(Table("settings tried", columns, rows, indent=4),)),
    ]
