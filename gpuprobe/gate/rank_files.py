"""The hazards of a run of several ranks: each rank's result as a file, and all of them as one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprobe.errors import DataError
from gpuprobe.model.io.files import atomic_write, read_text

if TYPE_CHECKING:
    from gpuprobe.hazards.findings.results import Hazards


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
