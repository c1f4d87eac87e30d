"""What is missing from a recording, so that a check of it would compare a part of the run only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from gpuprobe.model.run.columns import INDEX
from gpuprobe.model.run.recording import RankRecording, Recording

NO_END = (
    "the recording has no end: the program was killed, exited without Python's shutdown "
    "(os._exit, exec), or its last records could not be written"
)
"""For a program that does not run any more."""

NO_END_YET = f"{NO_END}; or it is still running"

_FEW = 8
"""Ranks, or processes, that a sentence names."""


def absent_ranks(recording: Recording) -> tuple[int, str]:
    """How many ranks of the job are not in the recording, and the first of them, as text."""
    present = {rank.session.rank for rank in recording.ranks}
    size = max((rank.session.world_size for rank in recording.ranks), default=0)
    # The size comes from a file and may be huge, so no loop covers all of them.
    few = list(islice((rank for rank in range(size) if rank not in present), _FEW))
    count = size - sum(rank < size for rank in present)
    return count, ", ".join(map(str, few)) + (", …" if count > len(few) else "")


def missing_parts(recording: Recording, *, ended: bool = False) -> tuple[str, ...]:
    """What is missing, a sentence each; empty for a complete recording and for a snapshot.
    ``ended``: its processes do not run any more.

    A process that the program started counts only if records of it could not be written: that it
    has no end is normal, as programs end such processes by signals.
    """
    if recording.kind != "recording":
        return ()
    found: list[str] = []
    count, names = absent_ranks(recording)
    if count:
        found.append(f"{count} of its ranks left no records (rank {names})")
    several = len(recording.ranks) > 1
    for rank in recording.ranks:
        where = f"rank {rank.session.rank}: " if several else ""
        found += (where + text for text in missing_of(rank, ended=ended))
    for child in recording.load_children():
        if child.gap is not None:
            found.append(
                f"process {child.session.pid}, which the program started: {child.gap.text}"
            )
    return tuple(found)


def missing_of(rank: RankRecording, *, ended: bool = False) -> tuple[str, ...]:
    """What is missing from the recording of one rank, a sentence each."""
    return tuple(_missing_of(rank, ended))


def _missing_of(rank: RankRecording, ended: bool) -> Iterator[str]:
    if rank.gap is not None:
        yield rank.gap.text
    elif lost := _lost_steps(rank):
        yield f"{lost} of its steps are missing"
    if rank.damaged:
        yield f"{rank.damaged} of its lines {'is' if rank.damaged == 1 else 'are'} damaged"
    if rank.end is None:
        yield NO_END if ended else NO_END_YET
        return
    for fault in rank.end.gpuprobe_faults[:1]:
        yield f"gpuprobe failed and stopped recording: {fault}"
    if rank.end.incomplete_processes:
        few = ", ".join(map(str, rank.end.incomplete_processes[:_FEW]))
        yield f"processes that the program started could not be recorded completely: {few}"


def _lost_steps(rank: RankRecording) -> int:
    """Steps before the last one that are not there."""
    indices = rank.columns.number(*INDEX)
    return indices[-1] + 1 - len(indices) if len(indices) else 0
