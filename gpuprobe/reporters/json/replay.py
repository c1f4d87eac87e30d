"""A replay as a JSON document."""

from __future__ import annotations

from typing import Annotated, Final

from gpuprobe.allocator.replay import TraceReplay
from gpuprobe.allocator.results import ReplayResult, TraceResult
from gpuprobe.allocator.settings import to_conf
from gpuprobe.allocator.whatif import LIMITS, Range, SettingsAdvice, WhatIfOutcome
from gpuprobe.model.io.encoder import keys
from gpuprobe.model.record import record
from gpuprobe.model.trace import AllocatorSettings
from gpuprobe.reporters.json.documents import Document


@record(frozen=True)
class Simulated:
    """The recorded settings, simulated as a what-if is."""

    verified: Annotated[bool, "the what-if is based on an exact replay of the recording"]
    capacity: Annotated[int | None, "of the device, bytes"]
    baseline: WhatIfOutcome


def _simulated(trace: TraceResult) -> Simulated | None:
    if trace.baseline is None:
        return None
    return Simulated(trace.recorded.exact, trace.capacity, trace.baseline)


def _limits(result: ReplayResult) -> tuple[str, ...]:
    return LIMITS if any(trace.baseline is not None for trace in result.traces) else ()


DOCUMENT: Final = Document(
    "gpuprobe.replay",
    (2, 2),
    ReplayResult,
    "A recording's requests, replayed by the rules of torch's caching allocator. Sizes are bytes. "
    "A minor version adds keys.",
    shapes={
        AllocatorSettings: to_conf,
        Range: keys("least most"),
        ReplayResult: keys("path exact traces empty", limits=_limits),
        SettingsAdvice: keys("best gain fits tried"),
        TraceReplay: keys(
            "device step exact first_divergence settings complete events allocations "
            "peak_allocated peak_reserved start_reserved final_allocated final_reserved "
            "device_allocs device_frees retries ooms memory_limit tie_rule notes"
        ),
        TraceResult: {
            "*recorded": "recorded",
            "first_step": "first_step",
            "*simulated": _simulated,
            "what_if?": "what_if",
            "search?": "advice",
        },
        WhatIfOutcome: keys(
            "change settings peak_allocated peak_reserved",
            fragmentation_ppm="fragmentation",
            **keys("device_allocs device_frees retries ooms would_oom served_after_all"),
            address_orders="orders",
            undecided="undecided",
        ),
    },
    added={"2.1": "WhatIfOutcome.undecided", "2.2": "TraceResult.first_step empty"},
)

document = DOCUMENT.plain
