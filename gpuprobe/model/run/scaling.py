"""How much faster a program is on more ranks, and where the rest of their time goes."""

from __future__ import annotations

from gpuprobe.model.display import Displayed
from gpuprobe.model.record import record

STEP, RUN = "step", "run"


@record(frozen=True)
class ScaleRow:
    """One recording, next to the first. Times are nanoseconds of device time for one unit of work:
    ``total_ns`` is the sum of ``own_ns``, ``communication_ns`` (collectives, once all ranks are
    there: exposed, as nothing else happens meanwhile) and ``waiting_ns`` (until all are there). A
    part is None where waits were not recorded.

    ``throughput`` is units of work per second on all ranks; ``speedup`` that of the first times so
    many; ``efficiency`` the speed-up for each of the ranks that it takes, 1 where nothing is lost.
    The losses are shares of ``total_ns``, below 0 where something was gained, and sum to 1 -
    ``efficiency``.
    """

    name: str
    ranks: int
    steps: int
    total_ns: int
    own_ns: int | None
    communication_ns: int | None
    waiting_ns: int | None
    throughput: float
    speedup: float
    efficiency: float
    lost: float
    lost_own: float | None
    lost_communication: float | None
    lost_waiting: float | None


@record(frozen=True)
class Scaling(Displayed):
    """Recordings of one program on different numbers of ranks, compared with the first.

    ``work`` is what is the same in all: ``step`` (a step of a rank is one unit of work: each rank
    has a batch of the same size) or ``run`` (a whole run is one: the same data, divided).
    """

    work: str
    rows: tuple[ScaleRow, ...]

    def __repr__(self) -> str:
        return (
            "<scaling: "
            + ", ".join(f"{row.ranks} ranks {row.efficiency:.1%}" for row in self.rows)
            + ">"
        )
