"""Why a distributed job hangs, as the dumps of its ranks show it."""

from __future__ import annotations

from dataclasses import field

from gpuprobe.model.bounds import Count, LineNumber
from gpuprobe.model.display import Displayed
from gpuprobe.model.place import SourceLine
from gpuprobe.model.record import record

MISSING, MISMATCH, STUCK = "missing", "mismatch", "stuck"


@record(frozen=True)
class FlightFrame:
    """A frame of a stack; the innermost comes first."""

    name: str = ""
    filename: str = ""
    line: LineNumber = 0


@record(frozen=True)
class FlightEntry:
    """One collective that a rank called, as torch's Flight Recorder has it."""

    profiling_name: str
    process_group: tuple[str, str]  # name and description
    state: str = ""
    collective_seq_id: Count = 0
    is_p2p: bool = False
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    frames: tuple[FlightFrame, ...] = ()


@record(frozen=True)
class FlightGroup:
    """A process group: ``ranks`` is a list as text, such as ``[0, 1]``."""

    name: str = ""
    desc: str = ""
    ranks: str = ""


@record(frozen=True)
class FlightDump:
    """What one rank dumped."""

    entries: tuple[FlightEntry, ...] = ()
    pg_config: dict[str, FlightGroup] = field(default_factory=dict)


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
class HangReport(Displayed):
    """All process groups of the dumps in a directory; ``skipped`` are files that are not dumps."""

    path: str
    ranks: tuple[int, ...]
    groups: int
    hangs: tuple[Hang, ...]
    skipped: tuple[str, ...]

    def __repr__(self) -> str:
        found = ", ".join(f"{hang.kind} in {hang.group}" for hang in self.hangs) or "no hang"
        return f"<dumps of {len(self.ranks)} ranks: {found}>"
