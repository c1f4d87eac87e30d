"""A trace in the Chrome trace event format, for ui.perfetto.dev and chrome://tracing.

The format: "Trace Event Format" by the Chromium project (phases C counter, b/e async slice,
X complete slice, i instant, M metadata; times in microseconds). It is written event by event,
so that the document is never in memory as a whole. Per device: counters of allocated, active
and reserved bytes; one async slice per large allocation; phases and annotations as slices; an
instant for each out-of-memory event. Times count from the first event; in a trace
without times the number of the event is used, which the process name states.

Operations with other ranks are slices in a thread for each group. Flows lead from the last rank to
arrive to each rank that waited for it.

Steps with counted launches are slices in a process for each rank, with the most frequent kernels; a
counter has the launches of each phase from its first start on. Single launches have no times,
except those of one step, whose predicted course is a process with a thread for the host and each
stream.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import IO, NamedTuple

from gpuprobe.analysis.trace.categories import categories
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.analysis.trace.timeline import thin, timeline
from gpuprobe.model.actions import OOM
from gpuprobe.model.memory import Category
from gpuprobe.model.run.communication import CollectiveRecord
from gpuprobe.model.run.launches import StepLaunches, rows_of
from gpuprobe.model.run.session import Step
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time.predict import TimelineSpan
from gpuprobe.user_frames import Lines

LARGE = 1024 * 1024
"""Allocations of at least this many bytes have slices."""

POINTS = 50_000
"""The most points per counter; extremes are kept (`analysis.timeline.thin`)."""

Event = dict[str, object]


def write(traces: Iterable[MemoryTrace], stream: IO[str], *, large: int = LARGE) -> None:
    """Write the JSON document to a text stream, event by event."""
    write_ranks(((None, trace) for trace in traces), stream, large=large)


class RankCommunication(NamedTuple):
    """The operations of a rank, and the start of its session: microseconds since the Unix epoch."""

    rank: int
    started_us: int
    records: Sequence[CollectiveRecord]


class RankLaunches(NamedTuple):
    """The steps of a rank with counted launches, and the start of its session: microseconds since
    the Unix epoch.
    """

    rank: int
    started_us: int
    steps: Sequence[tuple[Step, StepLaunches]]


class PredictedStep(NamedTuple):
    """The predicted course of one step of a rank."""

    rank: int
    gpu: str
    spans: Sequence[TimelineSpan]


MOST_KERNELS = 20
"""The most kernels that a step's slice lists."""


def write_ranks(
    traces: Iterable[tuple[int | None, MemoryTrace]],
    stream: IO[str],
    *,
    large: int = LARGE,
    communication: Sequence[RankCommunication] = (),
    launches: Sequence[RankLaunches] = (),
    predicted: Sequence[PredictedStep] = (),
) -> None:
    """`write` for several ranks. ``traces``: with the numbers of their ranks, grouped by rank; each
    device of each rank is a process. Times count from the first event of the first rank, by each
    machine's clock. ``communication`` and ``launches``: those of all ranks; ``predicted``: a step
    of each, which begins at time 0.
    """
    stream.write('{"displayTimeUnit":"ms","traceEvents":[')
    separator = "\n"
    events = _events(traces, large=large, communication=communication, launches=launches)
    for event in chain(events, _predicted(predicted)):
        stream.write(separator)
        stream.write(json.dumps(event, separators=(",", ":")))
        separator = ",\n"
    stream.write("\n]}\n")


def _events(
    traces: Iterable[tuple[int | None, MemoryTrace]],
    *,
    large: int = LARGE,
    communication: Sequence[RankCommunication] = (),
    launches: Sequence[RankLaunches] = (),
) -> Iterator[Event]:
    pids: dict[tuple[int | None, str], int] = {}
    origin: int | None = None
    shift = 0  # a trace without times starts after the one before it
    before: int | None = None
    for part, (rank, trace) in enumerate(traces):
        if rank != before:
            before, shift = rank, 0
        key = (rank, trace.device)
        pid = pids.get(key)
        times = trace.events.column("time_us")
        timed = len(times) > 0 and any(times)
        if pid is None:
            pid = pids[key] = len(pids) + 1
            note = "" if timed else " (no times: 1 µs is one event)"
            owner = "" if rank is None else f"rank {rank}: "
            yield _metadata(pid, 0, "process_name", f"{owner}memory of {trace.device}{note}")
            yield _metadata(pid, 1, "thread_name", "phases")
            yield _metadata(pid, 2, "thread_name", "annotations")
        if timed:
            if origin is None:
                origin = min(times)
            clock: Sequence[int] = [time - origin for time in times]
        else:
            clock = range(shift, shift + len(trace.events))
            shift += len(trace.events)
        yield from _device(trace, ledger_of(trace), pid, part, clock, large)
        if timed:
            yield from _annotations(trace, pid, origin or 0)
    yield from _communication(communication, origin, len(pids))
    yield from _launches(launches, origin, len(pids) + len(communication))


def _launches(ranks: Sequence[RankLaunches], origin: int | None, pids: int) -> Iterator[Event]:
    """A process for each rank."""
    for pid, one in enumerate(ranks, pids + 1):
        yield _metadata(pid, 0, "process_name", f"rank {one.rank}: launches")
        yield _metadata(pid, 1, "thread_name", "steps")
        zero = one.started_us if origin is None else origin
        for step, launches in one.steps:
            began = one.started_us + step.start_ns // 1000 - zero
            kernels: Counter[str] = Counter()
            phases: Counter[str] = Counter()
            for kernel, place, count in rows_of(launches):
                if not kernel.captured:
                    kernels[kernel.name] += count
                    phases[place.phase] += count
            yield {
                "ph": "X", "pid": pid, "tid": 1, "ts": began, "dur": step.duration_ns // 1000,
                "name": f"step {step.index}: {kernels.total():,} launches", "cat": "launches",
                "args": {
                    "phases": dict(phases), "kernels": dict(kernels.most_common(MOST_KERNELS)),
                },
            }  # fmt: skip
            # Phases of one path are one phase: their launches count from its first start.
            for phase in sorted(step.phases, key=lambda phase: phase.start_ns):
                if phases[phase.path]:
                    yield {
                        "ph": "C", "pid": pid, "name": "launches by phase",
                        "ts": one.started_us + phase.start_ns // 1000 - zero,
                        "args": {"launches": phases[phase.path]},
                    }  # fmt: skip
            yield {
                "ph": "C", "pid": pid, "ts": began + step.duration_ns // 1000,
                "name": "launches by phase", "args": {"launches": 0},
            }  # fmt: skip


_FIRST_PREDICTED = 1_000_000  # process numbers that no device of a recording has


def _predicted(steps: Sequence[PredictedStep]) -> Iterator[Event]:
    """A process for each rank, with a thread for the host and each stream."""
    for pid, one in enumerate(steps, _FIRST_PREDICTED):
        yield _metadata(
            pid, 0, "process_name", f"rank {one.rank}: predicted step on {one.gpu}, not measured"
        )
        threads: dict[str, int] = {}
        for span in one.spans:
            if span.track not in threads:
                threads[span.track] = len(threads) + 1
                yield _metadata(pid, threads[span.track], "thread_name", span.track)
            args: Event = {}
            if span.place is not None:
                args = {
                    "place": span.place.place, "module": span.place.module,
                    "phase": span.place.phase,
                }  # fmt: skip
            if span.work is not None:
                args |= {
                    "kind": span.work.kind.value, "dtype": span.work.dtype,
                    "sizes": list(span.work.sizes), "flops": span.work.flops,
                    "bytes": span.work.read + span.work.written,
                }  # fmt: skip
            yield {
                "ph": "X", "pid": pid, "tid": threads[span.track], "name": span.name,
                "cat": "predicted", "ts": span.start_ns / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000, "args": args,
            }  # fmt: skip


def _communication(
    ranks: Sequence[RankCommunication], origin: int | None, pids: int
) -> Iterator[Event]:
    """A process for each rank, with a thread for each of its groups."""
    arrived = [
        one.started_us + record.arrival_ns // 1000
        for one in ranks
        for record in one.records
        if isinstance(record.arrival_ns, int)
    ]
    if not arrived:
        return
    zero = min(arrived) if origin is None else origin
    # For each operation of several ranks: the arrival of each rank, and its thread.
    met: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {}
    for pid, one in enumerate(ranks, pids + 1):
        yield _metadata(pid, 0, "process_name", f"rank {one.rank}: communication")
        threads: dict[str, int] = {}
        for record in one.records:
            if not isinstance(record.arrival_ns, int):
                continue
            name = f"{record.axis or 'group'} {record.members or record.group}"
            if name not in threads:
                threads[name] = len(threads) + 1
                yield _metadata(pid, threads[name], "thread_name", name)
            tid = threads[name]
            start = one.started_us + record.arrival_ns // 1000 - zero
            spent = 0
            if isinstance(record.completion_ns, int):
                spent = max(0, record.completion_ns - record.arrival_ns) // 1000
            yield {
                "ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": spent,
                "name": record.op, "cat": "communication",
                "args": {
                    "payload": record.payload, "wire": record.wire, "dtype": record.dtype,
                    "sequence": record.sequence, "place": str(record.place),
                    "module": record.module,
                },
            }  # fmt: skip
            if record.op not in ("send", "recv"):
                key = (record.members or record.group, record.sequence)
                met.setdefault(key, []).append((start, pid, tid, spent))
    for number, meeting in enumerate(met.values(), 1):
        if len(meeting) > 1:
            yield from _flow(number, sorted(meeting))


def _flow(number: int, meeting: Sequence[tuple[int, int, int, int]]) -> Iterator[Event]:
    """Flows from the last rank to arrive to each of the others."""
    *others, (start, pid, tid, _) = meeting
    for other, (began, other_pid, other_tid, spent) in enumerate(others):
        common = {"cat": "communication", "name": "last to call", "id": f"{number}.{other}"}
        yield {"ph": "s", "pid": pid, "tid": tid, "ts": start, **common}
        end = max(start, began + spent)
        yield {"ph": "f", "bp": "e", "pid": other_pid, "tid": other_tid, "ts": end, **common}


def _metadata(pid: int, tid: int, name: str, text: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": {"name": text}}


def _device(
    trace: MemoryTrace, ledger: Ledger, pid: int, part: int, clock: Sequence[int], large: int
) -> Iterator[Event]:
    line = thin(timeline(ledger), POINTS)
    reserved = None if isinstance(line.reserved, Unavailable) else line.reserved
    for i, event in enumerate(line.event):
        held = {"allocated": line.allocated[i], "pending": line.active[i] - line.allocated[i]}
        when = clock[max(event, 0)] if clock else 0
        yield {"ph": "C", "pid": pid, "ts": when, "name": "bytes in use", "args": held}
        if reserved is not None:
            args = {"reserved": reserved[i]}
            yield {"ph": "C", "pid": pid, "ts": when, "name": "bytes reserved", "args": args}
    yield from _phases(trace, pid, clock)
    yield from _slices(trace, ledger, pid, part, clock, large)
    sizes, free = trace.events.size, trace.events.column("device_free")
    for i, action in enumerate(trace.events.action):
        if action == OOM:
            yield {
                "ph": "i", "s": "p", "pid": pid, "tid": 1, "ts": clock[i],
                "name": "out of memory",
                "args": {"asked": sizes[i], "free_on_device": free[i]},
            }  # fmt: skip


def _phases(trace: MemoryTrace, pid: int, clock: Sequence[int]) -> Iterator[Event]:
    strings = trace.stacks.strings
    start = 0
    for phase, run in groupby(trace.events.column("phase")):
        end = start + sum(1 for _ in run)
        if phase:
            yield {
                "ph": "X", "pid": pid, "tid": 1, "name": strings[phase], "cat": "phase",
                "ts": clock[start], "dur": clock[end - 1] - clock[start],
            }  # fmt: skip
        start = end


def _slices(
    trace: MemoryTrace, ledger: Ledger, pid: int, part: int, clock: Sequence[int], large: int
) -> Iterator[Event]:
    lines = Lines(trace.stacks)
    last = clock[-1] if clock else 0
    first = clock[0] if clock else 0
    strings = trace.stacks.strings
    rows = [
        row
        for row, (size, freed) in enumerate(zip(ledger.size, ledger.freed, strict=True))
        if size >= large and freed >= 0
    ]
    described = zip(
        rows,
        categories(ledger, rows),
        ledger.values("module", rows),
        ledger.values("address", rows),
        strict=True,
    )
    for row, category, module, address in described:
        start, freed, stack = ledger.start[row], ledger.freed[row], ledger.stack[row]
        size, requested = ledger.size[row], ledger.requested[row]
        common = {
            "cat": "allocation",
            "id": f"{part}.{row}",
            "pid": pid,
            "name": lines.line(stack, before=start < 0),
        }
        args = {
            "bytes": size,
            "requested": requested,
            "address": hex(address),
            "category": Category.from_code(category).value,
        }
        if module:
            args["module"] = strings[module]
        yield {"ph": "b", "ts": clock[start] if start >= 0 else first, **common, "args": args}
        yield {"ph": "e", "ts": clock[freed] if freed < len(clock) else last, **common}


def _annotations(trace: MemoryTrace, pid: int, origin: int) -> Iterator[Event]:
    for note in trace.annotations:
        kind = {"START": "B", "END": "E"}.get(note.stage)
        if kind is not None:
            yield {
                "ph": kind, "pid": pid, "tid": 2, "ts": note.time_us - origin,
                "name": note.name, "cat": "annotation",
            }  # fmt: skip
