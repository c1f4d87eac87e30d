"""The virtual GPU as an engine: a model of torch's CUDA code, for builds of torch without CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpuprobe.allocator.recorder import TraceRecorder
from gpuprobe.catalogue.gpu_model import GpuModel
from gpuprobe.engines.base import DeviceRun, EngineOptions, EngineRun, EvidenceGrade, SimulatedRank
from gpuprobe.errors import ValueNeeded
from gpuprobe.torch_support.compile_notes import worded
from gpuprobe.torch_support.nccl import buffers
from gpuprobe.torch_support.traffic import Traffic
from gpuprobe.torch_support.version import installed
from gpuprobe.virtual import boundary
from gpuprobe.virtual.budget import Budget
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.session import VirtualSession, current, machine_of, virtual_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuprobe.model.run.recording import Recording

__all__ = ["VirtualMeasurement", "current", "session"]


@contextmanager
def session(options: EngineOptions) -> Iterator[VirtualSession]:
    """Virtual GPUs in this process. Raises what `gpuprobe.virtual.session.virtual_gpu` raises."""
    with virtual_gpu(
        options.gpu,
        "real" if options.compute == "auto" else options.compute,
        conf=options.conf,
        assume=options.assume,
        torch_version=options.torch,
        random=options.random,
    ) as session:
        yield session


class VirtualMeasurement:
    """An estimated run on virtual GPUs. ``bounded``: raise TooLarge above the limits of ``--compute
    auto``.
    """

    explained = staticmethod(boundary.explained)
    unwrapped = staticmethod(boundary.unwrapped)

    def __init__(
        self, options: EngineOptions, job: SimulatedRank, *, bounded: bool = False
    ) -> None:
        self._machine: Machine = machine_of(
            options.gpu,
            "shapes" if options.compute == "auto" else options.compute,
            options.conf,
            endless=options.endless,
            assume=options.assume,
            torch_version=options.torch,
        )
        machine = self._machine
        machine.estimated = True
        machine.ranks, machine.rank, machine.peers = job.ranks, job.rank, job.peers
        if bounded:
            Budget(machine)
        self._peers = job.peers
        self._taps = {}
        for device in machine.devices:
            self._taps[device] = tap = TraceRecorder(device.sim, listen=False)
            device.listeners.append(tap.on_event)
        self._session = VirtualSession(machine)

    @property
    def session(self) -> VirtualSession:
        return self._session

    @property
    def count(self) -> int:
        """The number of GPUs of one process."""
        return len(self._machine.devices)

    def models(self) -> Mapping[int, GpuModel]:
        machine = self._machine
        return {machine.physical(device): device.model for device in machine.devices}

    def assume(self, text: str) -> None:
        self._machine.assume(text)

    def recorded(self, now_ns: Callable[[], int]) -> None:
        if self._machine.ranks > 1:
            self._machine.traffic = Traffic(now_ns)

    def unknown_read(self) -> tuple[str, str]:
        return self._machine.given_nan, self._machine.bounded

    def too_large(self) -> str:
        return ""

    def refused(self) -> ValueNeeded | None:
        return None

    def run(self, recording: Recording) -> EngineRun:
        machine = self._machine
        if self._peers is not None and machine.traffic is not None:
            self._peers.post_differences(machine.traffic.differences.document())
        low, high = (
            buffers(machine.traffic.communicators.values()) if machine.traffic else (None, None)
        )
        run = EngineRun(
            engine="virtual",
            evidence=EvidenceGrade.VIRTUAL,
            count=machine.count,
            devices=[
                DeviceRun(
                    device.index,
                    machine.physical(device),
                    device.model,
                    device.sim.peak_allocated,
                    device.sim.peak_reserved,
                    self._taps[device].trace(),
                    machine.called.margin(device.sim.peak_allocated),
                )
                for device in machine.devices
                if device.sim.peak_allocated
            ],
            settings=machine.settings,
            compute="shapes" if machine.shapes else "real",
            ranks=machine.ranks,
            rank=machine.rank,
            assumed=list(worded(machine.assumed)),
            unused_assumptions=tuple(machine.assumptions.unused),
            compiled=worded(machine.compiler_notes),
            traffic=machine.traffic,
            simulated=None if machine.torch == installed() else machine.torch,
        )
        if low is not None and high is not None:
            run.nccl_low, run.nccl_high = low, high
        return run
