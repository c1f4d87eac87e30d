"""A replay as text, in 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TextIO

from gpuprobe.allocator.replays.replay import TraceReplay
from gpuprobe.allocator.replays.results import ReplayResult, TraceResult
from gpuprobe.allocator.replays.whatif import LIMITS, Advice, Outcome, Range
from gpuprobe.allocator.settings import to_conf
from gpuprobe.model.text import human_bytes, human_delta
from gpuprobe.reporters.terminal import Style

__all__ = ["render", "write"]

_MAX_TRACES = 10  # a recording of many steps: the ones that were not exact come first


def write(result: ReplayResult, stream: TextIO) -> None:
    """Write the replay to ``stream``."""
    style = Style.of(stream)
    stream.write("\n".join(render(result, style)) + "\n")


def render(result: ReplayResult, style: Style) -> Iterator[str]:
    """The lines of the replay."""
    exact = sum(t.recorded.exact for t in result.traces)
    if len(result.traces) > 1:
        yield f"{exact} of {len(result.traces)} traces replay exactly"
        yield ""
    # What was asked about, then what went wrong, then the rest.
    order = sorted(result.traces, key=lambda t: (t.baseline is None, t.recorded.exact))
    for index, trace in enumerate(order):
        if index >= _MAX_TRACES:
            yield f"and {len(order) - index} more (all of them with --json)"
            break
        if index:
            yield ""
        yield from _trace(trace, style)
    if any(t.baseline is not None for t in result.traces):
        yield ""
        yield style.heading("What a what-if leaves out")
        for limit in LIMITS:
            yield from style.wrapped(limit, first="  - ", rest="    ")


def _trace(trace: TraceResult, style: Style) -> Iterator[str]:
    recorded = trace.recorded
    step = "" if recorded.step is None else f", step {recorded.step}"
    yield style.heading(
        f"{recorded.device}{step}: {recorded.events:,} events, {recorded.allocations:,} allocations"
    )
    yield from _verdict(recorded, style)
    rows = [
        ("settings", to_conf(recorded.settings) or "torch's defaults"),
        ("peak allocated", human_bytes(recorded.peak_allocated)),
        ("peak reserved", human_bytes(recorded.peak_reserved)),
        ("reserved at the end", human_bytes(recorded.final_reserved)),
        ("cudaMalloc or map calls", f"{recorded.device_allocs:,}"),
        ("cudaFree or unmap calls", f"{recorded.device_frees:,}"),
        ("retries, out of memory", f"{recorded.retries:,}, {recorded.ooms:,}"),
    ]
    for name, value in rows:
        yield from style.wrapped(value, first=f"  {name:<24} ", rest=" " * 27)
    for note in recorded.notes:
        yield from style.wrapped(note, first="  note: ", rest="        ")
    if trace.baseline is not None:
        yield ""
        yield from _asked(trace, style)


def _verdict(recorded: TraceReplay, style: Style) -> Iterator[str]:
    divergence = recorded.first_divergence
    if divergence is None:
        yield from style.wrapped(
            "replay exact: every address, every segment and the final layout follow from the rules",
            first="  ",
            rest="  ",
        )
        return
    yield f"  replay NOT exact: differs at event {divergence.event:,} ({divergence.action})"
    yield from style.wrapped(f"the rules: {divergence.expected}", first="    ", rest="      ")
    yield from style.wrapped(f"the trace: {divergence.observed}", first="    ", rest="      ")
    yield from style.wrapped(f"why: {divergence.why}", first="    ", rest="      ")


def _asked(trace: TraceResult, style: Style) -> Iterator[str]:
    if not trace.recorded.exact:
        yield from style.wrapped(
            "UNVERIFIED: the recorded run was not reproduced, so what follows may be wrong",
            first="  ",
            rest="  ",
        )
    capacity = "unlimited"
    if trace.capacity is not None:
        capacity = f"{human_bytes(trace.capacity)} ({trace.capacity_source})"
    yield f"  capacity: {capacity}"
    baseline = trace.baseline
    if trace.what_if is not None and baseline is not None:
        yield ""
        change = trace.what_if.change or "the recorded settings"
        yield from style.wrapped(f"what if: {change}", first="  ", rest="    ")
        yield from _comparison(baseline, trace.what_if)
    if trace.advice is not None:
        yield ""
        yield from _advice(trace.advice, style)


_Row = tuple[str, Callable[[Outcome], Range], Callable[[int], str]]

_ROWS: tuple[_Row, ...] = (
    ("peak reserved", lambda o: o.peak_reserved, human_bytes),
    ("peak allocated", lambda o: o.peak_allocated, human_bytes),
    ("fragmentation at peak", lambda o: o.fragmentation, lambda ppm: f"{ppm / 10_000:.1f}%"),
    ("cudaMalloc or map calls", lambda o: o.device_allocs, lambda n: f"{n:,}"),
    ("cudaFree or unmap calls", lambda o: o.device_frees, lambda n: f"{n:,}"),
    ("retries", lambda o: o.retries, lambda n: f"{n:,}"),
)


def _comparison(baseline: Outcome, outcome: Outcome) -> Iterator[str]:
    yield f"    {'':<24} {'recorded*':>24} {'what if':>24}"
    for name, pick, show in _ROWS:
        yield f"    {name:<24} {_span(pick(baseline), show):>24} {_span(pick(outcome), show):>24}"
    yield f"    {'would run out of memory':<24} {_oom(baseline):>24} {_oom(outcome):>24}"
    if outcome.served_after_all.most:
        served = _span(outcome.served_after_all, lambda n: f"{n:,}")
        yield f"    {'recorded OOMs served':<24} {'':>24} {served:>24}"
    yield "    * the recorded settings, simulated the same way"


def _span(value: Range, show: Callable[[int], str]) -> str:
    if value.exact or show(value.least) == show(value.most):
        return show(value.least)
    return f"{show(value.least)} to {show(value.most)}"


def _oom(outcome: Outcome) -> str:
    if outcome.would_oom == 0:
        return "no"
    if outcome.would_oom == outcome.orders:
        return "yes"
    return f"in {outcome.would_oom} of {outcome.orders} orders"


def _advice(advice: Advice, style: Style) -> Iterator[str]:
    best = advice.best
    tried = f"{len(advice.tried)} settings tried"
    if best is None:
        yield from style.wrapped(
            f"nothing helps: {tried}, none lowers peak reserved by 2% and 20 MiB"
            + (" or fits the capacity" if advice.baseline.would_oom else ""),
            first="  ",
            rest="    ",
        )
    else:
        yield from style.wrapped(f"recommended: {best.change}", first="  ", rest="    ")
        gain = (
            "fits, where the recorded settings run out of memory"
            if advice.fits
            else f"peak reserved {human_delta(-advice.gain)}, in the worst order of addresses"
        )
        yield from style.wrapped(f"{gain} ({tried})", first="    ", rest="    ")
        yield from _comparison(advice.baseline, best)
    yield ""
    yield f"    {'peak reserved':>24}  {'out of memory':<16}  change"
    for outcome in sorted(advice.tried, key=lambda o: (o.would_oom, o.peak_reserved.most)):
        peak = _span(outcome.peak_reserved, human_bytes)
        yield f"    {peak:>24}  {_oom(outcome):<16}  {style.text(outcome.change)}"
