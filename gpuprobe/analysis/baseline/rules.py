"""The rules of ``gpuprobe check``: one for each metric, and one for the environment."""

from __future__ import annotations

from gpuprobe.analysis.baseline.model import METRICS
from gpuprobe.model.findings import Level
from gpuprobe.model.rules import Rule, define

_UPDATE = "if this is intended, run gpuprobe baseline update"
_KIND = "memory-regression"

ENVIRONMENT = define(
    "GPM-environment",
    "baseline-environment",
    Level.ERROR,
    "The baseline is from the same environment",
    description="A different GPU, torch or allocator setting changes the figures: a comparison\n"
    "would not be meaningful.",
    remedy="run the check in the baseline's environment, or run gpuprobe baseline update if\n"
    "this is the new one; --accept-environment compares anyway",
)
_WHY = {
    "growth_per_step": "Memory that a step allocates is never freed: the longer the run, the more\n"
    "it needs, until it runs out of memory.",
    "peak_allocated": "The highest memory of all tensors: above the GPU's memory, the run\nfails.",
    "steady_allocated": "What is allocated after the last step: parameters, optimizer state, and\n"
    "everything that is still referenced.",
    "peak_reserved": "The highest memory obtained from the driver, which other processes cannot\n"
    "use. It also grows with fragmentation.",
    "device_allocs_after_warm_up": "Each call of cudaMalloc waits for the device. Once steps\n"
    "repeat, the allocator's cache should serve them.",
    "implicit_syncs_per_step": "Each makes the host wait for the device, which is then\nidle.",
    "races": "Two streams use one tensor without synchronisation: the results are random.",
}
_METRICS = {
    name: define(
        f"GPM-{name}",
        _KIND,
        Level.ERROR,
        f"{name} is not above the baseline",
        description=_WHY[name],
        remedy=_UPDATE,
    )
    for name in METRICS
}
_PART = define(
    "GPM-*",
    _KIND,
    Level.ERROR,
    "The peak of a phase, or of a kind of step, is not above the baseline",
    remedy=_UPDATE,
)


def regression(name: str) -> tuple[str, Rule]:
    """The id under which a metric (or phase) is reported, and its rule."""
    return f"GPM-{name.replace(' ', '-')}", _METRICS.get(name, _PART)
