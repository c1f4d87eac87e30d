"""The interface of the engines: options, a session, and the results of an estimated run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

from gpuprobe.catalogue.gpu_model import GpuModel
from gpuprobe.errors import GpuprobeError, ValueNeeded
from gpuprobe.model.plans.estimate import Margin
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace
from gpuprobe.model.values import Bytes

if TYPE_CHECKING:
    from gpuprobe.model.run.recording import Recording
    from gpuprobe.torch_support.traffic import Traffic


class EvidenceGrade(Enum):
    """The evidence for figures, as every report states it."""

    HARDWARE = "measured on a GPU"
    NATIVE = (
        "torch's own CUDA code without a GPU: exact, but for workspaces of cuBLASLt and cuDNN and "
        "for what the driver takes"
    )
    VIRTUAL = "a model of torch's CUDA code"


ENGINES: Final = ("auto", "native", "virtual")
"""The values of ``--engine``. Without it, and without ``--gpu``, this machine's GPUs are used."""


_NOTHING: Final = Bytes(0)


@dataclass(frozen=True)
class EngineOptions:
    """The simulated GPUs that a program finds, and the options of the simulation.

    ``gpu`` names entries of the catalogue: ``"2xa100-40gb"``. ``compute``: ``"real"`` computes all
    values on the CPU, ``"shapes"`` those of integers, masks and tensors of up to 1 MiB, ``"auto"``
    all while they cost seconds, then as shapes. ``conf``:
    allocator settings in place of ``PYTORCH_CUDA_ALLOC_CONF``. ``assume``: values for lines that
    read a value that was not computed, as ``FILE:LINE=VALUE``. ``torch``: the version to simulate,
    ``""`` for the installed one. ``random``: ``"cuda"`` draws the numbers that the GPU would draw.
    ``endless``: devices never run out of memory. ``measure``: with ``real``, a large program makes
    its first step without values, to know their cost (native engine alone).
    """

    gpu: str = "h100-80gb"
    compute: str = "auto"
    conf: str | None = None
    assume: tuple[str, ...] = ()
    torch: str = ""
    random: str = "host"
    endless: bool = False
    measure: bool = False


class SimulatedRank(Protocol):
    """The distributed job of an estimated run: `gpuprobe.planning.peers.Job`."""

    @property
    def rank(self) -> int:
        """The rank of the run, from 0."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""

    @property
    def peers(self) -> Any:
        """The connection to the other ranks; None if they are not simulated."""


class EngineSession(Protocol):
    """The simulated GPUs of this process."""

    @property
    def engine(self) -> str:
        """``"native"`` or ``"virtual"``."""

    @property
    def assumed(self) -> Sequence[str]:
        """The assumptions behind the figures, one sentence each."""

    def start(self) -> None:
        """Give the process its GPUs."""

    def pause(self) -> None:
        """Remove the GPUs until `start`; their tensors stay."""

    def stop(self) -> None:
        """Remove the GPUs, as far as the engine can."""

    def keep_stacks(self) -> None:
        """Record the stack of each allocation from now on, also before the first step."""

    def read_unknown_as_nan(self) -> None:
        """From now on, assume values that were not computed when the program reads them, and note
        it.
        """

    def refused(self) -> ValueNeeded | None:
        """The error of a value that could not be assumed, which the program may have caught."""

    def peaks(self) -> Mapping[int, tuple[int, int]]:
        """Peaks of allocated and reserved bytes of each used GPU, by its number in the machine."""


@dataclass
class DeviceRun:
    """The result of a whole run on one GPU. ``number``: its number in the machine; ``index``: its
    index in the program. ``margin``: the error bounds of a model.
    """

    index: int
    number: int
    model: GpuModel
    peak_allocated: int
    peak_reserved: int
    trace: MemoryTrace
    margin: Margin = field(default_factory=Margin)


@dataclass
class EngineRun:
    """The result of a whole run, from which the figures of an estimate are made.

    ``settings`` of the allocator; ``rank`` of ``ranks``. ``traffic``: the transfers to other ranks,
    None for a single process; its buffers take ``nccl_low`` to ``nccl_high`` bytes. ``simulated``:
    the (major, minor) version of the simulated torch, None for the installed one.
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
    traffic: Traffic | None = None
    nccl_low: Bytes = _NOTHING
    nccl_high: Bytes = _NOTHING
    simulated: tuple[int, int] | None = None

    def assume(self, text: str) -> None:
        """Note an assumption behind the figures, once."""
        if text not in self.assumed:
            self.assumed.append(text)


class Measurement(Protocol):
    """One estimated run on an engine."""

    @property
    def session(self) -> EngineSession:
        """The session of the run."""

    def models(self) -> Mapping[int, GpuModel]:
        """The GPUs by their number in the machine."""

    def assume(self, text: str) -> None:
        """Note an assumption behind the figures, once."""

    def recorded(self, now_ns: Callable[[], int]) -> None:
        """Use the clock ``now_ns`` of the recorder, which was created, for collectives."""

    @property
    def count(self) -> int:
        """The number of GPUs of one process."""

    def explained(self, error: Exception) -> GpuprobeError | None:
        """The error as a gpuprobe error if the engine caused it, else None."""

    def unwrapped(self, error: GpuprobeError) -> GpuprobeError:
        """The original of an error that a worker of a ``DataLoader`` has sent as text."""

    def unknown_read(self) -> tuple[str, str]:
        """The first line that decided by a value that was not computed, and the first whose size
        is the largest possible one; ``""`` for none.
        """

    def too_large(self) -> str:
        """Why all values of the run are too much to be computed without a request; ``""`` if they
        are not, as far as that is known.
        """

    def refused(self) -> ValueNeeded | None:
        """The error of a value that could not be assumed, which the program may have caught."""

    def run(self, recording: Recording) -> EngineRun:
        """The result of the run, from its ``recording``, after `EngineSession.stop`."""
