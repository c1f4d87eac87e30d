"""What is exported: metrics as data, and the samples of one reading.

Names follow Prometheus' conventions (prometheus.io/docs/practices/naming): prefix ``gpuprobe_``,
base units (bytes, seconds, watts, celsius, ratios from 0 to 1), the unit at the end of the name,
``_total`` for counters. Where OpenTelemetry's semantic conventions for hardware (``hw.*``,
status "development") have a name, `Otel` holds it; every other metric gets the same words with
dots, without unit and ``_total``, as its naming guide asks.

A value that could not be read has no sample: it is left out, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpuprobe.model.text import visible
from gpuprobe.model.values import Reading, Unavailable

Kind = Literal["gauge", "counter"]

MAX_LABEL = 128
"""Characters of a label's value. Longer text is cut: names come from elsewhere."""

_MOST = 1 << 63  # what a signed 64-bit integer holds

Points = Iterable[
    tuple[tuple[str, ...], "Reading[int] | Reading[bool] | int | float | Unavailable"]
]
"""What a row of a table reads: the values of its labels, and the number or why there is none."""

# Prometheus' unit -> UCUM, which OpenTelemetry writes units in.
_UCUM = {
    "bytes": "By",
    "seconds": "s",
    "ratio": "1",
    "celsius": "Cel",
    "watts": "W",
    "joules": "J",
    "hertz": "Hz",
    "bytes_per_second": "By/s",
    "": "1",
}


@dataclass(frozen=True, slots=True)
class Otel:
    """A metric in OpenTelemetry's words. ``attributes``: label -> attribute, for the labels whose
    attribute has a conventional name; ``constant``: attributes that every point has.
    """

    name: str
    instrument: Literal["gauge", "counter", "updowncounter"]
    attributes: Mapping[str, str] = field(default_factory=dict)
    constant: Mapping[str, str] = field(default_factory=dict)
    unit: str = ""  # where it is not that of the Prometheus metric


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``unit`` is the end of its name, "" for plain numbers; ``source`` says what
    the values are read from.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...]
    source: str
    otel: Otel

    @property
    def ucum(self) -> str:
        """The unit as OpenTelemetry writes it."""
        return self.otel.unit or _UCUM[self.unit]


@dataclass(frozen=True, slots=True)
class Sample:
    """The values of the metric's labels, in their order, and the number."""

    labels: tuple[str, ...]
    value: int | float


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with the samples of one reading; no two have the same labels."""

    metric: Metric
    samples: tuple[Sample, ...]


def otel_name(name: str, unit: str) -> str:
    """``gpuprobe_gpu_clock_hertz`` -> ``gpuprobe.gpu.clock``."""
    bare = name.removesuffix("_total")
    if unit:
        bare = bare.removesuffix("_" + unit)
    tool, _, rest = bare.partition("_")
    group, _, rest = rest.partition("_")
    return ".".join(part for part in (tool, group, rest) if part)


def label_text(value: str) -> str:
    """A label's value: printable text of at most `MAX_LABEL` characters.

    What is not printable (control characters, bytes that are not UTF-8) is shown, so that the
    text can always be encoded and never acts on a terminal.
    """
    shown = visible(value)
    return shown if len(shown) <= MAX_LABEL else shown[: MAX_LABEL - 1] + "…"


def family(metric: Metric, points: Points, *, factor: float = 1) -> Family:
    """The samples of ``points``, multiplied by ``factor``. What has no number is left out; of
    two points with the same labels, the first stands.
    """
    seen: dict[tuple[str, ...], int | float] = {}
    for labels, value in _numbers(points):
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name}: {len(labels)} labels for {metric.labels}")
        number = value if factor == 1 else _scaled(value, factor)
        seen.setdefault(tuple(map(label_text, labels)), number)
    return Family(metric, tuple(Sample(labels, value) for labels, value in seen.items()))


def _numbers(points: Points) -> Iterator[tuple[tuple[str, ...], int | float]]:
    for labels, given in points:
        value = given.value if isinstance(given, Reading) else given
        # What no counter or size can be comes from a damaged recording; neither Prometheus nor
        # OTLP has a place for it.
        if not isinstance(value, Unavailable) and (isinstance(value, float) or abs(value) < _MOST):
            yield labels, int(value) if isinstance(value, bool) else value


def _scaled(value: int | float, factor: float) -> int | float:
    # 0.001 has no exact binary form: dividing by its inverse rounds once instead of twice.
    return value * factor if factor > 1 else value / round(1 / factor)
