"""Jobs of several ranks as JSON documents: why one hangs, and speed on more ranks."""

from __future__ import annotations

from typing import Final

from gpuprobe.model.io.encoder import SPREAD, keys
from gpuprobe.model.place import Place
from gpuprobe.model.record import record
from gpuprobe.model.run.communication import Transfer
from gpuprobe.model.run.jobs import HangReport, HangSide, Scaling
from gpuprobe.reporters.json.documents import Document


@record(frozen=True)
class ProgramLine:
    """A line of the program; null if it is unknown."""

    file: str | None
    line: int | None
    function: str | None


def _line(row: HangSide | Transfer) -> ProgramLine:
    place = row.place
    if isinstance(place, Place):
        return ProgramLine(place.file, place.line, place.function)
    return ProgramLine(None, None, None)


HANG: Final = Document(
    "gpuprobe.hang",
    (1, 2),
    HangReport,
    "Why a distributed job hangs: the first collective of each process group that cannot end.",
    shapes={
        HangSide: {**keys("ranks op sequence state"), SPREAD: _line},
        Transfer: {**keys("op axis ranks dtype count payload wire"), SPREAD: _line},
    },
    added={"1.1": "communication arrivals", "1.2": "unreadable"},
)
"""History:
* 1.0: first version.
* 1.1: ``communication`` and ``arrivals``.
* 1.2: ``unreadable``.
"""


SCALING: Final = Document(
    "gpuprobe.scale",
    (1, 1),
    Scaling,
    "Speed on different numbers of ranks. Times are nanoseconds of one rank for one unit of work; "
    "losses are shares of total_ns and sum to lost.",
)
"""History:
* 1.0: first version.
* 1.1: ``predicted``.
"""
