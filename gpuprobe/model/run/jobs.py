"""Several ranks of a job: speed on more ranks, and why a job hangs."""

from __future__ import annotations

from typing import Annotated

from gpuprobe.model.place import SourceLine
from gpuprobe.model.record import record
from gpuprobe.model.run.communication import Transfer
from gpuprobe.model.values import Count, Displayed, OneOf

STEP, RUN = "step", "run"


@record(frozen=True)
class ScaleRow:
    """One recording, next to the first. Times are nanoseconds of device time for one unit of work:
    ``total_ns`` is the sum of ``own_ns``, ``communication_ns`` (collectives, once all ranks are
    there: exposed, as nothing else happens meanwhile) and ``waiting_ns`` (until all are there). A
    part is None where waits were not recorded.

    ``throughput`` is units of work per second on all ranks; ``speedup`` its ratio to the first
    recording's; ``efficiency`` the speed-up divided by the ratio of ranks, 1 without losses. The
    losses are shares of ``total_ns``, below 0 for a gain, and sum to 1 - ``efficiency``.
    """

    name: str
    ranks: int
    steps: int
    total_ns: Annotated[int, "device time for one unit of work"]
    own_ns: int | None
    communication_ns: int | None
    waiting_ns: int | None
    throughput: Annotated[float, "units of work per second, on all ranks"]
    speedup: float
    efficiency: float
    lost: Annotated[float, "1 - efficiency"]
    lost_own: float | None
    lost_communication: float | None
    lost_waiting: float | None


@record(frozen=True)
class Scaling(Displayed):
    """Recordings of one program on different numbers of ranks, compared with the first.

    ``work`` is what is the same in all: ``step`` (a step of a rank is one unit of work: each rank
    has a batch of the same size) or ``run`` (a whole run is one: the same data, divided).
    ``predicted``: the times are predictions, of simulated GPUs.
    """

    work: Annotated[str, OneOf((STEP, RUN)), "what is one unit of work"]
    rows: tuple[ScaleRow, ...]
    predicted: Annotated[bool, "of simulated GPUs: nothing was measured"] = False

    def __repr__(self) -> str:
        return (
            "<scaling: "
            + ", ".join(f"{row.ranks} ranks {row.efficiency:.1%}" for row in self.rows)
            + ">"
        )


MISSING, MISMATCH, STUCK = "missing", "mismatch", "stuck"


@record(frozen=True)
class HangSide:
    """Ranks in the same state. ``op`` is the collective with its shapes, "" if they called none;
    ``sequence`` its number in the group; ``place`` the program's line; ``state`` as torch has it.
    """

    ranks: tuple[int, ...]
    op: Annotated[str, "the collective with its shapes; empty if none was called"]
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

    kind: Annotated[str, OneOf((MISSING, MISMATCH, STUCK))]
    group: str
    sequence: Annotated[int, "number of the collective in its group"]
    sides: tuple[HangSide, ...]
    absent: Annotated[
        tuple[HangSide, ...], "ranks that have not called it, with the last that they called"
    ]
    no_dump: tuple[int, ...]


@record(frozen=True)
class Arrivals:
    """How often a rank was the ``last`` of its group to call one of the ``collectives`` that all
    ranks of their groups have dumped, and by how long after the one before it in total:
    ``late_ns``, by the clocks of the machines.
    """

    rank: int
    collectives: Annotated[Count, "that all ranks of its groups have dumped, with times"]
    last: Annotated[Count, "how often the rank was the last to call one"]
    late_ns: Annotated[
        int,
        "by how much, in total, after the rank before it; by the clocks of the machines",
    ]


@record(frozen=True)
class UnreadableDump:
    """A dump that cannot be read, such as that of a rank that ended while it wrote it."""

    rank: int
    reason: str


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
    communication: Annotated[
        tuple[Transfer, ...],
        "what the first rank has called, as far as its dump goes back; bytes",
    ] = ()
    arrivals: Annotated[tuple[Arrivals, ...], "ranks that were the last to call a collective"] = ()
    unreadable: Annotated[tuple[UnreadableDump, ...], "dumps that cannot be read"] = ()

    def __repr__(self) -> str:
        found = ", ".join(f"{hang.kind} in {hang.group}" for hang in self.hangs) or "no hang"
        return f"<dumps of {len(self.ranks)} ranks: {found}>"
