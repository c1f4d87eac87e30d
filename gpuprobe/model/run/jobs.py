"""Several ranks of a job: speed on more ranks."""

from __future__ import annotations

from typing import Annotated

from gpuprobe.model.record import record
from gpuprobe.model.values import Displayed, OneOf

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
    recorded: Annotated[int, "ranks that were recorded: of a prediction, one may represent all"] = 0


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
