"""What a run on simulated GPUs that never run out of memory is measured by, and its result."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuprobe.allocator.settings import in_environment, parse_conf
from gpuprobe.catalogue.gpu_model import GpuModel
from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.model.trace import AllocatorSettings, EventColumns, MemoryTrace
from gpuprobe.model.values import Bytes
from gpuprobe.native.session import EngineOptions, NativeSession, SimulatedRank
from gpuprobe.torch_support.nccl import buffers
from gpuprobe.torch_support.process_gpus import NAME, visible

if TYPE_CHECKING:
    from gpuprobe.model.run.recording import Recording
    from gpuprobe.torch_support.traffic import Traffic


@dataclass(frozen=True)
class DeviceRun:
    """The result of a whole run on one GPU. ``number``: its number in the machine; ``index``: its
    index in the program.
    """

    index: int
    number: int
    model: GpuModel
    peak_allocated: int
    peak_reserved: int
    trace: MemoryTrace


@dataclass
class EngineRun:
    """The result of a whole run on ``count`` simulated GPUs, of which ``devices`` were used.

    ``settings`` of the allocator; ``rank`` of ``ranks``. ``traffic``: the transfers to other ranks,
    None for a single process; its buffers take ``nccl_low`` to ``nccl_high`` bytes.
    """

    count: int
    devices: Sequence[DeviceRun]
    settings: AllocatorSettings
    compute: str
    nccl_low: Bytes
    nccl_high: Bytes
    ranks: int = 1
    rank: int = 0
    assumed: list[str] = field(default_factory=list)
    unused_assumptions: Sequence[str] = ()
    traffic: Traffic | None = None

    def assume(self, text: str) -> None:
        """Note an assumption behind the figures, once."""
        if text not in self.assumed:
            self.assumed.append(text)


class NativeMeasurement:
    """The requested run on simulated GPUs that never run out of memory, as a rank of a job. A
    second run (`EstimateRequest.why`) raises `TooLarge` above the limits of ``--compute auto``.
    """

    def __init__(self, request: EstimateRequest, job: SimulatedRank | None) -> None:
        bounded = bool(request.why)
        options = EngineOptions(
            request.gpu,
            request.compute,
            request.conf,
            request.assume,
            endless=True,
            measure=not bounded,
        )
        self._request = request
        self._peers = None if job is None else job.peers
        self._gpus = parse_spec(request.gpu)
        self.session = NativeSession(options, self._gpus, job, bounded=bounded)
        self._elsewhere: tuple[tuple[str, str], ...] = ()
        text = in_environment() if request.conf is None else request.conf
        self._settings = parse_conf(text) if text else AllocatorSettings()

    @property
    def count(self) -> int:
        """The number of GPUs of one process."""
        return len(self.models())

    def models(self) -> Mapping[int, GpuModel]:
        # Not from the runtime: once queried, it would ignore the devices that the program selects.
        return dict(visible(os.environ.get(NAME), tuple(enumerate(self._gpus))))

    def include(self, assumed: Sequence[str], unknown_reads: Sequence[tuple[str, str]]) -> None:
        """Add what was ``assumed`` in processes that the program started, and the results of their
        `NativeSession.unknown_read`.
        """
        known = {*self.session.assumed}
        for text in assumed:
            if text not in known:
                self.session.assume(text)
        self._elsewhere = tuple(unknown_reads)

    def recorded(self, now_ns: Callable[[], int]) -> None:
        if self._request.ranks > 1:
            from gpuprobe.torch_support.traffic import Traffic

            self.session.traffic = Traffic(now_ns)

    def unknown_read(self) -> tuple[str, str]:
        """As `NativeSession.unknown_read`, of the program and the processes that it started."""
        reads = (self.session.unknown_read(), *self._elsewhere)
        decided, largest = (next(filter(None, places), "") for places in zip(*reads, strict=True))
        return decided, largest

    def run(self, recording: Recording) -> EngineRun:
        peaks = self.session.peaks()
        runtime = self.session.runtime
        assert runtime is not None
        numbers = runtime.visible()
        traces: dict[str, MemoryTrace] = {}
        for rank in recording.ranks:
            for trace in rank.traces:
                earlier = traces.get(trace.device)
                traces[trace.device] = trace if earlier is None else joined(earlier, trace)
        faults = [text for rank in recording.ranks if rank.end for text in rank.end.gpuprobe_faults]
        if faults:  # the traces end there
            raise RuntimeError(f"the recording stopped: {faults[0]}")
        for text in self.session.models:
            self.session.assume(text)
        traffic = self.session.traffic
        if self._peers is not None and traffic is not None:
            self._peers.post_differences(traffic.differences.document())
        low, high = buffers(traffic.communicators.values() if traffic is not None else ())
        return EngineRun(
            count=len(numbers),
            devices=[
                # A GPU that is used has been traced: recordings begin with its first use.
                DeviceRun(
                    ordinal,
                    numbers[ordinal],
                    self._gpus[numbers[ordinal]],
                    *peaks[ordinal],
                    traces[f"cuda:{ordinal}"],
                )
                for ordinal in sorted(peaks)
            ],
            settings=self._settings,
            compute="real" if self.session.everything else "shapes",
            ranks=self._request.ranks,
            rank=self._request.one_rank,
            assumed=list(self.session.assumed),
            unused_assumptions=self.session.unused_assumptions(),
            traffic=traffic,
            nccl_low=low,
            nccl_high=high,
        )


def joined(first: MemoryTrace, second: MemoryTrace) -> MemoryTrace:
    """Join two traces of one device, of which the second begins where the first ends: all events,
    and the final layout. What only attribution needs is left out.
    """
    pools = [*first.pools, *(pool for pool in second.pools if pool not in first.pools)]
    number = {index: pools.index(pool) for index, pool in enumerate(second.pools)}
    events = EventColumns()
    for name in ("action", "address", "size", "stream", "device_free"):
        column = getattr(events, name)
        column.extend(first.events.column(name))
        column.extend(second.events.column(name))
    events.pool.extend(first.events.column("pool"))
    events.pool.extend(number[index] for index in second.events.column("pool"))
    return MemoryTrace(
        device=first.device,
        events=events,
        baseline=first.baseline,
        stacks=first.stacks,
        pools=pools,
        segments=second.segments,
        settings=second.settings,
        complete=first.complete and second.complete,
    )
