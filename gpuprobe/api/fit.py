"""The largest batch (or any other whole number) with which training still fits on a GPU.

Every figure comes from an estimate (see `gpuprobe.estimate`) of a run with that value, in a
process of its own.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpuprobe.errors import MissingExtra, ProgramFailed, UsageError
from gpuprobe.model.values import Bytes

if TYPE_CHECKING:
    from gpuprobe.model.plans.fit import Fit, Suggestion, Trial

__all__ = ["Way", "fit", "fit_program", "way"]

_NARROW: Final = 24  # estimates of one search at most; 2^24 values are told apart by as many
_LIMIT: Final = 1800  # seconds for one estimate


class Way(NamedTuple):
    """How a value reaches the program: as an ``option`` of its, or in place of a ``constant`` that
    it assigns at its top level.
    """

    option: str = ""
    constant: str = ""

    @property
    def words(self) -> str:
        if self.option:
            return f"as the option {self.option}"
        return f"in place of the constant {self.constant}"


class _Case(NamedTuple):
    """What one estimate is made of, but for the value."""

    script: str
    arguments: tuple[str, ...]
    gpu: str
    steps: int
    compute: str
    conf: str | None
    ranks: int
    way: Way
    change: str = ""


def way(script: str, argument: str, arguments: Sequence[str] = ()) -> Way:
    """Where a program takes ``argument`` from: an option of its (``batch_size`` stands for
    ``--batch-size`` and ``--batch_size``), or a number assigned at its top level (``batch_size``,
    ``BATCH_SIZE``).

    Raises UsageError where it has neither; the message names what it has.
    """
    path = Path(script)
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except OSError as error:
        raise UsageError(f"cannot read {script}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise ProgramFailed(f"{script} is not Python: {error}") from None
    bare = argument.lstrip("-")
    wanted = {argument, f"--{bare}", f"--{bare.replace('_', '-')}", f"--{bare.replace('-', '_')}"}
    given = {word.partition("=")[0] for word in arguments}
    options = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"--?[A-Za-z][\w-]*", node.value)
    }
    for option in sorted(wanted & (options | given)):
        return Way(option=option)
    names = [
        target.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and isinstance(node.value, ast.Constant)
        and type(node.value.value) is int
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    plain = bare.replace("-", "_")
    for name in (plain, plain.upper()):
        if name in names:
            return Way(constant=name)
    has = sorted({*options, *names})
    near = difflib.get_close_matches(bare, has, n=3, cutoff=0.4)
    raise UsageError(
        f"{script} has no option --{bare.replace('_', '-')} and no top-level number {plain}",
        hint=f"it has {', '.join(near)}" if near else "name an option of the script's",
    )


def fit_program(
    script: str,
    argument: str,
    arguments: Sequence[str] = (),
    *,
    gpu: str = "h100-80gb",
    least: int = 1,
    most: int = 65536,
    steps: int = 3,
    compute: str = "shapes",
    conf: str | None = None,
    ranks: int = 1,
    suggest: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> Fit:
    """Search for the largest value of ``argument`` with which the script fits.

    Values from ``least`` to ``most`` are tried: doubled until one does not fit, then halved in
    between. Where the program needs a value that ``compute="shapes"`` does not compute, all is
    computed instead. ``suggest`` estimates changes to the run as well. ``tell`` hears of every
    estimate. Raises what `estimate_program` raises at ``least``.
    """
    from gpuprobe.model.plans.fit import Fit

    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch", why="an estimate runs the training step")
    if not 1 <= least <= most:
        raise UsageError(f"from {least} to {most} there is no value")
    from gpuprobe.virtual.catalogue.gpus import parse_spec

    parse_spec(gpu)  # a name that is unknown is said before anything runs
    chosen = way(script, argument, arguments)
    case = _Case(script, tuple(arguments), gpu, steps, compute, conf, ranks, chosen)
    first = _estimate(case, least)
    if "needs the value" in first.get("error", "") and compute == "shapes":
        tell("the program needs values: computing them, which takes longer")
        case = case._replace(compute="real")
        first = _estimate(case, least)
    if "error" in first:
        raise ProgramFailed(f"with {argument} {least}: {first['error']}")
    trial = _told(case, argument, tell)
    found = _search(trial, least, most, known={least: _trial(least, first)})
    trials = tuple(sorted(found.values(), key=lambda item: item.value))
    fitting = [item for item in trials if item.fits]
    largest = fitting[-1].value if fitting else None
    beyond = next((item for item in trials if largest is not None and item.value > largest), None)
    suggestions: list[Suggestion] = []
    left_out: list[str] = []
    at = fitting[-1] if fitting else trials[0]
    if suggest:
        suggestions, left_out = _suggest(case, argument, at, most, tell)
    needs = [item for item in trials if not item.failed]
    unusual = _falling(needs)
    return Fit(
        gpu=str(first["gpu"]),
        capacity=Bytes(first["capacity"]),
        argument=argument,
        applied=chosen.words,
        compute=case.compute,
        least=least,
        most=most,
        largest=largest,
        proof=fitting[-1] if fitting else None,
        beyond=beyond,
        trials=trials,
        suggestions=tuple(suggestions),
        not_tried=tuple(left_out),
        unusual=unusual,
    )


def fit(
    build: Callable[[int], Callable[[], Any]],
    gpu: str = "h100-80gb",
    *,
    least: int = 1,
    most: int = 65536,
    steps: int = 3,
    compute: str = "shapes",
    conf: str | None = None,
) -> Fit:
    """As ``gpuprobe fit``, for a function: ``build(value)`` builds a model for that value, on the
    device, and returns the function for one step (see `estimate`). In this process, and without
    suggestions. Raises what `estimate` raises at ``least``.
    """
    from gpuprobe.api.estimate import estimate
    from gpuprobe.model.plans.fit import Fit, Trial

    if not 1 <= least <= most:
        raise UsageError(f"from {least} to {most} there is no value")
    known: dict[str, Any] = {}

    def trial(value: int) -> Trial:
        found = estimate(lambda: build(value), gpu, steps=steps, compute=compute, conf=conf)
        known.update(gpu=found.gpu, capacity=found.capacity)
        return Trial(
            value, found.verdict, found.peak_allocated, Bytes(found.total_high), found.capacity
        )

    found = _search(trial, least, most)
    trials = tuple(sorted(found.values(), key=lambda item: item.value))
    fitting = [item for item in trials if item.fits]
    largest = fitting[-1].value if fitting else None
    return Fit(
        gpu=known["gpu"],
        capacity=known["capacity"],
        argument="value",
        applied="as build(value)",
        compute=compute,
        least=least,
        most=most,
        largest=largest,
        proof=fitting[-1] if fitting else None,
        beyond=next((t for t in trials if largest is not None and t.value > largest), None),
        trials=trials,
        suggestions=(),
        not_tried=("changes to the run: `gpuprobe fit` tries them on scripts",),
        unusual=_falling(trials),
    )


def _falling(trials: Sequence[Trial]) -> tuple[int, ...]:
    """Values with more than a hundredth less need than the value before: that much is the
    allocator's rounding.
    """
    return tuple(
        after.value for before, after in pairwise(trials) if after.needed < 0.99 * before.needed
    )


def _told(
    case: _Case, argument: str, tell: Callable[[str], None], name: str = "", share: int = 1
) -> Callable[[int], Trial]:
    """Estimates of ``case``, changed by what is called ``name``; a value is a ``share``-th of the
    one that is told of."""

    def trial(value: int) -> Trial:
        found = _trial(value, _estimate(case, value))
        changed = f" with {name}" if name else ""
        tell(f"{argument} {value * share}{changed}: {found.failed or found.verdict}")
        return found

    return trial


def _search(
    trial: Callable[[int], Trial],
    least: int,
    most: int,
    known: dict[int, Trial] | None = None,
    coarse: int = 0,
) -> dict[int, Trial]:
    """Estimates by value: among them the largest that fits and the one above it, if there is.

    Up in doubling steps, then between the bounds: where the straight line through the two needs
    meets the GPU's memory, and by halves, in turn. ``coarse``: stop when the bounds are within
    this part of the lower one (100: a hundredth).
    """
    tried = dict(known or {})

    def at(value: int) -> Trial:
        if value not in tried:
            tried[value] = trial(value)
        return tried[value]

    low = high = least
    while at(high).fits and high < most and len(tried) < _NARROW:
        low, high = high, min(most, high * 2)
    halve = False
    while not at(high).fits and high - low > max(1, low // coarse if coarse else 1):
        if len(tried) >= _NARROW:
            break
        step = max(1, low // coarse if coarse else 1)
        middle = (low + high) // 2 if halve else _between(tried, low, high, step)
        halve = not halve
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


def _estimate(case: _Case, value: int) -> dict[str, Any]:
    """The JSON document of one estimate, or ``{"error": ...}``."""
    order = json.dumps({**case._asdict(), "way": case.way._asdict(), "value": value})
    done = subprocess.run(
        [sys.executable, "-m", "gpuprobe.api.fit_trial", order],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_LIMIT,
        check=False,
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        return {"error": last or f"the estimate ended with code {done.returncode}"}
    return answer


def _trial(value: int, document: dict[str, Any]) -> Trial:
    from gpuprobe.model.plans.fit import Trial

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
    case: _Case, argument: str, at: Trial, most: int, tell: Callable[[str], None]
) -> tuple[list[Suggestion], list[str]]:
    """Estimates of each change at the value found, and how far the value could go with it."""
    from gpuprobe.model.plans.fit import Suggestion

    found: list[Suggestion] = []
    left_out: list[str] = []
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
        trial = _told(changed, argument, tell, name, share)
        after = trial(at.value // share)
        if after.failed:
            left_out.append(f"{name}: {after.failed}")
            continue
        largest = None
        if after.fits and at.needed > after.needed:
            known = {at.value // share: after}
            tried = _search(trial, at.value // share, most // share, known, coarse=100)
            largest = share * max(value for value, item in tried.items() if item.fits)
        found.append(Suggestion(name, how, at.needed, after.needed, largest))
    if find_spec("bitsandbytes") is None:
        left_out.append("8-bit optimizers: bitsandbytes is not installed")
    else:
        left_out.append("8-bit optimizers: their kernels run on a GPU only")
    found.sort(key=lambda item: item.after)
    return found, left_out
