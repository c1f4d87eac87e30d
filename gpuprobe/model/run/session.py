"""What was recorded: environment, steps, phases, and how it ended.

All durations are nanoseconds of a monotonic clock; all offsets count from the start of the
session; ``Session.started_at`` alone is wall-clock time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Final

from gpuprobe.model.memory import AllocatorCounts, Category
from gpuprobe.model.record import record
from gpuprobe.model.run.communication import Exchange
from gpuprobe.model.run.holders import Holder
from gpuprobe.model.run.launches import NOT_COUNTED, StepLaunches
from gpuprobe.model.run.work import NOT_FOLLOWED, StepWork
from gpuprobe.model.values import (
    MOST_BYTES,
    MOST_DEVICES,
    AtMost,
    Bounds,
    Bytes,
    Count,
    Nanoseconds,
    Peak,
    ProcessId,
    Rank,
    ReadStatus,
    Timestamp,
    Unavailable,
    World,
)

_NOT_COLLECTED = Unavailable("not collected")

# Tensors may have memory that the allocator does not count: the rest is below 0 then.
BytesOrLess = Annotated[Bytes, Bounds(-MOST_BYTES, MOST_BYTES)]
_NOT_RECORDED = Unavailable("not recorded", ReadStatus.NOT_COLLECTED)
_NOT_SET = Unavailable("not set")


@record(frozen=True, slots=True)
class Environment:
    """Where the recording was made. A version that could not be read is
    `Unavailable`, with the reason."""

    gpuprobe: str
    python: str
    platform: str
    hostname: str
    torch: str | Unavailable = _NOT_COLLECTED
    cuda_runtime: str | Unavailable = _NOT_COLLECTED  # what torch was built with
    cuda_driver: str | Unavailable = _NOT_COLLECTED
    allocator_conf: str = ""  # PYTORCH_CUDA_ALLOC_CONF / PYTORCH_ALLOC_CONF, as set
    cuda_visible_devices: str | Unavailable = _NOT_SET
    cpu_count: Count = 0
    total_memory: Bytes | Unavailable = _NOT_COLLECTED  # host RAM


@record(frozen=True, slots=True)
class Session:
    """One recorded process."""

    started_at: Timestamp  # seconds since the Unix epoch
    pid: ProcessId
    argv: tuple[str, ...]
    level: str  # "counters" or "trace"
    devices: Annotated[
        tuple[str, ...], AtMost(MOST_DEVICES)
    ]  # "cpu", "cuda:0", …: what memory is accounted on
    cwd: str = ""
    rank: Rank = 0
    local_rank: Rank = 0
    world_size: World = 1
    virtual: bool = False  # "cuda:0", … are simulated: their work takes no time


@dataclass(frozen=True, slots=True)
class AllocatorActivity:
    """What the allocator did in a window: counts, not bytes."""

    device_allocs: Count = 0  # cudaMalloc (or page map) calls
    device_frees: Count = 0
    alloc_retries: Count = 0  # cudaMalloc failed once; the cache was flushed and it was retried
    ooms: Count = 0


@dataclass(frozen=True, slots=True)
class DeviceWindow:
    """One device's memory between two instants. A peak is exact or a range."""

    device: str
    start: AllocatorCounts
    end: AllocatorCounts
    peak_allocated: Peak | Unavailable = _NOT_COLLECTED
    peak_reserved: Peak | Unavailable = _NOT_COLLECTED
    activity: AllocatorActivity | Unavailable = _NOT_COLLECTED
    # At the end: free parts of segments that are partly in use, which other pools and larger
    # allocations cannot use.
    inactive_split: Bytes | Unavailable = _NOT_COLLECTED
    # At the end of a step, and not more than once a second: all memory in use on the device, by
    # any process (cudaMemGetInfo). Minus reserved memory: contexts, libraries, other processes.
    device_used: Bytes | Unavailable = _NOT_COLLECTED
    # Likewise, of a GPU that is not simulated: the clock of its multiprocessors, MHz (NVML), and
    # why it is below its maximum.
    sm_clock: Count | Unavailable = _NOT_RECORDED
    slowed: tuple[str, ...] = ()

    @property
    def not_torch(self) -> Bytes | Unavailable:
        """Memory in use on the device that torch's allocator of this process does not hold."""
        used, reserved = self.device_used, self.end.reserved
        if isinstance(used, Unavailable):
            return used
        if isinstance(reserved, Unavailable):
            return reserved
        return Bytes(max(0, used - reserved))


Windows = Annotated[tuple[DeviceWindow, ...], AtMost(MOST_DEVICES)]


@dataclass(frozen=True, slots=True)
class HostWindow:
    """The process's resident memory between two instants. Unit: bytes."""

    rss_start: Bytes | Unavailable = _NOT_COLLECTED
    rss_end: Bytes | Unavailable = _NOT_COLLECTED
    rss_peak: Peak | Unavailable = _NOT_COLLECTED
    # At the end of a step, with CUDA: pinned memory in use, and held by torch (with what is
    # cached; both rounded up to powers of two, as torch counts them).
    pinned: Bytes | Unavailable = _NOT_COLLECTED
    pinned_held: Bytes | Unavailable = _NOT_COLLECTED


@dataclass(frozen=True, slots=True)
class Phase:
    """All the time a step spent in one phase: ``data``, ``forward``, ``backward``,
    ``optimizer``, ``setup`` (before training began), ``other``, or the user's own name.
    Nested phases are paths (``forward/attention``); a parent's time and memory include its
    children's.
    """

    path: str
    start_ns: Nanoseconds  # of its first entry, from the start of the session
    duration_ns: Nanoseconds  # summed over its entries
    entries: Count
    windows: Windows = ()
    host: HostWindow = field(default_factory=HostWindow)
    # The GPU's time between the same places of the program as duration_ns, by events on the
    # current stream.
    gpu_ns: Nanoseconds | Unavailable = _NOT_COLLECTED
    # Of a top-level phase in a job of several ranks: how long its thread was blocked in
    # collectives, until the other ranks had called them and they were complete.
    waited_ns: Nanoseconds | Unavailable = _NOT_COLLECTED
    # Likewise: in calls that move tensors to a device.
    copied_ns: Nanoseconds | Unavailable = _NOT_COLLECTED

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class KnownTensors:
    """Bytes of the tensors that could be named, by category, on one device; each storage
    counted once. ``rest`` is allocated memory that none of them explains. At level ``counters``
    steps in which they cannot have changed repeat the previous figures.
    """

    device: str
    by_category: dict[Category, Bytes] = field(default_factory=dict)
    rest: BytesOrLess | Unavailable = _NOT_COLLECTED

    @property
    def known(self) -> Bytes:
        return Bytes(sum(self.by_category.values()))


@dataclass(frozen=True, slots=True)
class Collective:
    """Calls of one ``torch.distributed`` operation in one step. ``bytes`` is what this rank
    passed in, ``wire`` what it sends over its links, in total. ``host_ns`` is how long the calls
    blocked their thread: only for their start if they are asynchronous (NCCL, ``async_op=True``;
    waiting is then the operation ``wait``).
    """

    op: str
    count: Count
    bytes: Bytes
    host_ns: Nanoseconds | Unavailable = _NOT_COLLECTED
    wire: Bytes | Unavailable = _NOT_COLLECTED


@dataclass(frozen=True, slots=True)
class HostWait:
    """Calls of one function by which the host waits for the GPU, in one step: how many, and how
    long they took.
    """

    call: str
    count: Count
    ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class Placed:
    """A module, an input or a batch, and the device it is on.

    ``what``: ``module`` (``name`` is its dotted path; all below it is on that device; ``bytes``
    are its parameters and buffers), ``input`` (an argument of the model) or ``batch`` (what a
    DataLoader returned). ``kind`` is the class of a module, and ``pageable``, ``pinned`` or "" for
    the others. For inputs and batches, bytes are those of one step.
    """

    what: str
    name: str
    device: str
    bytes: Bytes
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One training step. Its phases of depth one cover it without gaps or overlaps:
    their durations sum to the step's. A later step record with the same index replaces an
    earlier one (a second optimizer's step was found to belong to it).
    """

    index: Count
    start_ns: Nanoseconds
    duration_ns: Nanoseconds
    phases: tuple[Phase, ...] = ()
    windows: Windows = ()
    host: HostWindow = field(default_factory=HostWindow)
    tensors: Annotated[
        tuple[KnownTensors, ...], AtMost(MOST_DEVICES)
    ] = ()  # at the end of the step
    traces: tuple[str, ...] = ()  # names of the trace chunks that cover it
    collectives: tuple[Collective, ...] = ()
    placement: tuple[Placed, ...] = ()  # of the first steps, where it differs from the one before
    # "optimizer": an optimizer's step closed it; "user": marked by the program; "inference": the
    # end of a model's call in inference_mode, or of a call of its generate, of a program without an
    # optimizer; "end": the session ended first (evaluation after training, or an exception): not a
    # full step.
    ended_by: str = "optimizer"
    gpu_ns: Nanoseconds | Unavailable = _NOT_COLLECTED  # as of a phase
    exchanges: tuple[Exchange, ...] = ()  # each operation with other ranks, of the first steps
    # Of traced steps, on simulated GPUs.
    launches: StepLaunches | Unavailable = NOT_COUNTED
    work: StepWork | Unavailable = NOT_FOLLOWED
    # On a GPU that is not simulated: calls of torch.cuda's synchronize, of streams' and events',
    # of item(), tolist() and cpu() of its tensors.
    host_waits: tuple[HostWait, ...] | Unavailable = _NOT_RECORDED


@record(frozen=True, slots=True)
class LaterUses:
    """Blocks that were alive at the end of ``trace``, and that ``step`` was the first to use after
    it: rows of the events of the trace, and of its baseline.
    """

    trace: str
    step: Count
    events: tuple[Count, ...]
    baseline: tuple[Count, ...]


@record(frozen=True, slots=True)
class HeldRows:
    """Blocks that were alive at the end of ``trace``, that no later step has used, and that
    ``holder`` held when a step, or the program, ended: rows of the events of the trace, and of its
    baseline. ``sizes``: by the step after which it was searched, how many elements the outermost
    container on the path had.
    """

    trace: str
    holder: Holder
    events: tuple[Count, ...]
    baseline: tuple[Count, ...]
    sizes: tuple[tuple[Count, Count], ...] = ()


@record(frozen=True, slots=True)
class BlindSpot:
    """Something this recording could not see, and what that means for its numbers."""

    what: str
    consequence: str


JOB_OF_ONE: Final = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""The variables of `torchrun` for a job of one process, with a port that is free."""


@record(frozen=True, slots=True)
class ProgramError:
    """The exception that ended the recorded program. ``place``: the innermost line of the program
    that it passed through, as ``file:line``; empty if unknown.
    """

    type: str
    message: str
    out_of_memory: bool = False
    place: str = ""

    @property
    def located(self) -> str:
        """The message, with the place."""
        return f"{self.message} (at {self.place})" if self.place else self.message

    @property
    def text(self) -> str:
        """The error in one line, with its place."""
        first = replace(self, message=self.message.partition("\n")[0])
        return f"{first.type}: {first.located}"

    @property
    def lacks_launcher(self) -> bool:
        """Whether a variable is missing that launchers set: `torchrun`, for the rendezvous by
        ``env://`` (torch/distributed/rendezvous.py), or for the program itself.
        """
        if self.type == "KeyError":
            return self.message.strip("'\"") in JOB_OF_ONE
        return any(f"environment variable {name} expected" in self.message for name in JOB_OF_ONE)


@record(frozen=True, slots=True)
class Gap:
    """The records, and trace chunks, that could not be written so far: a later gap includes an
    earlier one. ``steps`` of the ``records`` are steps, from ``first_step`` to ``last_step``.
    """

    reason: str
    records: Count
    steps: Count = 0
    first_step: Count | None = None
    last_step: Count | None = None
    traces: Count = 0

    def with_record(self, step: int | None = None) -> Gap:
        """With one more record: of the step with this index, if it is one."""
        if step is None:
            return replace(self, records=self.records + 1)
        first = step if self.first_step is None else min(self.first_step, step)
        last = step if self.last_step is None else max(self.last_step, step)
        return replace(
            self,
            records=self.records + 1,
            steps=self.steps + 1,
            first_step=first,
            last_step=last,
        )

    @property
    def contents(self) -> str:
        """What is missing: ``58 records (58 of them steps, between step 2 and step 59)``."""
        parts = [f"{self.records:,} record{'s' * (self.records != 1)}"] if self.records else []
        if self.steps:
            of_them = "" if self.steps == self.records else f"{self.steps:,} of them of steps, "
            where = f"step {self.first_step}"
            if self.first_step != self.last_step:
                where = f"between step {self.first_step} and step {self.last_step}"
            parts[0] += f" ({of_them}{where})"
        if self.traces:
            parts.append(f"{self.traces:,} trace chunk{'s' * (self.traces != 1)}")
        return " and ".join(parts)

    @property
    def text(self) -> str:
        """The gap as a sentence."""
        return f"{self.contents} could not be written: {self.reason}"


@record(frozen=True, slots=True)
class PinnedLine:
    """Pinned host memory that a line requested, in ``tensors`` tensors, when the program had
    requested the most. torch's allocator holds more: it rounds each request up to a power of two.
    """

    place: str
    bytes: Bytes
    tensors: Count


@record(frozen=True, slots=True)
class EpochEnd:
    """Where gpuprobe ended the training of a program that would have gone on for longer: after so
    many ``steps``, which are calls of optimizers' ``step``, or backward passes of a program without
    one. ``text``: what was run then, and what was not, as a sentence. ``evaluated``: whether all
    was that comes before the next training step, such as an evaluation.
    """

    steps: Count
    text: str
    evaluated: bool


MOST_INCOMPLETE: Final = 1_000
"""Processes that `SessionEnd.incomplete_processes` has at most."""


@record(frozen=True, slots=True)
class SessionEnd:
    """How the session ended. A recording without one is still being written; or its program was
    killed, or exited without Python's shutdown, or this record could not be written.
    """

    duration_ns: Nanoseconds
    error: ProgramError | None = None
    gpuprobe_faults: tuple[str, ...] = ()  # internal errors of gpuprobe, which the run survived
    # What torch.compile did, as text: its graphs, graph breaks with their lines and reasons, and
    # recompilations.
    compiled: tuple[str, ...] = ()
    # The names of the GPUs by index, as torch reports them; none if CUDA was not in use.
    gpus: Annotated[tuple[str, ...], AtMost(MOST_DEVICES)] = ()
    holders: tuple[Holder, ...] = ()  # at level trace: what may keep memory that grows
    pinned: tuple[PinnedLine, ...] = ()  # at level trace, on simulated GPUs
    # Processes that the program started and whose recordings have gaps, or could not be created.
    incomplete_processes: Annotated[tuple[ProcessId, ...], AtMost(MOST_INCOMPLETE)] = ()
    epoch: EpochEnd | None = None
    kept_files: tuple[str, ...] = ()  # notes of `gpuprobe.kept_files`
