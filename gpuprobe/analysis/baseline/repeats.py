"""A check of a program that does not need the same memory in every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from gpuprobe.analysis.baseline.model import CheckResult, MetricResult
from gpuprobe.model.text import human_bytes


class Figures(Protocol):
    """Another run of the program: a baseline, or what a trial measured."""

    @property
    def metrics(self) -> Mapping[str, int]:
        """By name."""

    @property
    def phases(self) -> Mapping[str, int]:
        """Peaks of phases and kinds of step, by name."""


def with_repeats(result: CheckResult, others: Sequence[Figures]) -> CheckResult:
    """The check with more runs of the same program: a metric is above the baseline where it is in
    every run. Where they differ, a caution says so."""
    texts: list[str] = []

    def checked(metric: MetricResult, values: list[int]) -> MetricResult:
        every = sorted({metric.after, *values})
        if len(every) > 1:
            amounts = [human_bytes(n) if metric.unit == "bytes" else str(n) for n in every]
            texts.append(f"{metric.name} {', '.join(amounts)}")
        if not metric.regressed or every[0] > metric.limit:
            return metric
        return replace(metric, after=every[0], cause="", place="", causes=(), rows=None)

    metrics = tuple(
        checked(item, [run.metrics[item.name] for run in others if item.name in run.metrics])
        for item in result.metrics
    )
    phases = tuple(
        checked(item, [run.phases[item.name] for run in others if item.name in run.phases])
        for item in result.phases
    )
    if not texts:
        return result
    text = f"not deterministic: {len(others) + 1} runs needed different memory ({'; '.join(texts)})"
    found = replace(result, metrics=metrics, phases=phases, cautions=(text, *result.cautions))
    cause = next((item.cause for item in found.regressions if item.cause), "")
    return replace(found, cause=cause)
