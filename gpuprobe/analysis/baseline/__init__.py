"""A baseline of a training run's memory, and what changed since.

A baseline keeps what a check compares (metrics, and the peak of each phase and kind of step) and
an account of each, so that a check can say what grew; the lines of an account sum to its amount.
As text it is small, and reviewed by people in pull requests.
"""

from __future__ import annotations

from gpuprobe.analysis.baseline.check import check_baseline, with_repeats
from gpuprobe.analysis.baseline.measure import baseline_of, own_recording
from gpuprobe.analysis.baseline.model import (
    METRICS,
    SIMULATED,
    Baseline,
    CheckResult,
    KeptFile,
    MetricResult,
    Setting,
    Tolerance,
    simulated_gpu,
)
from gpuprobe.analysis.baseline.text import (
    NAME,
    SCHEMA,
    UNNAMED,
    VERSION,
    dumps,
    dumps_runs,
    loads,
    loads_runs,
    merged_tolerances,
)

__all__ = [
    "METRICS",
    "NAME",
    "SCHEMA",
    "SIMULATED",
    "UNNAMED",
    "VERSION",
    "Baseline",
    "CheckResult",
    "KeptFile",
    "MetricResult",
    "Setting",
    "Tolerance",
    "baseline_of",
    "check_baseline",
    "dumps",
    "dumps_runs",
    "loads",
    "loads_runs",
    "merged_tolerances",
    "own_recording",
    "simulated_gpu",
    "with_repeats",
]
