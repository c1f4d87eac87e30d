"""The largest value of an argument with which a script fits on a GPU.

Each figure is an estimate of a changed run, in a separate process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

from gpuprobe.catalogue.gpus import alternatives, parse_spec
from gpuprobe.errors import DataError, ProgramFailed, UsageError
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.plans.assumptions import Assumptions
from gpuprobe.model.plans.fit import Fit, FitChoice, FitSuggestion, Trial
from gpuprobe.model.plans.request import EstimateRequest, PriceList
from gpuprobe.model.plans.step_time import StepTime, cost_of, speed_fields
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import Bytes, ReadStatus, Unavailable
from gpuprobe.planning.alternatives import (
    ACCUMULATE,
    BF16,
    CHECKPOINT,
    EIGHT_BIT,
    EXPANDABLE,
    FUSED,
    OFFLOAD,
    Change,
    expandable_already,
    no_eight_bit,
    with_expandable,
)
from gpuprobe.planning.estimates import SUFFICIENT, estimate, require_torch
from gpuprobe.planning.program import parameter_source
from gpuprobe.planning.trials import TOO_SLOW, Document, EstimateServer, failure
from gpuprobe.planning.verdict import usual_room


def _label(case: EstimateRequest) -> str:
    return case.gpu if case.ranks == 1 else f"{case.gpu}, {case.ranks} ranks"


def fit_program(
    request: EstimateRequest,
    argument: str,
    *,
    ranks: Sequence[int] = (),
    least: int = 1,
    most: int = 65536,
    max_seconds: float = 600.0,
    notify: Callable[[str], None] = lambda text: None,
) -> Fit:
    """Search for the largest value of ``argument`` with which the requested script fits.

    The search starts at the script's value and covers ``least`` to ``most``: it rises until a
    value does not fit, or halves until one does, then bisects. With ``compute="auto"`` the first
    value is estimated as `estimate_program` does, the others without large values if no line has
    decided by one. ``request.suggest`` also estimates changes to the run.
    ``request.gpu`` may name several GPUs, separated by commas, or ``"all"`` of the catalogue (then
    changes are not estimated), and ``ranks`` several numbers, by default that of the request: the
    result is that of the combination in which most fits on all ranks (`Fit.choices`). ``notify``
    gets a line about every estimate. Ctrl-C or ``max_seconds`` end the search: the result has the
    values tried so far, and is ``interrupted`` or ``out_of_time``. Raises what `estimate_program`
    of `gpuprobe.planning.estimates` raises.
    """
    require_torch()
    deadline = Deadline(max_seconds)
    check_bounds(least, most)
    of_all, suggest = request.gpu.strip() == "all", request.suggest
    gpus = alternatives(request.gpu)  # an unknown name is an error before anything runs
    request.prices.check(gpus)
    parameter = parameter_source(request.script, argument, request.arguments)
    Assumptions(request.assume)  # as is an invalid assumption
    request = replace(request, parameter=parameter, suggest=False)
    cases = [
        replace(request, gpu=name, ranks=count)
        for name in gpus
        for count in ranks or (request.ranks,)
    ]
    several = len(cases) > 1 or bool(request.prices.by_gpu)
    with EstimateServer() as estimate:
        searches: list[_CaseSearch] = []
        start = parameter.value
        for case in cases:
            label = _label(case) if len(cases) > 1 else ""
            runner = _Runner(estimate.within, argument, notify, label, deadline)
            alike = searches[-1].without_effect if searches else ()
            if alike:  # nor have they on another GPU
                most = searches[-1].largest
            one = _CaseSearch(runner, case, least, most, alike)
            guess = most if alike else _guess(searches, case)
            searches.append(one)
            one.search(start if guess is None else guess, near=guess is not None)
            start = one.largest or start
            if one.stopped:
                break
        left_out = [f"{_label(case)}: {searches[-1].stopped}" for case in cases[len(searches) :]]
        errors = [one.error for one in searches if one.error is not None]
        if len(errors) == len(searches):
            raise errors[0]
        best = max(searches, key=lambda one: (one.choice().total, not one.failed))
        suggestions: list[FitSuggestion] = []
        stopped = next(filter(None, (one.stopped for one in searches)), "")
        if of_all and suggest:
            left_out.append("changes to the run: with --gpu all; --gpu GPU tries them")
        elif suggest and stopped:
            left_out.append(f"changes to the run: {stopped}")
        elif suggest:
            result = best.result()
            at = result.proof or result.trials[0]
            try:
                _suggest(best.runner, best.case, at, most, suggestions, left_out)
            except (KeyboardInterrupt, OutOfTime) as end:
                left_out.append(f"other changes to the run: {_reason(end)}")
        return best.result(
            suggestions=tuple(suggestions),
            not_tried=tuple(left_out),
            interrupted=stopped == _INTERRUPTED,
            out_of_time=bool(stopped) and stopped != _INTERRUPTED,
            choices=tuple(one.choice() for one in searches) if several else (),
        )


def fit(
    build: Callable[[int], Callable[[], Any]],
    gpu: str = "h100-80gb",
    *,
    least: int = 1,
    most: int = 65536,
    steps: int = 3,
    compute: str = "auto",
    conf: str | None = None,
    assume: Sequence[str] = (),
) -> Fit:
    """Like ``gpuprobe fit``, for a function: ``build(value)`` builds a model for that value on the
    device and returns the function for one step (see `estimate`). Runs in this process, without
    suggestions. Raises what `estimate` raises at ``least``.
    """
    check_bounds(least, most)
    of_gpu: dict[str, Any] = {}

    def trial(value: int) -> Trial:
        found = estimate(
            lambda: build(value),
            gpu,
            steps=steps,
            compute=compute,
            conf=conf,
            assume=assume,
        )
        of_gpu.update(gpu=found.gpu, capacity=found.capacity)
        return Trial(
            value,
            found.verdict,
            found.peak_allocated,
            Bytes(found.total_high),
            found.capacity,
            time=found.step_time,
            no_kernels=found.no_kernels,
        )

    tried = search(trial, least, most)
    return fit_of(
        tried,
        **of_gpu,
        argument="value",
        applied="as build(value)",
        compute=compute,
        least=least,
        most=most,
        suggestions=(),
        not_tried=("changes to the run: `gpuprobe fit` tries them on scripts",),
    )


_INTERRUPTED: Final = "interrupted"


Estimating = Callable[[EstimateRequest, float], "Document | None"]
"""Makes the requested estimate within seconds, as `EstimateServer.within`."""


class OutOfTime(Exception):
    """The time of a search is over."""


def _reason(end: BaseException) -> str:
    return _INTERRUPTED if isinstance(end, KeyboardInterrupt) else str(end)


class Deadline:
    """The end of the time that a search may take, and how long its estimates take."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._start = clock()
        self._last: list[float] = []

    @property
    def left(self) -> float:
        """Seconds that remain."""
        return self._start + self.seconds - self._clock()

    def run(self, estimate: Estimating, request: EstimateRequest) -> Document:
        """The document of one estimate. Raises OutOfTime if the time is over before it ends."""
        if self.left > 0:
            start = self._clock()
            document = estimate(request, self.left)
            self._last = [*self._last[-2:], self._clock() - start]
            if document is not None:
                return document
        raise OutOfTime(f"the limit of {self.seconds:.0f} s was reached (--max-seconds)")

    def remaining(self, estimates: int) -> str:
        """About how long so many estimates take, as text; "" if none is known."""
        if not self._last or not estimates:
            return ""
        seconds = estimates * sum(self._last) / len(self._last)
        seconds = min(seconds, max(0.0, self.left))
        return (
            f"about {seconds:.0f} s left" if seconds < 120 else f"about {seconds / 60:.0f} min left"
        )


class _CaseSearch:
    """The search for the largest value of one case, and its trials."""

    def __init__(
        self,
        runner: _Runner,
        case: EstimateRequest,
        least: int,
        most: int,
        without_effect: tuple[int, ...] = (),
    ) -> None:
        self.runner = runner
        self._without_effect = without_effect
        self.case = case
        self.error: ProgramFailed | DataError | None = None
        self.stopped = ""
        """Why the search ended before its result was known."""
        self._bounds = least, most
        self._tried: dict[int, Trial] = {}
        self._gpu: dict[str, Any] = {}

    def search(self, start: int, *, near: bool = False) -> None:
        """Search from ``start``, or from the least value if the program fails with ``start``.
        ``near``: the largest value is expected to be close to that.
        """
        try:
            self._search(start, near)
        except (KeyboardInterrupt, OutOfTime) as end:
            if not self._tried:
                if isinstance(end, KeyboardInterrupt):
                    raise
                self.error = ProgramFailed(f"no estimate was made: {end}")
            self.stopped = _reason(end)

    def _search(self, start: int, near: bool) -> None:
        least, most = self._bounds
        runner = self.runner
        start = min(max(start, least), most)
        first = runner.document(self.case, start)
        if "error" in first and start > least:
            runner.notify(f"{runner.argument} {start}: {first['error']}")
            start = least
            first = runner.document(self.case, start)
        if "error" in first:
            self.error = failure(first, f"with {runner.argument} {start}: ")
            runner.notify(self.failed)
            return
        self._gpu = {"gpu": str(first["gpu"]), "capacity": Bytes(first["capacity"])}
        self._tried[start] = _trial(start, first)
        left = partial(estimates_left, self._tried, most)
        runner.report(self._tried[start], left=left)
        why = first["compute_why"]
        if self.case.compute == "auto" and (why == SUFFICIENT or why.endswith(TOO_SLOW)):
            # No line decides by a value: the sizes are those with all values, and are known sooner.
            # Or a run with all values took too long, as the next one would.
            self.case = replace(self.case, compute="shapes")
        search(
            runner.trials(self.case, left=left), least, most, self._tried, start=start, near=near
        )

    @property
    def failed(self) -> str:
        """Why no value was estimated; "" if one was."""
        return "" if self.error is None else str(self.error)

    @property
    def needs(self) -> dict[int, int]:
        """The memory without the CUDA context, in bytes, by value."""
        context = sum(model.context_high for model in parse_spec(self.case.gpu)[:1])
        return {
            value: trial.needed - context
            for value, trial in self._tried.items()
            if not trial.failed
        }

    @property
    def largest(self) -> int:
        """The largest value that fits; 0 if none does."""
        fitting, _ = _fitting(self._tried.values())
        return fitting[-1].value if fitting else 0

    @property
    def without_effect(self) -> tuple[int, ...]:
        """The values above `largest` that have no effect."""
        _, alike = _fitting(self._tried.values())
        return alike or (self._without_effect if self.largest == self._bounds[1] else ())

    def choice(self) -> FitChoice:
        trial = self._tried.get(self.largest) or next(iter(self._tried.values()), None)
        chosen = FitChoice(
            self.case.gpu,
            self.case.ranks,
            self.largest or None,
            Bytes(0) if trial is None else trial.needed,
            Bytes(0) if trial is None else trial.capacity,
            self.failed,
        )
        if trial is None or not self.largest:
            return chosen
        chosen = replace(chosen, no_kernels=trial.no_kernels)
        if isinstance(trial.time, Unavailable):
            return replace(chosen, no_time=trial.time.reason)
        gpus = len(parse_spec(self.case.gpu)) * self.case.ranks
        price = self.case.price
        return replace(
            chosen,
            cost=cost_of(trial.time, price, gpus, self.case.prices.date) if price else None,
            **speed_fields(trial.time),
        )

    def result(self, **rest: Any) -> Fit:
        least, most = self._bounds
        fields = {
            "suggestions": (),
            "not_tried": (),
            "without_effect": self.without_effect,
            **rest,
        }
        return fit_of(
            self._tried,
            **self._gpu,
            argument=self.runner.argument,
            applied=self.case.parameter.description if self.case.parameter else "",
            compute=self.case.compute,
            least=least,
            most=most,
            ranks=self.case.ranks,
            **fields,
        )


def _guess(searches: Sequence[_CaseSearch], case: EstimateRequest) -> int | None:
    """The largest value that fits on a GPU, from the straight line through the needs on other GPUs
    that are next to its memory: apart from the CUDA context, a run needs about as much on each.
    None if fewer than two needs are known.
    """
    known: dict[int, int] = {}
    for one in searches:
        if one.case.ranks == case.ranks:
            known.update(one.needs)
    model, *others = parse_spec(case.gpu)
    if len(known) < 2 or others:
        return None
    points = sorted(known.items())
    room = usual_room(model.total_memory - model.context_high)
    above = next((at for at, (_, need) in enumerate(points) if need > room), None)
    pair = (len(points) // 2 - 1, -1) if above is None else (max(0, above - 1), max(1, above))
    (low, need), (high, more) = (points[at] for at in pair)
    if more <= need:
        return low
    return max(1, low + (room - need) * (high - low) // (more - need))


class _Runner:
    """Runs the estimates of a search and reports each, with the largest value that fits so far."""

    def __init__(
        self,
        estimate: Estimating,
        argument: str,
        notify: Callable[[str], None],
        label: str = "",
        deadline: Deadline | None = None,
    ) -> None:
        self._estimate = estimate
        self._deadline = deadline or Deadline(math.inf)
        self.argument = argument
        self._notify = notify
        self._label = f"{label}: " if label else ""
        self._best = 0

    def notify(self, message: str) -> None:
        self._notify(f"{self._label}{message}")

    def document(self, case: EstimateRequest, value: int) -> Document:
        """The JSON document of one estimate, or ``{"error": ...}``. Raises OutOfTime."""
        return self._deadline.run(
            self._estimate,
            # The prices of all GPUs are no part of the estimate on one.
            replace(case, value=value, prices=PriceList()),
        )

    def trials(
        self,
        case: EstimateRequest,
        name: str = "",
        share: int = 1,
        left: Callable[[Trial], int] = lambda trial: 0,
    ) -> Callable[[int], Trial]:
        """A function that estimates ``case`` with a value. ``name`` is the change in it, if any;
        ``share`` times the value is reported. ``left``: how many estimates follow one.
        """

        def trial(value: int) -> Trial:
            found = _trial(value, self.document(case, value))
            self.report(found, name, share, left)
            return found

        return trial

    def report(
        self,
        trial: Trial,
        name: str = "",
        share: int = 1,
        left: Callable[[Trial], int] = lambda trial: 0,
    ) -> None:
        changed = f" with {name}" if name else ""
        result = trial.failed or trial.verdict
        if not trial.failed:
            result += f", {human_bytes(trial.needed)} of {human_bytes(trial.capacity)}"
        if not name and trial.fits:
            self._best = max(self._best, trial.value)
        known = [f"largest so far: {self._best}"] if self._best and not name else []
        remaining = self._deadline.remaining(left(trial))
        known += [remaining] if remaining else []
        best = f" ({'; '.join(known)})" if known else ""
        self.notify(f"{self.argument} {trial.value * share}{changed}: {result}{best}")


def _trial(value: int, document: Document) -> Trial:
    if "error" in document:
        return Trial(value, "", Bytes(0), Bytes(0), Bytes(0), document["error"])
    return Trial(
        value,
        document["verdict"],
        Bytes(document["peak_allocated"]),
        Bytes(document["total"]["at_most"]),
        Bytes(document["capacity"]),
        time=_time(document["step_time"]),
        no_kernels=document["no_kernels"],
    )


def _time(plain: Document) -> StepTime | Unavailable:
    if "unavailable" in plain:
        return Unavailable(plain["unavailable"], ReadStatus(plain["status"]))
    return from_plain(StepTime, plain)


# -- changes to the run

_CHANGES: Final = (BF16, CHECKPOINT, ACCUMULATE, EXPANDABLE, FUSED, EIGHT_BIT, OFFLOAD)


def _suggest(
    runner: _Runner,
    case: EstimateRequest,
    at: Trial,
    most: int,
    found: list[FitSuggestion],
    left_out: list[str],
) -> None:
    """Estimate each change at the largest value, and the largest value with each change: in
    ``found``, the change that needs the least memory first. ``left_out``: why others were skipped.
    """
    argument = runner.argument
    for item in _CHANGES:
        name, change, how = item
        changed = replace(case, change=change)
        share = 1
        reason = _not_tried(item, case, argument, at.value)
        if reason:
            left_out.append(f"{name}: {reason}")
            continue
        if item is EXPANDABLE:
            changed = replace(case, conf=with_expandable(case.conf))
        elif item is ACCUMULATE:
            share = 2
            changed = replace(changed, steps=2 * case.steps)
        trial = runner.trials(changed, name, share)
        after = trial(at.value // share)
        if after.failed:
            left_out.append(f"{name}: {after.failed}")
            continue
        largest = None
        if after.fits and at.needed > after.needed:
            tried = {at.value // share: after}
            search(trial, at.value // share, most // share, tried, coarse=100)
            largest = share * max(value for value, item in tried.items() if item.fits)
        found.append(FitSuggestion(name, how, at.needed, after.needed, largest))
        found.sort(key=lambda item: item.after)


def _not_tried(change: Change, case: EstimateRequest, argument: str, value: int) -> str:
    """Why a change is not tried at a value; "" if it is."""
    if change is EXPANDABLE and expandable_already(case.conf):
        return "set already"
    if change is ACCUMULATE and "batch" not in argument.lower():
        return f"{argument} does not look like a batch size"
    if change is ACCUMULATE and value < 2:
        return f"a batch of {value} cannot be halved"
    return no_eight_bit() if change is EIGHT_BIT else ""


def estimates_left(tried: Mapping[int, Trial], most: int, latest: Trial) -> int:
    """About how many estimates a search still needs after its latest one: two secants and a halving
    between bounds; before there are bounds, as many larger values as at most fit.
    """
    known = {**tried, latest.value: latest}
    low = max((value for value, trial in known.items() if trial.fits), default=0)
    high = min(
        (value for value, trial in known.items() if value > low and not trial.fits), default=0
    )
    if high:
        return min(4, (high - low - 1).bit_length()) if low else high.bit_length()
    trial = known[low]
    doublings = max(0, (trial.capacity // max(1, trial.needed)).bit_length())
    return min(doublings, (most // low).bit_length() - 1) + (4 if doublings else 0)


_MOST_ESTIMATES: Final = 24  # of one search; halving 2^24 values takes as many


def check_bounds(least: int, most: int) -> None:
    """Raise UsageError if there is no value between them."""
    if not 1 <= least <= most:
        raise UsageError(f"no value between {least} and {most}")


def fit_of(tried: Mapping[int, Trial], **rest: Any) -> Fit:
    """The result of a `search`; ``rest`` are the fields of `Fit` that do not follow from trials."""
    trials = tuple(sorted(tried.values(), key=lambda item: item.value))
    fitting, alike = _fitting(trials)
    largest = fitting[-1].value if fitting else None
    return Fit(
        largest=largest,
        proof=fitting[-1] if fitting else None,
        beyond=next(
            (t for t in trials if largest is not None and t.value > largest and not t.fits), None
        ),
        trials=trials,
        unusual=_falling([item for item in trials if not item.failed]),
        **{"without_effect": alike, **rest},
    )


def _fitting(trials: Iterable[Trial]) -> tuple[list[Trial], tuple[int, ...]]:
    """The trials that fit, by value, and the values of the last ones, left out, that act as the one
    before them.
    """
    fitting = sorted((trial for trial in trials if trial.fits), key=lambda trial: trial.value)
    alike = 0
    while len(fitting) > alike + 1 and fitting[-1 - alike].acts_as(fitting[-2 - alike]):
        alike += 1
    last = len(fitting) - alike
    return fitting[:last], tuple(trial.value for trial in fitting[last:])


def _falling(trials: Sequence[Trial]) -> tuple[int, ...]:
    """Values that need over a hundredth less memory than the value before them; less than that is
    the allocator's rounding.
    """
    return tuple(
        after.value for before, after in pairwise(trials) if after.needed < 0.99 * before.needed
    )


def search(
    trial: Callable[[int], Trial],
    least: int,
    most: int,
    tried: dict[int, Trial] | None = None,
    coarse: int = 0,
    start: int = 0,
    near: bool = False,
) -> dict[int, Trial]:
    """Estimates by value: among them the largest that fits, and the next one if there is one.

    Doubles the value from ``start`` (default ``least``), and takes up to eight times it where the
    needs of the last two values show that there is room; or halves it if that does not fit
    (``near``: adds 1, 4, 16, …, or subtracts that). Then searches between the bounds: at the
    intersection of the GPU's memory with the straight line through the needs at both bounds, and
    every third time in the middle. Ends where a larger value has no effect. ``coarse``: stop when
    the bounds are within this part of the lower one (100: a hundredth). ``tried``, if given,
    contains known estimates, and gets every new one.
    """
    if tried is None:
        tried = {}

    def at(value: int) -> Trial:
        if value not in tried:
            tried[value] = trial(value)
        return tried[value]

    low = high = min(max(start, least), most)
    step = 1
    while not at(low).fits and low > least and len(tried) < _MOST_ESTIMATES:
        low, high = max(least, low - step if near else low // 2), low
        step *= 4
    if not at(low).fits:
        return tried
    step, before = 1, 0
    while at(high).fits and high < most and len(tried) < _MOST_ESTIMATES:
        further = high + step if near else _further(tried, before, high)
        before, low, high = high, high, min(most, further)
        step *= 4
        if at(high).fits and at(high).acts_as(at(before)):
            return tried  # nor does a larger value
    secants = 0
    while not at(high).fits and high - low > max(1, low // coarse if coarse else 1):
        if len(tried) >= _MOST_ESTIMATES:
            break
        step = max(1, low // coarse if coarse else 1)
        # Needs are nearly linear, so two secants are often enough; halving bounds other cases.
        halve = secants == 2
        secants = 0 if halve else secants + 1
        room = usual_room if secants == 1 else int
        middle = (low + high) // 2 if halve else _between(tried, low, high, step, room)
        if at(middle).fits:
            low = middle
        else:
            high = middle
    return tried


_FURTHEST: Final = 8
"""How many times a value the next one may be: needs may rise faster than on a straight line."""


def _further(tried: dict[int, Trial], before: int, value: int) -> int:
    """The value to try after two that fit: where the straight line through their needs meets the
    room in the GPU's memory, from twice the last one to `_FURTHEST` times.
    """
    one, other = tried.get(before), tried[value]
    most = _FURTHEST * value
    if one is None:
        return 2 * value
    rise = other.needed - one.needed
    room = usual_room(other.capacity) - other.needed
    guess = value + room * (value - before) // rise if rise > 0 else most
    return min(max(2 * value, guess), most)


def _between(
    tried: dict[int, Trial], low: int, high: int, step: int, room: Callable[[int], int]
) -> int:
    """A value between two bounds: the intersection of the ``room`` in the GPU's memory with the
    straight line through the two needs, at least ``step`` from the bounds so that the interval
    shrinks.
    """
    one, other = tried[low], tried[high]
    half = (low + high) // 2
    if other.failed or other.needed <= one.needed:
        return half
    guess = low + (room(one.capacity) - one.needed) * (high - low) // (other.needed - one.needed)
    return max(min(max(guess, low + step), high - step), low + 1)
