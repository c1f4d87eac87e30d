"""Metrics in Prometheus' text format, version 0.0.4.

The format: prometheus.io/docs/instrumenting/exposition_formats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import IO

from gpuprobe.reporters.metrics.metrics import Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def write(families: Iterable[Family], stream: IO[str]) -> None:
    """Write the families, each with its help and type, to ``stream``."""
    stream.write(render(families))


def render(families: Iterable[Family]) -> str:
    """The families as text; one without samples is left out."""
    lines: list[str] = []
    for one in families:
        if not one.samples:
            continue
        metric = one.metric
        lines.append(f"# HELP {metric.name} {_help(metric.help)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        for sample in one.samples:
            pairs = zip(metric.labels, sample.labels, strict=True)
            labels = ",".join(f'{name}="{_value(value)}"' for name, value in pairs)
            shown = f"{{{labels}}}" if labels else ""
            lines.append(f"{metric.name}{shown} {_number(sample.value)}")
    return "".join(f"{line}\n" for line in lines)


def _help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _value(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: int | float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(value)
