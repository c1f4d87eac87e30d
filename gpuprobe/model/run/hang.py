"""Why a distributed job hangs, as the dumps of its ranks show it."""

from __future__ import annotations

from gpuprobe.model.bounds import Count
from gpuprobe.model.display import Displayed
from gpuprobe.model.place import SourceLine
from gpuprobe.model.record import record
from gpuprobe.model.run.communication import Transfer

MISSING, MISMATCH, STUCK = "missing", "mismatch", "stuck"


@record(frozen=True)
class HangSide:
    """Ranks that do the same. ``op`` is the collective with its shapes, "" if they called none;
    ``sequence`` its number in the group; ``place`` the program's line; ``state`` as torch has it.
    """

    ranks: tuple[int, ...]
    op: str
    sequence: int | None
    place: SourceLine
    state: str


@record(frozen=True)
class Hang:
    """The first collective of a process group that cannot end.

    ``kind``: ``missing`` (ranks of ``absent`` have not called it; each is shown with the last
    collective that it called), ``mismatch`` (the ranks of ``sides`` call different ones at the same
    place of the sequence) or ``stuck`` (all have called it, and not all have completed it).
    ``no_dump`` are ranks of the group without a dump.
    """

    kind: str
    group: str
    sequence: int
    sides: tuple[HangSide, ...]
    absent: tuple[HangSide, ...]
    no_dump: tuple[int, ...]


@record(frozen=True)
class Arrivals:
    """How often a rank was the ``last`` of its group to call one of the ``collectives`` that all
    ranks of their groups have dumped, and by how long after the one before it in total:
    ``late_ns``, by the clocks of the machines.
    """

    rank: int
    collectives: Count
    last: Count
    late_ns: int


@record(frozen=True)
class HangReport(Displayed):
    """All process groups of the dumps in a directory; ``skipped`` are files that are not dumps.
    ``communication`` is what the first of ``ranks`` has called, as far as its dump goes back, with
    a row for each kind of operation and place.
    """

    path: str
    ranks: tuple[int, ...]
    groups: int
    hangs: tuple[Hang, ...]
    skipped: tuple[str, ...]
    communication: tuple[Transfer, ...] = ()
    arrivals: tuple[Arrivals, ...] = ()

    def __repr__(self) -> str:
        found = ", ".join(f"{hang.kind} in {hang.group}" for hang in self.hangs) or "no hang"
        return f"<dumps of {len(self.ranks)} ranks: {found}>"
