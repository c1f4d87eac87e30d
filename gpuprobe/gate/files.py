"""The files of the gate: baselines of memory, and of known hazards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprobe.errors import DataError, UsageError
from gpuprobe.model.io.files import atomic_write, read_regular, read_text

if TYPE_CHECKING:
    from gpuprobe.analysis.baseline import Baseline, Tolerance
    from gpuprobe.hazards.findings.known import KnownFinding
    from gpuprobe.model.findings import Finding

StrPath = str | os.PathLike[str]


def read_baseline(path: StrPath) -> Baseline:
    """Raises UsageError where there is none, DataError for something else."""
    from gpuprobe.analysis.baseline import loads

    hint = "gpuprobe baseline update writes one, with the same arguments as this"
    return loads(_text(path, hint), str(Path(path)))


def replaced_baseline(path: StrPath) -> tuple[Baseline | None, Mapping[str, Tolerance]]:
    """The baseline that is to be written anew, and its tolerances. One with merge conflicts is
    none, and has the tolerances of both sides. Raises DataError for what is no baseline."""
    from gpuprobe.analysis.baseline.text import merged_tolerances

    if not Path(path).exists():
        return None, {}
    merged = merged_tolerances(_text(path, ""))
    if merged is not None:
        return None, merged
    before = read_baseline(path)
    return before, before.tolerances or {}


def write_baseline(
    baseline: Baseline, path: StrPath, tolerance: Mapping[str, Tolerance] | None = None
) -> None:
    """Write it whole or not at all, with ``tolerance``. Tolerances of a baseline that is there are
    kept. Raises UsageError where it cannot be written, DataError where what is there is none."""
    from gpuprobe.analysis.baseline import dumps

    _, kept = replaced_baseline(path)
    tolerances = {**kept, **(tolerance or {})}
    _write(path, dumps(replace(baseline, tolerances=tolerances)))


def read_known(path: StrPath) -> tuple[KnownFinding, ...]:
    """The hazards that are known. Raises UsageError where there is no such file, DataError for
    something else."""
    from gpuprobe.hazards.findings.known import loads

    return loads(_text(path, "add --hazards-baseline-update to write one"), str(Path(path)))


def ensure_replaceable(path: StrPath) -> None:
    """A baseline of hazards may be replaced, and a damaged one; anything else is left alone.
    Raises DataError for that."""
    from gpuprobe.hazards.findings.known import may_be_one

    where = Path(path)
    try:
        replaceable = may_be_one(read_regular(where).decode("utf-8", "replace"))
    except FileNotFoundError:
        return
    except OSError:
        replaceable = False  # a folder, a device, or larger than any baseline
    if not replaceable:
        raise DataError(f"{where} is not a baseline of hazards", hint="name another file")


def write_known(findings: Sequence[Finding], path: StrPath) -> None:
    """Write it whole or not at all. Raises UsageError where it cannot be written."""
    from gpuprobe.hazards.findings.known import dumps, known

    _write(path, dumps(known(findings)))


def ensure_writable(*paths: StrPath | None) -> None:
    """Refuse a file that cannot be written before a program has run for it, not afterwards. None
    is no file. Raises UsageError."""
    for path in paths:
        if path is None:
            continue
        where = Path(path)
        if where.is_dir():
            raise _cannot_write(where, "it is a folder")
        if not where.parent.is_dir():
            raise _cannot_write(where, "No such file or directory")
        if not os.access(where if where.exists() else where.parent, os.W_OK):
            raise _cannot_write(where, "Permission denied")


def _text(path: StrPath, hint: str) -> str:
    """``hint``: what to do where there is no such file."""
    try:
        return read_text(path)
    except FileNotFoundError:
        raise UsageError(f"no baseline at {Path(path)}", hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"cannot read {Path(path)}: {reason}", hint="is this a baseline? it is text, in UTF-8"
        ) from error


def _write(path: StrPath, text: str) -> None:
    try:
        with atomic_write(Path(path)) as file:
            file.write(text.encode())
    except OSError as error:
        raise _cannot_write(Path(path), error.strerror or str(error)) from error


def _cannot_write(path: Path, reason: str) -> UsageError:
    hint = "" if path.parent.is_dir() else f"there is no folder {path.parent}: make it first"
    return UsageError(f"cannot write {path}: {reason}", hint=hint)
