"""Looking for stream hazards: `detect_hazards` around code."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gpuprobe.errors import MissingExtra, UsageError
from gpuprobe.gate.files import ensure_replaceable, read_known, write_known
from gpuprobe.hazards.known import compare as compare_known

if TYPE_CHECKING:
    from gpuprobe.hazard_watch.source import EventSource
    from gpuprobe.hazards.known import KnownFinding as KnownFinding
    from gpuprobe.hazards.results import Hazards as Hazards
    from gpuprobe.model.findings import Finding

__all__ = [
    "allow_sync",
    "compare_known",
    "declare_access",
    "detect_hazards",
    "ensure_replaceable",
    "read_known",
    "write_known",
]

DEFAULT_GPU = "h100-80gb"
_cuda_feed: EventSource | None = None  # of the watch on real CUDA that is under way
_ALLOW_COMMENT = "gpuprobe: allow"

_COVERAGE = (
    "kernels outside torch's dispatcher (Triton, custom extensions, NCCL): name what they touch "
    "with gpuprobe.declare_access",
    "threads of the host are taken to be ordered as Python ran them",
)


@contextmanager
def detect_hazards(gpu: str | None = None) -> Iterator[Hazards]:
    """Watch for races between CUDA streams, and for implicit synchronisations.

    ::

        with gpuprobe.detect_hazards() as h:
            train_step()
        for finding in h.findings:
            print(finding.kind, finding.message, finding.location)

    The code runs on the virtual GPU that is in use; else on CUDA where torch has a device; else,
    or if ``gpu`` names one from the catalogue, a virtual GPU is entered by itself (``h100-80gb``
    if none is named). Order is judged, not timing, so a race is found whether or not it bites.
    Findings are there when the context ends; nothing is aborted. On CUDA torch's trace hooks are
    used: their callbacks are taken away afterwards, the (cheap) trace itself stays on.

    Raises MissingExtra without torch, UsageError inside another one.
    """
    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch", why="hazards are looked for in torch's operators")
    from gpuprobe.hazard_watch.source import EventSource
    from gpuprobe.hazards.results import Hazards
    from gpuprobe.patching import Patches
    from gpuprobe.virtual.session import current, virtual_gpu

    found = Hazards()
    with ExitStack() as stack:
        session = current()
        if session is None and gpu is None and _has_cuda():
            yield from _on_cuda(found)
            return
        if session is None:
            session = stack.enter_context(virtual_gpu(gpu or DEFAULT_GPU))
        machine = session.machine
        if machine.observer is not None:
            raise UsageError("hazards are being looked for already", hint="leave that one first")
        patches = Patches()
        feed = EventSource(machine)
        machine.observer = feed
        feed.install(patches)
        try:
            yield found
        finally:
            machine.observer = None
            patches.undo()
            _fill(found, feed)


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _on_cuda(found: Hazards) -> Iterator[Hazards]:
    """The same engine, fed by torch's own reports."""
    global _cuda_feed
    from gpuprobe.hazard_watch.cuda import CudaSource
    from gpuprobe.patching import Patches

    if _cuda_feed is not None:
        raise UsageError("hazards are being looked for already", hint="leave that one first")
    patches = Patches()
    feed = _cuda_feed = CudaSource()
    try:
        feed.install(patches)
        yield found
    finally:
        _cuda_feed = None
        patches.undo()
        feed.guarded(feed.drain)
        _fill(found, feed)
        if feed.broken:
            found.coverage.append(f"everything after gpuprobe's own failure: {feed.broken}")


def _fill(found: Hazards, feed: EventSource) -> None:
    """Put what the engine saw into words."""
    from gpuprobe.hazard_watch.source import place
    from gpuprobe.hazards.explain import finding
    from gpuprobe.hazards.ledger import REPLACEMENTS
    from gpuprobe.hazards.results import SyncRow

    engine = feed.engine
    found.operations = engine.operations
    for judge in (engine, *feed.captures):
        for race in judge.races:
            item = finding(judge, race, place)
            if not _allowed(item.location):
                found.findings.append(item)
    seen = set()
    for sync in engine.self_waits:
        if sync.site in seen or engine.names[sync.waiter][1] == 0:
            continue  # waiting for the default stream on itself is what single-stream code does
        seen.add(sync.site)
        found.self_waits.append(place(sync.site))
    for entry in feed.ledger.entries.values():
        location = place(entry.site)
        allowed = entry.allowed or _allowed(location)
        replacement = REPLACEMENTS.get(entry.reason, "")
        found.syncs.append(
            SyncRow(entry.reason, location, entry.count, entry.seconds, allowed, replacement)
        )
        if not allowed:
            found.findings.append(_sync_finding(entry.reason, entry.count, location))
    found.redundant = [(place(site), count) for site, count in engine.redundant.items()]
    found.coverage.extend(_COVERAGE)
    if engine.unknown_events:
        found.coverage.append(
            f"{engine.unknown_events} waits for events that were not recorded while watching"
        )
    if feed.arrays:
        found.coverage.append(
            "what C code does with NumPy arrays over pinned memory (readinto, memoryview, random "
            "numbers written into one)"
        )
    if feed.unseen_graphs:
        found.coverage.append(
            f"{feed.unseen_graphs} replays of CUDA graphs that were captured before watching began"
        )
    if feed.earlier:
        found.coverage.append("what was queued before watching began: a race with it is not found")
    if feed.processes.sent:
        found.coverage.append(
            f"what other processes do with {feed.processes.sent} tensors that were sent to them"
        )
    found.coverage.extend(
        f"{name}: given to torch.compile. It runs eagerly here, so that each of its operators is "
        "judged; what its compiled code does by itself is not"
        for name in getattr(feed.machine, "compiled", ())
    )
    found.coverage.extend(feed.machine.assumed)


def _sync_finding(reason: str, count: int, location: Any) -> Finding:
    """One line of the sync ledger as a finding."""
    from gpuprobe.hazards import rules
    from gpuprobe.hazards.explain import source_of
    from gpuprobe.hazards.known import fingerprint
    from gpuprobe.hazards.ledger import REPLACEMENTS
    from gpuprobe.model.findings import Finding, Fix

    rule = rules.IMPLICIT_SYNC
    times = "" if count == 1 else f" ({count} times)"
    return Finding(
        rule=rule.id,
        kind=rule.kind,
        level=rule.level,
        message=f"{rule.title}: {reason}{times}",
        location=location,
        fix=Fix(REPLACEMENTS.get(reason, "") or rule.remedy),
        count=count,
        subject=reason,
        fingerprint=fingerprint(rule.id, rule.kind, reason, [source_of(location)]),
    )


class FindingsSoFar:
    """What the watch under way has found, for those who follow a recording. A race is told
    once; whether its fix helps is found out at the end, when each is told again. A line that
    waits for the GPU is told at once, and again each time its count has grown by a tenth.
    """

    def __init__(self) -> None:
        self._feed = _feed()
        self._told: dict[int, int] = {}  # id of an engine -> how many of its races were told
        self._counted: dict[Any, int] = {}  # line of the ledger -> the count that was told

    def news(self) -> list[Finding]:
        """What there is to tell since the last call. From any thread."""
        return [*self._races(), *self._syncs()]

    def _syncs(self) -> Iterator[Finding]:
        from gpuprobe.hazard_watch.source import place

        entries = {} if self._feed is None else self._feed.ledger.entries
        for key, entry in tuple(entries.items()):
            count, told = entry.count, self._counted.get(key, 0)
            if 10 * count < 11 * told or count == told:
                continue
            self._counted[key] = count
            location = place(entry.site)
            if not entry.allowed and not _allowed(location):
                yield _sync_finding(entry.reason, count, location)

    def _races(self) -> list[Finding]:
        from gpuprobe.hazard_watch.source import place
        from gpuprobe.hazards.explain import finding

        feed = self._feed
        found: list[Finding] = []
        for judge in () if feed is None else (feed.engine, *feed.captures):
            races = judge.races[self._told.get(id(judge), 0) :]
            self._told[id(judge)] = self._told.get(id(judge), 0) + len(races)
            for race in races:
                item = finding(judge, race, place, verify=False)
                if not _allowed(item.location):
                    evidence = tuple(pair for pair in item.evidence if pair[0] != "fix verified")
                    found.append(replace(item, evidence=evidence))
        return found


def _allowed(location: Any) -> bool:
    """Whether the source line says ``# gpuprobe: allow``."""
    if location is None:
        return False
    return _ALLOW_COMMENT in linecache.getline(location.file, location.line)


@contextmanager
def allow_sync(reason: str = "") -> Iterator[None]:
    """Implicit synchronisations in this context are intended: they are counted, not reported.

    ``reason`` is for those who read the code. Does nothing where no hazards are looked for.
    """
    feed = _feed()
    if feed is None:
        yield
        return
    feed.allowed += 1
    try:
        yield
    finally:
        feed.allowed -= 1


def declare_access(reads: Any = (), writes: Any = (), stream: Any = None) -> None:
    """Say what a kernel that torch does not see reads and writes, where it is launched.

    ``reads`` and ``writes`` are tensors or lists of them, ``stream`` a ``torch.cuda.Stream``
    (None: the current one). Does nothing where no hazards are looked for.
    """
    feed = _feed()
    if feed is not None:
        feed.declared(reads, writes, stream)


def _feed() -> EventSource | None:
    import sys

    module = sys.modules.get("gpuprobe.virtual.session")
    session = module.current() if module is not None else None
    return _cuda_feed if session is None else session.machine.observer
