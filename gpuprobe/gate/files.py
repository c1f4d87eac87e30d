"""The files of the gate: baselines of memory, known hazards, and the hazards of each rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpuprobe.errors import DataError, UsageError
from gpuprobe.model.io.files import atomic_write, read_regular, read_text

if TYPE_CHECKING:
    from gpuprobe.analysis.baseline import Baseline, Tolerance
    from gpuprobe.hazards.findings.known import KnownFinding
    from gpuprobe.hazards.findings.results import Hazards
    from gpuprobe.model.findings import Finding

StrPath = str | os.PathLike[str]


def read_baseline(path: StrPath, run: str = "") -> Baseline:
    """The baseline of a run; of a file with one baseline, which has no name, that one.

    Raises UsageError where there is no file, or no baseline of the run in it, and DataError for
    something else.
    """
    found = read_runs(path)
    if run not in found:
        raise _no_run(path, run, list(found))
    return found[run]


def read_runs(path: StrPath) -> dict[str, Baseline]:
    """All baselines of a file, by the names of their runs; "" of the only one of a file that names
    none. Raises UsageError where there is none, DataError for something else."""
    from gpuprobe.analysis.baseline import loads_runs

    hint = "create it with gpuprobe baseline update and the same arguments"
    return loads_runs(_text(path, hint), str(Path(path)))


def run_names(path: StrPath) -> list[str]:
    """The runs that a file has baselines of, one with merge conflicts too: empty where there is no
    file. Raises DataError for what is no baseline."""
    from gpuprobe.analysis.baseline import merged_tolerances

    if not Path(path).exists():
        return []
    merged = merged_tolerances(_text(path, ""))
    return list(read_runs(path) if merged is None else merged)


def replaced_baseline(
    path: StrPath, run: str = ""
) -> tuple[Baseline | None, Mapping[str, Tolerance]]:
    """The baseline that is to be written anew, and its tolerances. One with merge conflicts is
    none, and has the tolerances of both sides; a run that is new to the file has those of the
    baseline that has no name. Raises DataError for what is no baseline, UsageError where the file
    has several runs and none is named."""
    from gpuprobe.analysis.baseline import merged_tolerances

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
    return before, (before or found.get("") or _EMPTY).tolerances or {}


@dataclass(frozen=True, slots=True)
class _Empty:
    tolerances: Mapping[str, Tolerance] | None = None


_EMPTY: Final = _Empty()


def _no_run(path: StrPath, run: str, names: Sequence[str]) -> UsageError:
    where = Path(path)
    if not run:
        return UsageError(
            f"{where} has baselines of several runs: {', '.join(names)}",
            hint="choose one with --run NAME",
        )
    return UsageError(
        f"{where} has no baseline of the run {run!r}",
        hint=f"gpuprobe baseline update --run {run} adds it",
    )


def write_baseline(
    baseline: Baseline,
    path: StrPath,
    tolerance: Mapping[str, Tolerance] | None = None,
    run: str = "",
) -> None:
    """`write_runs` of one."""
    write_runs({run: baseline}, path, tolerance)


def write_runs(
    baselines: Mapping[str, Baseline],
    path: StrPath,
    tolerance: Mapping[str, Tolerance] | None = None,
) -> None:
    """Write baselines by the names of their runs, the file whole or not at all, with ``tolerance``.
    Tolerances of baselines that are there are kept, and so are the baselines of other runs. Raises
    UsageError where it cannot be written, DataError where what is there is none."""
    from gpuprobe.analysis.baseline import dumps_runs, merged_tolerances

    kept = {name: replaced_baseline(path, name)[1] for name in baselines}
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
        name: replace(baseline, tolerances={**kept[name], **(tolerance or {})})
        for name, baseline in baselines.items()
    }
    _write(path, dumps_runs(others | written))


def read_known(path: StrPath) -> tuple[KnownFinding, ...]:
    """The hazards that are known. Raises UsageError where there is no such file, DataError for
    something else."""
    from gpuprobe.hazards.findings.known import loads

    return loads(_text(path, "add --hazards-baseline-update to create it"), str(Path(path)))


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
    """Where a rank's own result lies, next to the ``path`` of all of them."""
    return path.with_name(f"{path.stem}.rank-{rank:05d}.json")


def clear_rank_file(path: Path) -> None:
    """Before the program runs: what this rank wrote in an earlier run is not this run's."""
    from gpuprobe.sampler.environment import ranks

    rank, _, world_size = ranks()
    if world_size > 1:
        rank_file(path, rank).unlink(missing_ok=True)


def together(found: Hazards, path: Path | None) -> Iterator[Hazards]:
    """What is to be written: ``found`` alone where there is one rank, or no ``path``.

    Else this rank's result is written next to ``path``, and what all ranks have found so far is
    given: again as long as other ranks finish while it is being written. No rank waits for
    another; the one that finishes last has written everything.
    """
    from gpuprobe.hazards.findings.ranks import merge
    from gpuprobe.reporters.json.hazards import document
    from gpuprobe.sampler.environment import ranks

    rank, _, world_size = ranks()
    if world_size == 1 or path is None:
        yield found
        return
    with atomic_write(rank_file(path, rank)) as stream:
        stream.write(json.dumps(document(found), indent=2).encode("ascii"))
    files = [rank_file(path, number) for number in range(world_size)]
    there: list[tuple[int, int]] = []
    while True:
        before = there
        there = [
            (number, file.stat().st_mtime_ns) for number, file in enumerate(files) if file.exists()
        ]
        if there == before:
            return
        yield merge({number: _read(files[number]) for number, _ in there}, world_size)


def _read(path: Path) -> Hazards:
    from gpuprobe.reporters.json.hazards import from_document

    try:
        return from_document(json.loads(read_text(path)), str(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
