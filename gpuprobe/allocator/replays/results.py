"""What `gpuprobe.replay` returns."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprobe.allocator.replays.replay import Divergence, TraceReplay
from gpuprobe.allocator.replays.whatif import SettingsAdvice, WhatIfOutcome
from gpuprobe.model.display import Displayed


@dataclass(frozen=True, slots=True)
class TraceResult:
    """One device's trace (one step's, in a recording), and what was asked about it.

    ``baseline`` is the recorded settings simulated the way ``what_if`` is: compare with it.
    """

    recorded: TraceReplay
    baseline: WhatIfOutcome | None = None
    what_if: WhatIfOutcome | None = None
    advice: SettingsAdvice | None = None
    capacity: int | None = None
    capacity_source: str = ""


@dataclass(frozen=True, slots=True)
class ReplayResult(Displayed):
    """All replayed traces. Sizes in bytes."""

    path: str
    traces: tuple[TraceResult, ...]

    def __repr__(self) -> str:
        how = "exact" if self.exact else "not exact"
        return f"<replay of {self.path or 'a trace'}: {how}, {len(self.traces)} traces>"

    @property
    def exact(self) -> bool:
        """Every trace was reproduced: all addresses, segments and final layouts."""
        return all(t.recorded.exact for t in self.traces)

    @property
    def first_divergence(self) -> Divergence | None:
        """That of the first trace that diverges."""
        found = (t.recorded.first_divergence for t in self.traces)
        return next((d for d in found if d is not None), None)

    @property
    def peak_allocated(self) -> int:
        """The highest of any device; with other settings, that of the what-if (in the worst
        address order)."""
        return max(
            (t.what_if.peak_allocated.most if t.what_if else t.recorded.peak_allocated)
            for t in self.traces
        )

    @property
    def peak_reserved(self) -> int:
        """As `peak_allocated`."""
        return max(
            (t.what_if.peak_reserved.most if t.what_if else t.recorded.peak_reserved)
            for t in self.traces
        )

    @property
    def final_reserved(self) -> int:
        """As recorded, on the device with the most."""
        return max(t.recorded.final_reserved for t in self.traces)

    @property
    def device_allocs(self) -> int:
        """``cudaMalloc`` and page-mapping calls within the traces, as recorded."""
        return sum(t.recorded.device_allocs for t in self.traces)

    @property
    def events(self) -> int:
        return sum(t.recorded.events for t in self.traces)

    @property
    def would_oom(self) -> bool:
        """The what-if fails a request that the recording served, in some address order."""
        return any(t.what_if is not None and t.what_if.would_oom > 0 for t in self.traces)
