"""Metrics as data, and their samples in one reading.

Names follow Prometheus' conventions (prometheus.io/docs/practices/naming): prefix ``gpuprobe_``,
base units (bytes, seconds, watts, celsius, ratios from 0 to 1), the unit at the end of the name,
``_total`` for counters.

A value that could not be read has no sample, instead of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from gpuprobe.model.text import visible
from gpuprobe.model.values import Bytes, Peak, Reading, Unavailable

Kind = Literal["gauge", "counter"]

MAX_LABEL = 128
"""The longest value of a label; longer text is cut."""

_MOST = 1 << 63  # what a signed 64-bit integer holds

T = TypeVar("T")
Item = TypeVar("Item")
Known = TypeVar("Known")

Number = Reading[int] | Reading[Bytes] | Reading[bool] | Peak | int | float | Unavailable
"""A sample's value, or why there is none. The value of a peak between bounds is the lower one."""

Points = Iterable[tuple[tuple[str, ...], Number]]
"""Samples: the values of their labels, and the number."""

_UNITS = ("bytes_per_second", "bytes", "seconds", "ratio", "celsius", "watts", "joules", "hertz")
"""What the name of a metric with a unit ends with."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``unit`` is the end of its name, "" for plain numbers; ``source``: what the
    values are read from, for the documentation.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class MetricRow(Generic[T]):
    """A metric, and how its samples are read from a ``T``. ``factor`` converts to base units."""

    metric: Metric
    read: Callable[[T], Points]
    factor: float = 1


@dataclass(frozen=True, slots=True)
class MetricGroup(Generic[T]):
    """Metrics that are read from a ``T``. ``prefix`` begins their names; ``labels`` are on all of
    them.
    """

    prefix: str
    labels: tuple[str, ...] = ()

    def metric(self, name: str, help: str, source: str, *, labels: tuple[str, ...] = ()) -> Metric:
        """A metric. ``name`` ends with its unit, and with ``_total`` for a counter; ``labels`` are
        added to those of the group.
        """
        whole = self.prefix + name
        bare = whole.removesuffix("_total")
        kind: Kind = "gauge" if bare == whole else "counter"
        unit = next((unit for unit in _UNITS if bare.endswith(f"_{unit}")), "")
        return Metric(whole, kind, unit, help, self.labels + labels, source)

    def row(
        self,
        name: str,
        help: str,
        source: str,
        *,
        value: Callable[[T], Number] | None = None,
        values: Mapping[str, Callable[[T], Number]] | None = None,
        points: Callable[[T], Points] | None = None,
        per: int = 1,
        times: int = 1,
        labels: tuple[str, ...] = (),
    ) -> MetricRow[T]:
        """A `metric` with its samples: one ``value``, ``values`` by the metric's own label, or
        ``points``. They are multiplied by ``times`` or divided by ``per`` to get base units.
        """
        metric = self.metric(name, help, source, labels=labels)
        return MetricRow(
            metric, points or _reader(value, values or {}), times if per == 1 else 1 / per
        )


def _reader(
    value: Callable[[T], Number] | None, values: Mapping[str, Callable[[T], Number]]
) -> Callable[[T], Points]:
    if value is not None:
        return lambda found: (((), value(found)),)
    return lambda found: [((label,), read(found)) for label, read in values.items()]


def each(
    items: Callable[[T], Iterable[Item] | Reading[tuple[Item, ...]]],
    labels: Callable[[Item], tuple[str, ...]],
    value: Callable[[Item], Number],
) -> Callable[[T], Points]:
    """Reads a sample from each of the items of a ``T``; none if the items are unavailable."""

    def points(found: T) -> Points:
        given = items(found)
        if isinstance(given, Reading):
            known = given.value
            given = () if isinstance(known, Unavailable) else known
        return [(labels(one), value(one)) for one in given]

    return points


def known(value: Known | Unavailable, read: Callable[[Known], Number]) -> Number:
    """What ``read`` returns for a value that may be unavailable."""
    return value if isinstance(value, Unavailable) else read(value)


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


def label_text(value: str) -> str:
    """A label's value: printable text of at most `MAX_LABEL` characters.

    Control characters and bytes that are not UTF-8 are escaped, so that the text can be encoded and
    has no effect on a terminal.
    """
    shown = visible(value)
    return shown if len(shown) <= MAX_LABEL else shown[: MAX_LABEL - 1] + "…"


def family(metric: Metric, points: Points, *, factor: float = 1) -> Family:
    """The samples of ``points``, multiplied by ``factor``. Points without a number are left out; of
    two points with the same labels, the first counts.
    """
    samples: dict[tuple[str, ...], int | float] = {}
    for labels, value in _numbers(points):
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name}: {len(labels)} labels for {metric.labels}")
        number = value if factor == 1 else _scaled(value, factor)
        samples.setdefault(tuple(map(label_text, labels)), number)
    return Family(metric, tuple(Sample(labels, value) for labels, value in samples.items()))


def collected(
    rows: Iterable[MetricRow[T]], found: Iterable[tuple[tuple[str, ...], T]]
) -> list[Family]:
    """The samples of each row, read from all objects in ``found``; each comes with the values of
    the group's labels.
    """
    given = list(found)
    return [
        family(
            row.metric,
            (((*labels, *extra), value) for labels, one in given for extra, value in row.read(one)),
            factor=row.factor,
        )
        for row in rows
    ]


def _numbers(points: Points) -> Iterator[tuple[tuple[str, ...], int | float]]:
    for labels, given in points:
        value = given.value if isinstance(given, Reading) else given
        value = value.at_least if isinstance(value, Peak) else value
        # Larger numbers come from damaged recordings; Prometheus cannot represent them.
        if not isinstance(value, Unavailable) and (isinstance(value, float) or abs(value) < _MOST):
            yield labels, int(value) if isinstance(value, bool) else value


def _scaled(value: int | float, factor: float) -> int | float:
    # 0.001 has no exact binary form: dividing by its inverse rounds once instead of twice.
    return value * factor if factor > 1 else value / round(1 / factor)
