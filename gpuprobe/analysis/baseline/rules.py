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
    remedy="run the check as the baseline was, or gpuprobe baseline update",
)
_METRICS = {
    name: define(
        f"GPM-{name}", _KIND, Level.ERROR, f"{name} is not above the baseline", remedy=_UPDATE
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
