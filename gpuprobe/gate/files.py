"""The files of the gate: baselines of memory, known hazards, and the hazards of each rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprobe.errors import DataError, UsageError
from gpuprobe.model.io.files import atomic_write, read_text

if TYPE_CHECKING:
    from gpuprobe.analysis.baseline.model import Baseline, Tolerance
    from gpuprobe.hazards.findings.results import Hazards

StrPath = str | os.PathLike[str]


def read_baseline(path: StrPath, run: str = "") -> Baseline:
    """The baseline of a run; with "", that of a file with a single, unnamed baseline.

    Raises UsageError if the file is missing or has no baseline of the run, and DataError if it is
    not a baseline.
    """
    found = read_runs(path)
    if run not in found:
        raise _no_run(path, run, list(found))
    return found[run]


def read_runs(path: StrPath) -> dict[str, Baseline]:
    """All baselines of a file, by the names of their runs; "" for a single, unnamed one. Raises
    UsageError if the file is missing, DataError if it is not a baseline."""
    from gpuprobe.analysis.baseline.text import loads_runs

    hint = "create it with gpuprobe baseline update and the same arguments"
    return loads_runs(_text(path, hint), str(Path(path)))


def run_names(path: StrPath) -> list[str]:
    """The names of the runs in a file, also in one with merge conflicts; empty if the file is
    missing. Raises DataError if it is not a baseline."""
    from gpuprobe.analysis.baseline.text import merged_tolerances

    if not Path(path).exists():
        return []
    merged = merged_tolerances(_text(path, ""))
    return list(read_runs(path) if merged is None else merged)


def replaced_baseline(
    path: StrPath, run: str = ""
) -> tuple[Baseline | None, Mapping[str, Tolerance]]:
    """The baseline that will be rewritten, and its tolerances. With merge conflicts the baseline is
    None, and the tolerances are those of both sides; for a run that is new to the file they are
    those of the unnamed baseline. Raises DataError if the file is not a baseline, UsageError if it
    has several runs and none is named."""
    from gpuprobe.analysis.baseline.text import merged_tolerances

    if not Path(path).exists():
        return None, {}
    merged = merged_tolerances(_text(path, ""))
    found = read_runs(path) if merged is None else {}
    names = found if merged is None else merged
    if not run and names and run not in names:
        raise _no_run(path, run, list(names))
    before = found.get(run)
    if merged is not None:
        return None, merged.get(run, merged.get("", {}))
    source = before or found.get("")
    return before, (source.tolerances if source is not None else None) or {}


def _no_run(path: StrPath, run: str, names: Sequence[str]) -> UsageError:
    file = Path(path)
    if not run:
        return UsageError(
            f"{file} has baselines of several runs: {', '.join(names)}",
            hint="choose one with --run NAME",
        )
    return UsageError(
        f"{file} has no baseline of the run {run!r}",
        hint=f"gpuprobe baseline update --run {run} adds it",
    )


def write_baseline(
    baseline: Baseline,
    path: StrPath,
    tolerance: Mapping[str, Tolerance] | None = None,
    run: str = "",
) -> None:
    """Write the baseline of one run, as `write_runs` does."""
    write_runs({run: baseline}, path, tolerance)


def write_runs(
    baselines: Mapping[str, Baseline],
    path: StrPath,
    tolerance: Mapping[str, Tolerance] | None = None,
) -> None:
    """Write baselines by the names of their runs, atomically, with ``tolerance``. Tolerances of
    existing baselines and the baselines of other runs are preserved. Raises UsageError if the file
    cannot be written, DataError if the existing file is not a baseline, or if the recording of a
    baseline is incomplete."""
    from gpuprobe.analysis.baseline.text import dumps_runs, merged_tolerances

    for baseline in baselines.values():
        if baseline.missing:
            raise DataError(
                f"the recording is incomplete: {baseline.missing[0]}",
                hint="a baseline of a part of the run would accept less than the run needs",
            )
    existing = {name: replaced_baseline(path, name)[1] for name in baselines}
    others: dict[str, Baseline] = {}
    if Path(path).exists():
        merged = merged_tolerances(_text(path, ""))
        lost = [name for name in merged or () if name and name not in baselines]
        if lost:
            raise UsageError(
                f"{Path(path)} has merge conflicts, and baselines of other runs: {', '.join(lost)}",
                hint="run gpuprobe baseline update without --run to rewrite all of them",
            )
        others = read_runs(path) if merged is None else {}
    others.pop("", None)
    written = {
        name: replace(baseline, tolerances={**existing[name], **(tolerance or {})})
        for name, baseline in baselines.items()
    }
    _write(path, dumps_runs(others | written))


def ensure_writable(*paths: StrPath | None) -> None:
    """Check that files can be written, before a program runs for them; None is skipped. Raises
    UsageError."""
    for path in paths:
        if path is None:
            continue
        file = Path(path)
        if file.is_dir():
            raise _cannot_write(file, "it is a folder")
        if not file.parent.is_dir():
            raise _cannot_write(file, "No such file or directory")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise _cannot_write(file, "Permission denied")


def _text(path: StrPath, hint: str) -> str:
    """The text of a baseline. ``hint``: what to do if the file is missing."""
    try:
        return read_text(path)
    except FileNotFoundError:
        raise UsageError(f"no baseline at {Path(path)}", hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"cannot read {Path(path)}: {reason}", hint="a baseline is a UTF-8 text file"
        ) from error


def _write(path: StrPath, text: str) -> None:
    try:
        with atomic_write(Path(path)) as file:
            file.write(text.encode())
    except OSError as error:
        raise _cannot_write(Path(path), error.strerror or str(error)) from error


def _cannot_write(path: Path, reason: str) -> UsageError:
    hint = "" if path.parent.is_dir() else f"the folder {path.parent} does not exist"
    return UsageError(f"cannot write {path}: {reason}", hint=hint)


def rank_file(path: Path, rank: int) -> Path:
    """The file of one rank's hazards, next to the ``path`` of all ranks'."""
    return path.with_name(f"{path.stem}.rank-{rank:05d}.json")


def clear_rank_file(path: Path) -> None:
    """Remove this rank's file of an earlier run, before the program runs."""
    from gpuprobe.sampler.environment import ranks

    rank, _, world_size = ranks()
    if world_size > 1:
        rank_file(path, rank).unlink(missing_ok=True)


def merged_hazards(found: Hazards, path: Path | None) -> Iterator[Hazards]:
    """The hazards to write to ``path``: only ``found`` if there is one rank, or no path.

    For several ranks, this rank's hazards are written next to ``path``, and those of all ranks so
    far are yielded: repeatedly if other ranks finish while they are being written. No rank waits
    for another; the last one to finish writes all of them.
    """
    from gpuprobe.hazards.findings.results import merge
    from gpuprobe.reporters.json.hazards import document
    from gpuprobe.sampler.environment import ranks

    rank, _, world_size = ranks()
    if world_size == 1 or path is None:
        yield found
        return
    with atomic_write(rank_file(path, rank)) as stream:
        stream.write(json.dumps(document(found), indent=2).encode("ascii"))
    files = [rank_file(path, number) for number in range(world_size)]
    finished: list[tuple[int, int]] = []
    while True:
        before = finished
        finished = [
            (number, file.stat().st_mtime_ns) for number, file in enumerate(files) if file.exists()
        ]
        if finished == before:
            return
        yield merge({number: _read_rank(files[number]) for number, _ in finished}, world_size)


def _read_rank(path: Path) -> Hazards:
    from gpuprobe.reporters.json.hazards import from_document

    try:
        return from_document(json.loads(read_text(path)), str(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
