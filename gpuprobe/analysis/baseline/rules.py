"""The rules of ``gpuprobe check``: one for each metric, and one for the environment."""

from __future__ import annotations

from gpuprobe.analysis.baseline.model import METRICS
from gpuprobe.model.findings import Level
from gpuprobe.model.rules import Rule, define

_UPDATE = "if this is intended: gpuprobe baseline update"
_KIND = "memory-regression"

ENVIRONMENT = define(
    "GPM-environment",
    "baseline-environment",
    Level.ERROR,
    "The baseline is of the same environment",
    description="Another GPU, torch or allocator setting moves the figures: a comparison would\n"
    "say nothing about the program.",
    remedy="run the check as the baseline was; gpuprobe baseline update where this is the new\n"
    "environment; --accept-environment compares all the same",
)
_WHY = {
    "growth_per_step": "What a step leaves behind is never given back: the longer the run, the\n"
    "more it needs, until it ends out of memory.",
    "peak_allocated": "The most that tensors take at one time: above the GPU's memory, the run\n"
    "ends.",
    "steady_allocated": "What is allocated after the last step: parameters, optimizer state, and\n"
    "whatever something still refers to.",
    "peak_reserved": "The most that was taken from the driver: other processes do not have it. It\n"
    "grows with fragmentation, too.",
    "device_allocs_after_warm_up": "Each call of cudaMalloc waits for the device. Once the steps\n"
    "repeat themselves, the allocator's cache should serve them.",
    "implicit_syncs_per_step": "Each makes the host wait for the device, which then has nothing\n"
    "to do.",
    "races": "Two streams use one tensor without an order between them: the results are random.",
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
