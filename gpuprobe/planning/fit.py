"""Fitting a script: each figure is an estimate of a changed run, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from gpuprobe.errors import ProgramFailed
from gpuprobe.model.plans.assumptions import Assumptions
from gpuprobe.model.plans.fit import Fit, FitSuggestion, Trial
from gpuprobe.model.values import Bytes
from gpuprobe.planning.argument import Way, way
from gpuprobe.planning.auto import TRIAL, answer_of
from gpuprobe.planning.search import check_bounds, fit_of, search
from gpuprobe.virtual.catalogue.gpus import parse_spec

_LIMIT: Final = 1800  # seconds for one estimate


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
    change: str = ""


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
    ranks: int,
    assume: Sequence[str],
    suggest: bool,
    notify: Callable[[str], None],
) -> Fit:
    """See `gpuprobe.api.virtual.fit_program`."""
    check_bounds(least, most)
    parse_spec(gpu)  # a name that is unknown is refused before anything runs
    chosen = way(script, argument, arguments)
    Assumptions(assume)  # as is an assumption that is none
    case = _Case(
        script,
        tuple(arguments),
        gpu,
        steps,
        "shapes" if compute == "auto" else compute,
        conf,
        ranks,
        tuple(assume),
        chosen,
    )
    first = _estimate(case, least)
    if first.get("needs_value") and compute == "auto":
        notify("the program needs values: computing them, which takes longer")
        case = case._replace(compute="real")
        first = _estimate(case, least)
    if "error" in first:
        raise ProgramFailed(f"with {argument} {least}: {first['error']}")
    trial = _notifying(case, argument, notify)
    tried = search(trial, least, most, known={least: _trial(least, first)})
    found = fit_of(
        tried,
        gpu=str(first["gpu"]),
        capacity=Bytes(first["capacity"]),
        argument=argument,
        applied=chosen.words,
        compute=case.compute,
        least=least,
        most=most,
        suggestions=(),
        not_tried=(),
    )
    if not suggest:
        return found
    at = found.proof or found.trials[0]
    suggestions, left_out = _suggest(case, argument, at, most, notify)
    return replace(found, suggestions=tuple(suggestions), not_tried=tuple(left_out))


def _notifying(
    case: _Case, argument: str, notify: Callable[[str], None], name: str = "", share: int = 1
) -> Callable[[int], Trial]:
    """Estimates of ``case``, changed by what is called ``name``; a value is a ``share``-th of the
    one that is reported."""

    def trial(value: int) -> Trial:
        found = _trial(value, _estimate(case, value))
        changed = f" with {name}" if name else ""
        notify(f"{argument} {value * share}{changed}: {found.failed or found.verdict}")
        return found

    return trial


def _estimate(case: _Case, value: int) -> dict[str, Any]:
    """The JSON document of one estimate, or ``{"error": ...}``."""
    order = json.dumps({**case._asdict(), "way": case.way._asdict(), "value": value})
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRIAL, order],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the estimate took more than {_LIMIT} s"}
    return answer_of(done.stdout, done.returncode, done.stderr.splitlines())


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
    case: _Case, argument: str, at: Trial, most: int, notify: Callable[[str], None]
) -> tuple[list[FitSuggestion], list[str]]:
    """Estimates of each change at the value found, and how far the value could go with it."""
    found: list[FitSuggestion] = []
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
        trial = _notifying(changed, argument, notify, name, share)
        after = trial(at.value // share)
        if after.failed:
            left_out.append(f"{name}: {after.failed}")
            continue
        largest = None
        if after.fits and at.needed > after.needed:
            known = {at.value // share: after}
            tried = search(trial, at.value // share, most // share, known, coarse=100)
            largest = share * max(value for value, item in tried.items() if item.fits)
        found.append(FitSuggestion(name, how, at.needed, after.needed, largest))
    if find_spec("bitsandbytes") is None:
        left_out.append("8-bit optimizers: bitsandbytes is not installed")
    else:
        left_out.append("8-bit optimizers: their kernels run on a GPU only")
    found.sort(key=lambda item: item.after)
    return found, left_out
