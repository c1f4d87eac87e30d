"""A recording in memory: what every report, screen and check reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from gpuprobe.model.display import Displayed
from gpuprobe.model.findings import Finding
from gpuprobe.model.run.children import ChildProcess
from gpuprobe.model.run.columns import StepColumns, columns_of, traced_steps
from gpuprobe.model.run.session import BlindSpot, Environment, Session, SessionEnd, Step
from gpuprobe.model.trace import MemoryTrace

SCHEMA = "gpuprobe.recording"
"""What the first line of every rank's stream says it is."""

SCHEMA_VERSION = (2, 4)
"""(major, minor). A newer major is refused; a newer minor only adds keys.

History:
* 1.0: first version; the header has ``format`` and ``writer`` for ``schema`` and ``gpuprobe``.
* 2.0: the header and the findings are as in every document; ``Session.virtual``. 1.x is still read.
* 2.1: ``Collective.wire``.
* 2.2: ``Phase.waited_ns``.
* 2.3: ``Step.exchanges``, ``SessionEnd.compiled``.
* 2.4: ``Step.launches``.
"""


@dataclass(slots=True)
class RankRecording:
    """What one process (one rank) recorded.

    The ``steps`` of a large recording are decoded when they are used (`columns` has the figures
    of all). ``end`` is None while the process is still running, or if it was killed. ``traces`` are
    loaded on demand: `load_traces` yields one `MemoryTrace` per chunk (per step and device),
    and `traces_of` only those of one step.
    """

    session: Session
    environment: Environment
    steps: Sequence[Step] = ()
    findings: tuple[Finding, ...] = ()
    blind_spots: tuple[BlindSpot, ...] = ()
    end: SessionEnd | None = None
    load_traces: Callable[[], Iterator[MemoryTrace]] = field(default=lambda: iter(()))
    truncated: bool = False  # the last line was torn: the writer was killed, or is writing
    load_trace: Callable[[str], MemoryTrace] | None = None  # one chunk by its name
    _columns: StepColumns | None = field(default=None, init=False, repr=False, compare=False)
    _in_use: WeakValueDictionary[str, MemoryTrace] = field(
        default_factory=WeakValueDictionary, init=False, repr=False, compare=False
    )

    @property
    def columns(self) -> StepColumns:
        """The figures of all steps; those of a large recording were read as columns."""
        found = self._columns
        if found is None:
            found = columns_of(self.steps) or StepColumns.of(self.steps)
            self._columns = found
        return found

    def traced_steps(self) -> list[Step]:
        """The steps that may have traces; of a large recording no others are decoded."""
        if self.load_trace is None:  # the traces are found by the index of their step
            return list(self.steps)
        return traced_steps(self.steps)

    def traces_of(self, step: Step) -> Iterator[MemoryTrace]:
        """The traces of one step, one per device, read now; one that somebody still holds is
        not read again.

        Raises DataError where a chunk is missing or damaged.
        """
        if self.load_trace is not None:
            for name in step.traces:
                trace = self._in_use.get(name)
                if trace is None:
                    trace = self._in_use[name] = self.load_trace(name)
                yield trace
        else:
            yield from (trace for trace in self.load_traces() if trace.step == step.index)


@dataclass(slots=True)
class Recording(Displayed):
    """A recording, or a torch memory snapshot read as one.

    A snapshot has one rank, no steps, and one trace per device.
    """

    path: str
    schema_version: tuple[int, int]
    ranks: tuple[RankRecording, ...]
    kind: str = "recording"  # or "snapshot"
    load_children: Callable[[], tuple[ChildProcess, ...]] = field(default=tuple, repr=False)
    """Reads what processes recorded that the program started and that used a GPU, without those
    that are ranks of a job."""

    def __repr__(self) -> str:
        ranks = "" if len(self.ranks) == 1 else f", {len(self.ranks)} ranks"
        steps = f", {len(self.steps)} steps" if self.steps else ""
        return f"<{self.kind} {self.path}{ranks}{steps}>"

    @property
    def steps(self) -> Sequence[Step]:
        """The steps of the first rank."""
        return self.ranks[0].steps if self.ranks else ()
