"""What would make a run fit that does not: changes to it, and larger GPUs.

Each change is an estimate of the changed run, in a separate process. A `Provider` has the changes
that are possible: `gpuprobe.planning.alternatives` for a user's script. They are tried in its
order, and combined if none is enough alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple

from gpuprobe.catalogue.file import all_models
from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.model.plans.estimate import Estimate, EstimatedChange, RoomyGpu
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.model.values import Bytes
from gpuprobe.planning.trials import Document
from gpuprobe.planning.verdict import need_on


class Alternative(NamedTuple):
    """A change to a run: its ``name`` in a few words, the changed ``request`` for an estimate, and
    ``how``: what to write in the program.
    """

    name: str
    request: EstimateRequest
    how: str = ""


class Skipped(NamedTuple):
    """A change that is not tried, and the reason."""

    name: str
    reason: str


Changes = Generator[Alternative | Skipped, EstimatedChange | None, None]
Provider = Callable[[EstimateRequest], "Changes | Iterable[Alternative | Skipped]"]
"""The changes of a request, the easiest to adopt first. If it is a generator, ``yield`` returns the
estimate of the alternative, and None for a skipped one: it may end a series of changes at the first
one that fits.
"""


class Suggested(NamedTuple):
    """See `Estimate.suggestions`."""

    changes: tuple[EstimatedChange, ...]
    not_tried: tuple[str, ...]
    gpus: tuple[RoomyGpu, ...]

    def added_to(self, found: Estimate) -> Estimate:
        return replace(
            found,
            suggestions=self.changes,
            not_tried=self.not_tried,
            smallest_gpus=self.gpus,
        )


class _Trials:
    """The estimates of changes, until ``limit`` seconds have passed."""

    def __init__(
        self,
        estimate: Callable[[EstimateRequest], Document],
        notify: Callable[[str], None],
        limit: float,
        clock: Callable[[], float],
    ) -> None:
        self._estimate = estimate
        self._notify = notify
        self._clock = clock
        self._start = clock()
        self._limit = limit
        self.tried: list[tuple[Alternative, EstimatedChange]] = []

    @property
    def is_over(self) -> bool:
        return self._clock() - self._start >= self._limit

    def document(self, request: EstimateRequest) -> Document:
        return self._estimate(request)

    def run(self, change: Alternative) -> EstimatedChange:
        passed = self._clock() - self._start
        self._notify(f"trying {change.name} ({len(self.tried)} tried, {passed:.0f} s)")
        found = changed(change, self._estimate(change.request))
        self.tried.append((change, found))
        return found


def changed(change: Alternative, document: Document) -> EstimatedChange:
    """The result of an alternative's estimate."""
    failure = document.get("error") or document.get("too_large")
    if failure:
        return EstimatedChange(change.name, change.how, "", Bytes(0), failure)
    needed = Bytes(document["total"]["at_most"])
    return EstimatedChange(change.name, change.how, document["verdict"], needed)


MOST_SECONDS: Final = 60.0
"""For all estimates of changes, by default. The one that has begun is finished."""


def suggest(
    found: Estimate,
    request: EstimateRequest,
    provider: Provider,
    estimate: Callable[[EstimateRequest], Document],
    *,
    limit: float = MOST_SECONDS,
    notify: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> Suggested:
    """Estimate what would make the run of ``request`` fit, whose estimate is ``found``.

    ``estimate`` makes a requested estimate. After ``limit`` seconds no other is started. Ctrl-C
    ends the trials; the result has those that were made.
    """
    trials = _Trials(estimate, notify, limit, clock)
    not_tried: list[str] = []
    gpus: tuple[RoomyGpu, ...] = ()
    try:
        gpus = _smallest_gpus(found, request, trials)
        _try_each(provider(request), trials, not_tried)
        _try_together(found, request, trials)
    except KeyboardInterrupt:
        not_tried.append("other changes: interrupted")
    failed = [one for _, one in trials.tried if one.failed]
    not_tried += [f"{one.name}: {one.failed}" for one in failed]
    changes = sorted(
        (one for _, one in trials.tried if not one.failed), key=lambda one: not one.fits
    )
    return Suggested(tuple(changes), tuple(not_tried), gpus)


def _try_each(
    changes: Changes | Iterable[Alternative | Skipped], trials: _Trials, not_tried: list[str]
) -> None:
    """Try the provider's changes in its order."""
    iterator = iter(changes)
    result: EstimatedChange | None = None
    began = False
    while True:
        try:
            if began and isinstance(iterator, Generator):
                change = iterator.send(result)
            else:
                change = next(iterator)
        except StopIteration:
            return
        began, result = True, None
        if isinstance(change, Skipped):
            not_tried.append(f"{change.name}: {change.reason}")
        elif trials.is_over:
            not_tried.append(f"{change.name}: the time for suggestions was over")
        else:
            result = trials.run(change)


def _try_together(found: Estimate, request: EstimateRequest, trials: _Trials) -> None:
    """If no change is enough alone, try those together that save memory: the first two, then with
    the third, and so on.
    """
    singles = [(change, one) for change, one in trials.tried if not one.failed]
    if any(one.fits for _, one in singles):
        return
    useful = [change for change, one in singles if one.needed < found.total_high]
    together = useful[:1]
    for change in useful[1:]:
        combined = _combined(request, [*together, change])
        if combined is None:
            continue
        if trials.is_over:
            return
        together.append(change)
        if trials.run(combined).fits:
            return


_JOINED: Final = {"change": "+", "conf": ","}
"""Fields of a request whose values can be combined, with the separator."""


def _combined(request: EstimateRequest, changes: Sequence[Alternative]) -> Alternative | None:
    """Several changes as one; None if two of them set the same field to different values."""
    merged: dict[str, Any] = {}
    for change in changes:
        for key in (field.name for field in fields(EstimateRequest)):
            value, before = getattr(change.request, key), getattr(request, key)
            if value == before:
                continue
            if key not in merged:
                merged[key] = value
            elif key in _JOINED:
                added = str(value).removeprefix(str(before or "")).lstrip(_JOINED[key])
                merged[key] = f"{merged[key]}{_JOINED[key]}{added}"
            elif merged[key] != value:
                return None
    names = [change.name for change in changes]
    return Alternative(
        f"{', '.join(names[:-1])} and {names[-1]}",
        replace(request, **merged),
        "; ".join(change.how for change in changes if change.how),
    )


# -- GPUs

_MOST_GPUS: Final = 4
_MOST_ESTIMATES: Final = 2  # on GPUs that might not hold it after all


def _smallest_gpus(
    found: Estimate, request: EstimateRequest, trials: _Trials
) -> tuple[RoomyGpu, ...]:
    """The smallest GPUs that hold the run, by its measured need; the smallest one by an estimate
    there. Empty for a process with GPUs of several kinds.
    """
    kinds = {model.name for model in parse_spec(request.gpu)}
    if len(kinds) > 1:
        return ()
    several = f"{found.devices}x" if found.devices > 1 else ""
    models = sorted(all_models(), key=lambda model: (model.total_memory, model.name))
    rows: list[RoomyGpu] = []
    estimates = 0
    for model in models:
        name, needed = f"{several}{model.name}", need_on(found, model)
        if len(rows) == _MOST_GPUS or needed > model.total_memory:
            continue
        row = RoomyGpu(name, Bytes(model.total_memory), Bytes(needed))
        if not rows and estimates < _MOST_ESTIMATES:
            estimates += 1
            other = Alternative(name, replace(request, gpu=name))
            there = changed(other, trials.document(other.request))
            if not there.fits:
                continue
            row = replace(row, needed=there.needed, estimated=True)
        rows.append(row)
    return tuple(rows)
