"""What every engine provides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

from gpuprobe.allocator.replays.requests import Request
from gpuprobe.catalogue.gpu_model import GpuModel
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.plans.estimate import Margin
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace
from gpuprobe.model.values import Bytes


class EvidenceGrade(Enum):
    """What figures rest on, as every report states it."""

    HARDWARE = "measured on a GPU"
    NATIVE = (
        "torch's own CUDA code without a GPU: exact, but for workspaces of cuBLASLt and cuDNN and "
        "for what the driver takes"
    )
    VIRTUAL = "a model of torch's CUDA code"


ENGINES: Final = ("auto", "native", "virtual")
"""What ``--engine`` accepts: a GPU of this machine is used where no other is named."""


_NOTHING: Final = Bytes(0)


@dataclass(frozen=True)
class Order:
    """The GPUs that a program is to find, and how it runs there.

    ``gpu`` names entries of the catalogue: ``"2xa100-40gb"``. ``compute``: ``"real"`` computes all
    values on the CPU, ``"shapes"`` those of integers, masks and tensors of up to 1 MiB. ``conf``:
    allocator settings in place of ``PYTORCH_CUDA_ALLOC_CONF``. ``assume``: values for lines that
    read one that was not computed, as ``FILE:LINE=VALUE``. ``torch``: the version to simulate,
    ``""`` for the installed one. ``random``: ``"cuda"`` draws the numbers that the GPU would draw.
    ``endless``: devices never run out of memory.
    """

    gpu: str = "h100-80gb"
    compute: str = "real"
    conf: str | None = None
    assume: tuple[str, ...] = ()
    torch: str = ""
    random: str = "host"
    endless: bool = False


class SimulatedRank(Protocol):
    """The job that an estimated run is one rank of: `gpuprobe.planning.peers.Job`."""

    @property
    def rank(self) -> int:
        """From 0."""

    @property
    def ranks(self) -> int:
        """How many there are."""

    @property
    def peers(self) -> Any:
        """How the others are reached; None where they are not simulated."""


class EngineSession(Protocol):
    """A process that has the GPUs of an `Order`."""

    @property
    def engine(self) -> str:
        """``"native"`` or ``"virtual"``."""

    @property
    def assumed(self) -> Sequence[str]:
        """What the figures take for granted, a sentence each."""

    def start(self) -> None:
        """Give the process its GPUs."""

    def pause(self) -> None:
        """Take them away for now: `start` continues with the tensors on them."""

    def stop(self) -> None:
        """Take them away, as far as the engine can."""

    def keep_stacks(self) -> None:
        """Record the stack of every allocation from now on, before the first step too."""

    def read_unknown_as_nan(self) -> None:
        """Numbers that the program reads and that were not computed are NaN from now on; the
        session notes it.
        """

    def peaks(self) -> Mapping[int, tuple[int, int]]:
        """Peaks allocated and reserved of each GPU in use, by its number in the machine. Bytes."""


@dataclass
class DeviceRun:
    """What a whole run did on one GPU. ``number``: its number in the machine, ``index`` the
    program's. ``requests``: workspaces that libraries may have requested besides. ``margin``: by
    how much a model may be off.
    """

    index: int
    number: int
    model: GpuModel
    peak_allocated: int
    peak_reserved: int
    trace: MemoryTrace
    requests: Sequence[Request] = ()
    margin: Margin = field(default_factory=Margin)


@dataclass
class EngineRun:
    """What a whole run did, for the figures of an estimate.

    ``settings`` are those of the allocator, ``rank`` is one of ``ranks``. ``traffic`` is what was
    sent to other ranks, None for a single process; ``nccl_low`` to ``nccl_high`` the memory of the
    buffers for it. ``simulated``: the (major, minor) of the torch that was simulated, if it is not
    the installed one.
    """

    engine: str
    evidence: EvidenceGrade
    count: int
    devices: Sequence[DeviceRun]
    settings: AllocatorSettings
    compute: str
    ranks: int = 1
    rank: int = 0
    assumed: list[str] = field(default_factory=list)
    unused_assumptions: Sequence[str] = ()
    compiled: tuple[str, ...] = ()
    traffic: Any = None
    nccl_low: Bytes = _NOTHING
    nccl_high: Bytes = _NOTHING
    simulated: tuple[int, int] | None = None

    def assume(self, text: str) -> None:
        """Note what the figures take for granted, once."""
        if text not in self.assumed:
            self.assumed.append(text)


class Measurement(Protocol):
    """One estimated run on an engine. ``session`` is what the program finds."""

    @property
    def session(self) -> EngineSession:
        """The session that the run is made in."""

    def models(self) -> Mapping[int, GpuModel]:
        """The GPUs, by their number in the machine."""

    def assume(self, text: str) -> None:
        """Note what the figures take for granted, once."""

    def recorded(self, now_ns: Callable[[], int]) -> None:
        """A recorder was made, whose clock is ``now_ns``: collectives are timed by it."""

    @property
    def count(self) -> int:
        """GPUs of one process."""

    def explained(self, error: Exception) -> GpuprobeError | None:
        """The error in gpuprobe's words, where the engine is its reason."""

    def unwrapped(self, error: GpuprobeError) -> GpuprobeError:
        """An error as it was raised in a worker of a ``DataLoader``, which sends it as text."""

    def unknown_read(self) -> tuple[str, str]:
        """The first line that was given NaN for a value that was not computed, and the first whose
        size is the largest possible one; ``""`` for none.
        """

    def run(self, recording: Any) -> EngineRun:
        """What the run did, after `EngineSession.stop`, and by its ``recording``."""
