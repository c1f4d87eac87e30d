"""The largest value of an argument with which a script fits on a GPU.

Each figure is an estimate of a changed run, in a separate process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Final, NamedTuple

from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.errors import ProgramFailed, UsageError
from gpuprobe.model.plans.assumptions import Assumptions
from gpuprobe.model.plans.fit import Fit, FitChoice, FitSuggestion, Trial
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import Bytes
from gpuprobe.planning.argument import Way, way
from gpuprobe.planning.trials import Estimates


class _Case(NamedTuple):
    """What one estimate is made of, but for the value."""

    script: str
    arguments: tuple[str, ...]
    gpu: str
    steps: int
    compute: str
    conf: str | None
    ranks: int
    assume: tuple[str, ...]
    way: Way
    rank: int | Sequence[int] | str = 0
    change: str = ""
    torch: str = ""
    engine: str = "auto"

    @property
    def label(self) -> str:
        return self.gpu if self.ranks == 1 else f"{self.gpu}, {self.ranks} ranks"


def fit_script(
    script: str,
    argument: str,
    arguments: Sequence[str],
    *,
    gpu: str,
    least: int,
    most: int,
    steps: int,
    compute: str,
    conf: str | None,
    ranks: Sequence[int],
    rank: int | Sequence[int] | str,
    assume: Sequence[str],
    suggest: bool,
    torch: str,
    engine: str,
    notify: Callable[[str], None],
) -> Fit:
    """See `gpuprobe.api.virtual.fit_program`."""
    check_bounds(least, most)
    gpus = [part.strip() for part in gpu.split(",")]
    for name in gpus:
        parse_spec(name)  # a name that is unknown is refused before anything runs
    chosen = way(script, argument, arguments)
    Assumptions(assume)  # as is an assumption that is none
    cases = [
        _Case(
            script,
            tuple(arguments),
            name,
            steps,
            "shapes" if compute == "auto" else compute,
            conf,
            count,
            tuple(assume),
            chosen,
            rank,
            torch=torch,
            engine=engine,
        )
        for name in gpus
        for count in ranks
    ]
    with Estimates(engine) as estimate:
        found: list[_Searched] = []
        start = chosen.value
        for case in cases:
            run = _Search(estimate, argument, notify, case.label if len(cases) > 1 else "")
            one = _Searched(run, case, least, most, auto=compute == "auto")
            found.append(one)
            one.search(start)
            start = one.largest or start
            if one.interrupted:
                break
        if all(one.failed for one in found):
            raise ProgramFailed(found[0].failed)
        best = max(found, key=lambda one: (one.choice().total, not one.failed))
        suggestions: list[FitSuggestion] = []
        left_out: list[str] = []
        if suggest and not any(one.interrupted for one in found):
            answer = best.answer()
            at = answer.proof or answer.trials[0]
            try:
                _suggest(best.run, best.case, at, most, suggestions, left_out)
            except KeyboardInterrupt:
                left_out.append("other changes to the run: interrupted")
        return best.answer(
            suggestions=tuple(suggestions),
            not_tried=tuple(left_out),
            interrupted=any(one.interrupted for one in found),
            choices=tuple(one.choice() for one in found) if len(cases) > 1 else (),
        )


class _Searched:
    """The search of one case, and what it has found. ``auto``: with all values where it needs
    some.
    """

    def __init__(self, run: _Search, case: _Case, least: int, most: int, *, auto: bool) -> None:
        self.run = run
        self.case = case
        self.failed = ""
        self.interrupted = False
        self._bounds = least, most
        self._auto = auto
        self._tried: dict[int, Trial] = {}
        self._gpu: dict[str, Any] = {}

    def search(self, start: int) -> None:
        """Start from a value; from the least one where the program fails with it."""
        least, most = self._bounds
        run = self.run
        start = min(max(start, least), most)
        first = run.document(self.case, start)
        if first.get("needs_value") and self._auto:
            run.say("the program needs values; computing them takes longer")
            self.case = self.case._replace(compute="real")
            first = run.document(self.case, start)
        if "error" in first and start > least:
            run.say(f"{run.argument} {start}: {first['error']}")
            start = least
            first = run.document(self.case, start)
        if "error" in first:
            self.failed = f"with {run.argument} {start}: {first['error']}"
            run.say(self.failed)
            return
        self._gpu = {"gpu": str(first["gpu"]), "capacity": Bytes(first["capacity"])}
        self._tried[start] = _trial(start, first)
        run.report(self._tried[start])
        try:
            search(run.trials(self.case), least, most, self._tried, start=start)
        except KeyboardInterrupt:
            self.interrupted = True

    @property
    def largest(self) -> int:
        """0 where none fits."""
        return max((value for value, trial in self._tried.items() if trial.fits), default=0)

    def choice(self) -> FitChoice:
        trial = self._tried.get(self.largest) or next(iter(self._tried.values()), None)
        return FitChoice(
            self.case.gpu,
            self.case.ranks,
            self.largest or None,
            Bytes(0) if trial is None else trial.needed,
            Bytes(0) if trial is None else trial.capacity,
            self.failed,
        )

    def answer(self, **rest: Any) -> Fit:
        least, most = self._bounds
        fields = {"suggestions": (), "not_tried": (), **rest}
        return fit_of(
            self._tried,
            **self._gpu,
            argument=self.run.argument,
            applied=self.case.way.words,
            compute=self.case.compute,
            least=least,
            most=most,
            ranks=self.case.ranks,
            **fields,
        )


class _Search:
    """Estimates of one search, each told of as it is made, with the largest that fits so far."""

    def __init__(
        self,
        estimate: Callable[[dict[str, Any]], dict[str, Any]],
        argument: str,
        notify: Callable[[str], None],
        label: str = "",
    ) -> None:
        self._estimate = estimate
        self.argument = argument
        self._notify = notify
        self._label = f"{label}: " if label else ""
        self._best = 0

    def say(self, message: str) -> None:
        self._notify(f"{self._label}{message}")

    def document(self, case: _Case, value: int) -> dict[str, Any]:
        """The JSON document of one estimate, or ``{"error": ...}``."""
        return self._estimate({**case._asdict(), "way": case.way._asdict(), "value": value})

    def trials(self, case: _Case, name: str = "", share: int = 1) -> Callable[[int], Trial]:
        """Estimates of ``case``, changed by what is called ``name``; a value is a ``share``-th of
        the one that is reported.
        """

        def trial(value: int) -> Trial:
            found = _trial(value, self.document(case, value))
            self.report(found, name, share)
            return found

        return trial

    def report(self, trial: Trial, name: str = "", share: int = 1) -> None:
        changed = f" with {name}" if name else ""
        result = trial.failed or trial.verdict
        if not trial.failed:
            result += f", {human_bytes(trial.needed)} of {human_bytes(trial.capacity)}"
        if not name and trial.fits:
            self._best = max(self._best, trial.value)
        best = f" (largest so far: {self._best})" if self._best and not name else ""
        self.say(f"{self.argument} {trial.value * share}{changed}: {result}{best}")


def _trial(value: int, document: dict[str, Any]) -> Trial:
    if "error" in document:
        return Trial(value, "", Bytes(0), Bytes(0), Bytes(0), document["error"])
    return Trial(
        value,
        document["verdict"],
        Bytes(document["peak_allocated"]),
        Bytes(document["total"]["at_most"]),
        Bytes(document["capacity"]),
    )


# -- changes to the run

_CHANGES: Final = (
    (
        "bf16 autocast",
        "bf16",
        'with torch.autocast("cuda", dtype=torch.bfloat16): around the forward pass',
    ),
    (
        "activation checkpointing",
        "checkpoint",
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) for the repeated blocks",
    ),
    (
        "gradient accumulation",
        "accumulate",
        "half the batch at a time, and optimizer.step() at every second one",
    ),
    (
        "expandable segments",
        "expandable",
        "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment",
    ),
    ("fused optimizer", "fused", "fused=True for the optimizer"),
)


def _suggest(
    run: _Search,
    case: _Case,
    at: Trial,
    most: int,
    found: list[FitSuggestion],
    left_out: list[str],
) -> None:
    """Estimates of each change at the value found, and how far the value could go with it: into
    ``found``, the change that needs least first, and ``left_out`` in words.
    """
    argument = run.argument
    for name, change, how in _CHANGES:
        changed = case._replace(change=change)
        share = 1
        if change == "expandable":
            if "expandable_segments" in (case.conf or ""):
                left_out.append(f"{name}: set already")
                continue
            conf = "expandable_segments:True"
            changed = case._replace(conf=f"{case.conf},{conf}" if case.conf else conf)
        elif change == "accumulate":
            share = 2
            if "batch" not in argument.lower():
                left_out.append(f"{name}: {argument} does not look like a batch size")
                continue
            if at.value < 2:
                left_out.append(f"{name}: a batch of {at.value} cannot be halved")
                continue
            changed = changed._replace(steps=2 * case.steps)
        trial = run.trials(changed, name, share)
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
    if find_spec("bitsandbytes") is None:
        left_out.append("8-bit optimizers: bitsandbytes is not installed")
    else:
        left_out.append("8-bit optimizers: their kernels run on a GPU only")


_NARROW: Final = 24  # estimates of one search at most; as many tell 2^24 values apart


def check_bounds(least: int, most: int) -> None:
    """Raises UsageError where no value lies between them."""
    if not 1 <= least <= most:
        raise UsageError(f"no value between {least} and {most}")


def fit_of(tried: Mapping[int, Trial], **rest: Any) -> Fit:
    """The answer of a `search`; ``rest`` are the fields of `Fit` that the trials do not give."""
    trials = tuple(sorted(tried.values(), key=lambda item: item.value))
    fitting = [item for item in trials if item.fits]
    largest = fitting[-1].value if fitting else None
    return Fit(
        largest=largest,
        proof=fitting[-1] if fitting else None,
        beyond=next((t for t in trials if largest is not None and t.value > largest), None),
        trials=trials,
        unusual=_falling([item for item in trials if not item.failed]),
        **rest,
    )


def _falling(trials: Sequence[Trial]) -> tuple[int, ...]:
    """Values with more than a hundredth less need than the value before: that much is the
    allocator's rounding.
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
) -> dict[int, Trial]:
    """Estimates by value: among them the largest that fits and the one above it, if there is.

    From ``start`` (default ``least``) up in doubling steps, or down by halves where that does not
    fit; then between the bounds: where the straight line through the two needs meets the GPU's
    memory, and every third time by halves. ``coarse``: stop when the bounds are within this part
    of the lower one (100: a hundredth). ``tried``, if given, has what is known, and gets every
    estimate.
    """
    if tried is None:
        tried = {}

    def at(value: int) -> Trial:
        if value not in tried:
            tried[value] = trial(value)
        return tried[value]

    low = high = min(max(start, least), most)
    while not at(low).fits and low > least and len(tried) < _NARROW:
        low, high = max(least, low // 2), low
    if not at(low).fits:
        return tried
    while at(high).fits and high < most and len(tried) < _NARROW:
        low, high = high, min(most, high * 2)
    secants = 0
    while not at(high).fits and high - low > max(1, low // coarse if coarse else 1):
        if len(tried) >= _NARROW:
            break
        step = max(1, low // coarse if coarse else 1)
        # Needs are nearly straight, so that two lines often do; halves bound what is not.
        halve = secants == 2
        secants = 0 if halve else secants + 1
        middle = (low + high) // 2 if halve else _between(tried, low, high, step)
        if at(middle).fits:
            low = middle
        else:
            high = middle
    return tried


def _between(tried: dict[int, Trial], low: int, high: int, step: int) -> int:
    """A value between two bounds: where the straight line through the two needs meets the
    GPU's memory, kept ``step`` off the bounds so that the interval shrinks.
    """
    one, other = tried[low], tried[high]
    half = (low + high) // 2
    if other.failed or other.needed <= one.needed:
        return half
    guess = low + (one.capacity - one.needed) * (high - low) // (other.needed - one.needed)
    return max(min(max(guess, low + step), high - step), low + 1)
