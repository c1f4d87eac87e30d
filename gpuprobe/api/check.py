"""Memory baselines: write one, and check a run against it."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprobe.errors import ConfigError, DataError, ProgramFailed, UsageError

if TYPE_CHECKING:
    from gpuprobe.analysis.baseline import Baseline, CheckResult, Tolerance
    from gpuprobe.model.recording import Recording

__all__ = ["check", "compare", "measure", "read_baseline", "tolerances", "write_baseline"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def check(
    recording: Recording | str | os.PathLike[str],
    baseline: Baseline | str | os.PathLike[str],
    *,
    device: str = "",
    tolerance: Mapping[str, Tolerance] | None = None,
) -> CheckResult:
    """Compare a recording with a baseline: ``result.ok``, ``result.regressions``, what grew in
    ``result.rows``.

    ``device`` names the GPU in words, where the baseline has one. Raises what `load` raises, and
    DataError for a baseline that is damaged or not one.
    """
    from gpuprobe.analysis.baseline import Baseline, baseline_of, check_baseline
    from gpuprobe.api.recordings import load

    before = baseline if isinstance(baseline, Baseline) else read_baseline(baseline)
    found = recording if not isinstance(recording, (str, os.PathLike)) else load(recording)
    return check_baseline(before, baseline_of(found, device=device), tolerance)


def measure(
    target: str,
    arguments: Sequence[str] = (),
    *,
    virtual: str | None = None,
    hazards: bool = False,
    module: bool = False,
) -> Baseline:
    """What a recording, or a program that is run here, stands for.

    A directory is taken for a recording; anything else is run and recorded at level ``trace``:
    on a virtual GPU where ``virtual`` names one. ``hazards`` also counts races and implicit
    synchronisations (on a virtual GPU).

    Raises ProgramFailed where the program does not end well.
    """
    from gpuprobe.analysis.baseline import baseline_of
    from gpuprobe.api.recordings import load

    if not module and Path(target).is_dir():
        return baseline_of(load(target))
    from gpuprobe.api import watch

    program = watch.program(target, arguments, module=module)
    with tempfile.TemporaryDirectory(prefix="gpuprobe-") as folder:
        path = Path(folder, "check.gpuprobe")
        result = watch.run(
            program, path, level="trace", virtual=virtual, hazards=hazards, trace_steps="all"
        )
        if result.error is not None:
            raise ProgramFailed(
                f"the program failed: {type(result.error).__name__}: {result.error}"
            ) from result.error
        if result.exit_code:
            raise ProgramFailed(f"the program ended with exit code {result.exit_code}")
        syncs = races = None
        if result.hazards is not None:
            syncs = sum(row.count for row in result.hazards.syncs if not row.allowed)
            races = len(result.hazards.races)
        device = f"virtual {virtual}" if virtual is not None else ""
        return baseline_of(load(path), device=device, syncs=syncs, races=races)


def compare(
    before: Baseline, after: Baseline, tolerance: Mapping[str, Tolerance] | None = None
) -> CheckResult:
    """Compare two measurements. The call's tolerances go before the baseline's own."""
    from gpuprobe.analysis.baseline import check_baseline

    return check_baseline(before, after, tolerance)


def read_baseline(path: str | os.PathLike[str]) -> Baseline:
    """Raises UsageError where there is none, DataError for something else."""
    from gpuprobe.analysis.baseline import loads

    where = Path(path)
    try:
        text = where.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"no baseline at {where}", hint=f"gpuprobe baseline update --baseline {where} ..."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {where}: {error}") from error
    return loads(text, str(where))


def write_baseline(baseline: Baseline, path: str | os.PathLike[str]) -> None:
    """Write it whole or not at all. Tolerances of a baseline that is there are kept."""
    from dataclasses import replace

    from gpuprobe.analysis.baseline import dumps

    where = Path(path)
    if where.exists():
        baseline = replace(baseline, tolerances=read_baseline(where).tolerances)
    text = dumps(baseline)
    partial = where.with_name(f".{where.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(where)
    except OSError as error:
        raise UsageError(f"cannot write {where}: {error.strerror or error}") from error


def tolerances(texts: Sequence[str]) -> dict[str, Tolerance]:
    """``peak_allocated=2%`` or ``peak_reserved=64MiB`` or both, ``=2%,64MiB``.

    Raises ConfigError for an unknown metric or amount.
    """
    from gpuprobe.analysis.baseline import METRICS, Tolerance

    found: dict[str, Any] = {}
    for text in texts:
        name, _, amounts = text.partition("=")
        if name not in METRICS:
            raise ConfigError(f"unknown metric {name!r}", hint=f"one of: {', '.join(METRICS)}")
        relative, absolute = 0.0, 0
        for amount in amounts.split(","):
            share = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", amount)
            size = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]?)(?:i?B)?\s*", amount)
            if share:
                relative = float(share[1]) / 100
            elif size:
                absolute = int(float(size[1]) * _UNITS[size[2]])
            else:
                raise ConfigError(
                    f"expected an amount such as 2% or 64MiB for {name}, found {amount!r}"
                )
        found[name] = Tolerance(relative, absolute)
    return found
