"""Jobs of several ranks: what their dumps show of a hang."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuprobe.model.run.hang import HangReport

__all__ = ["hang"]


def hang(directory: str | os.PathLike[str]) -> HangReport:
    """Why a job hangs, from the Flight Recorder dumps in a directory (a file for each rank, whose
    name ends with the rank): the first collective that ranks have not called, or in which they
    differ, with the lines that called it. The dumps are read, never executed.

    Raises NotARecording if there are no dumps, DataError for one that cannot be read.
    """
    from gpuprobe.analysis.ranks.hang import find_hangs
    from gpuprobe.model.run.hang import HangReport
    from gpuprobe.recording.many.flight import read_dumps

    dumps, skipped = read_dumps(Path(directory))
    members = {
        (name, group.desc): group.ranks
        for dump in dumps.values()
        for name, group in dump.pg_config.items()
    }
    calls = {rank: dump.entries for rank, dump in dumps.items()}
    groups, hangs = find_hangs(calls, members)
    return HangReport(os.fspath(directory), tuple(sorted(dumps)), groups, hangs, skipped)
