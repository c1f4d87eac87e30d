"""The baseline of known hazards as a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprobe.errors import DataError, UsageError
from gpuprobe.model.files import atomic_write

if TYPE_CHECKING:
    from gpuprobe.hazards.known import Comparison, KnownFinding
    from gpuprobe.model.findings import Finding

__all__ = ["compare", "ensure_replaceable", "read_known", "write_known"]


def compare(known: Sequence[KnownFinding], findings: Sequence[Finding]) -> Comparison:
    """Which findings are new."""
    from gpuprobe.hazards.known import compare

    return compare(known, findings)


def read_known(path: str | os.PathLike[str]) -> tuple[KnownFinding, ...]:
    """Raises UsageError where there is none, DataError for something else."""
    from gpuprobe.hazards.known import loads

    where = Path(path)
    try:
        text = where.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"no baseline at {where}", hint="add --hazards-baseline-update to write one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {where}: {error}") from error
    return loads(text, str(where))


def ensure_replaceable(path: str | os.PathLike[str]) -> None:
    """A baseline may be replaced, and a damaged one; anything else is left alone. Raises DataError
    for that."""
    from gpuprobe.hazards.known import may_be_one

    where = Path(path)
    if where.exists() and not may_be_one(where.read_bytes().decode("utf-8", "replace")):
        raise DataError(f"{where} is not a baseline of hazards", hint="name another file")


def write_known(findings: Sequence[Finding], path: str | os.PathLike[str]) -> None:
    """Write it whole or not at all. Raises UsageError where it cannot be written."""
    from gpuprobe.hazards.known import dumps, known

    where = Path(path)
    try:
        with atomic_write(where) as file:
            file.write(dumps(known(findings)).encode())
    except OSError as error:
        raise UsageError(f"cannot write {where}: {error.strerror or error}") from error
