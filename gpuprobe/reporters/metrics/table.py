"""Metrics as data: tables in text files, whose rows say where a value is and what it means.

``gpu_metrics.txt`` says in its beginning what an entry looks like.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Generic, TypeVar

from gpuprobe.model.values import Peak, Reading, Unavailable
from gpuprobe.reporters.metrics.metrics import (
    Family,
    Kind,
    Metric,
    Otel,
    Points,
    family,
    otel_name,
)

T = TypeVar("T")

_UNITS = ("bytes_per_second", "bytes", "ratio", "celsius", "watts", "joules", "hertz", "seconds")
_HEAD = re.compile(
    r"(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})? = (?P<where>[^/*]+?)(?: (?P<sign>[/*]) (?P<by>\d+))?"
)


@dataclass(frozen=True, slots=True)
class MetricRow(Generic[T]):
    """A metric, and where its values are in a ``T``. ``factor`` makes them base units."""

    metric: Metric
    read: Callable[[T], Points]
    factor: float = 1


def read_table(
    file: str,
    prefix: str,
    labels: tuple[str, ...],
    attributes: Mapping[str, str],
    *,
    functions: Mapping[str, Callable[[T], Any]],
    lists: Mapping[str, Callable[[Any], tuple[str, ...]]],
    conventional: Mapping[str, str] | None = None,
) -> tuple[MetricRow[T], ...]:
    """The rows of a table. ``labels`` are those of every metric, and ``attributes`` their names in
    OpenTelemetry; ``functions`` read what is in no single place, and ``lists`` say how
    the items of a list are named; ``conventional``: constant attributes of what has a name in
    OpenTelemetry's conventions.
    """
    text = files("gpuprobe.reporters.metrics").joinpath(file).read_text("utf-8")
    rows = []
    for entry in text.split("\n\n")[1:]:
        head, *rest = (line.strip() for line in entry.splitlines())
        found = _HEAD.fullmatch(head)
        if found is None or len(rest) < 2:
            raise ValueError(f"{file}: not an entry: {head}")
        meaning, source, *otel = rest
        name = prefix + found["name"]
        bare = name.removesuffix("_total")
        kind: Kind = "gauge" if bare == name else "counter"
        unit = next((unit for unit in _UNITS if bare.endswith(f"_{unit}")), "")
        own = tuple(found["labels"].split(", ")) if found["labels"] else ()
        by = int(found["by"] or 1)
        words = _otel(otel_name(name, unit), kind, otel, attributes, conventional or {})
        rows.append(
            MetricRow(
                Metric(name, kind, unit, meaning, labels + own, source, words),
                _reader(found["where"], bool(own), functions, lists),
                1 / by if found["sign"] == "/" else by,
            )
        )
    return tuple(rows)


def _otel(
    own_name: str,
    kind: Kind,
    given: Sequence[str],
    attributes: Mapping[str, str],
    conventional: Mapping[str, str],
) -> Otel:
    """The metric in OpenTelemetry's words: where no convention has it, in our own."""
    name, instrument, unit = own_name, str(kind), ""
    named = dict(attributes)
    for word in given[0].removeprefix("otel: ").split(", ") if given else ():
        first, _, second = word.partition(" ")
        if first == "unit":
            unit = second
        elif second:
            named[first] = second
        elif "." in first:
            name = first
        else:
            instrument = first
    constant = conventional if name.startswith("hw.") else {}
    return Otel(name, instrument, named, constant, unit)  # type: ignore[arg-type]


def _reader(
    where: str,
    labelled: bool,
    functions: Mapping[str, Callable[[T], Any]],
    lists: Mapping[str, Callable[[Any], tuple[str, ...]]],
) -> Callable[[T], Points]:
    function = functions.get(where)
    if function is not None:
        read = function
        return read if labelled else lambda found: (((), read(found)),)
    if ": " in where:
        named = [part.split(": ") for part in where.split(", ")]
        return lambda found: [((label,), value_at(found, path)) for label, path in named]
    for items, key in lists.items():
        if where.startswith(f"{items}."):
            return _of_each(items, key, where.removeprefix(f"{items}."))
    return lambda found: (((), value_at(found, where)),)


def _of_each(
    items: str, key: Callable[[Any], tuple[str, ...]], path: str
) -> Callable[[Any], Points]:
    def points(found: Any) -> Points:
        known = value_at(found, items)
        if isinstance(known, Reading):
            known = known.value
        if isinstance(known, Unavailable):
            return ()
        return [(key(one), value_at(one, path)) for one in known]

    return points


def value_at(found: Any, path: str) -> Any:
    """What is at ``path``, or the first that is unavailable on the way; of a peak at least."""
    for name in path.split("."):
        if isinstance(found, Unavailable):
            return found
        found = getattr(found, name)
    return found.at_least if isinstance(found, Peak) else found


def collected(
    rows: Iterable[MetricRow[T]], found: Iterable[tuple[tuple[str, ...], T]]
) -> list[Family]:
    """The metrics of all that was found, one family each. ``found``: each with its labels."""
    given = list(found)
    return [
        family(
            row.metric,
            (((*labels, *extra), value) for labels, one in given for extra, value in row.read(one)),
            factor=row.factor,
        )
        for row in rows
    ]
