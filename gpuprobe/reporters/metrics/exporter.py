"""The metrics of the exporter itself: its sources, errors and times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpuprobe._version import __version__
from gpuprobe.model.machine.devices import Inventory
from gpuprobe.model.values import Reading, Unavailable
from gpuprobe.reporters.metrics.metrics import Family, Metric, MetricGroup, family

_SELF: MetricGroup[None] = MetricGroup("gpuprobe_")
_SOURCE = "gpuprobe"

_BUILD = _SELF.metric("build_info", "1, with gpuprobe's version.", _SOURCE, labels=("version",))
_UP = _SELF.metric(
    "source_up", "1 if the source of device readings responds.", _SOURCE, labels=("source",)
)
_DRIVER = _SELF.metric(
    "driver_info",
    "1, with the versions of the driver.",
    _SOURCE,
    labels=("version", "cuda", "nvml"),
)
_ERRORS = _SELF.metric(
    "read_errors",
    "Values that should have been readable in the last reading and were not.",
    _SOURCE,
    labels=("source", "status"),
)
_TIMESTAMP = _SELF.metric(
    "reading_timestamp_seconds",
    "When the last reading was taken, in seconds since the Unix epoch.",
    _SOURCE,
)
_DURATION = _SELF.metric("reading_duration_seconds", "How long the last reading took.", _SOURCE)
_RUNS = _SELF.metric("runs", "Runs that are exported.", _SOURCE)
_LEFT_OUT = _SELF.metric(
    "runs_left_out",
    "Runs that are not exported, because there are more than --max-runs or because they cannot "
    "be read yet.",
    _SOURCE,
)

SELF_METRICS: tuple[Metric, ...] = (
    _BUILD,
    _UP,
    _DRIVER,
    _ERRORS,
    _TIMESTAMP,
    _DURATION,
    _RUNS,
    _LEFT_OUT,
)
"""All metrics of the exporter itself."""


def self_families(
    found: Inventory | None,
    *,
    sources: Sequence[str],
    stale: bool = False,
    taken_at: float | Unavailable,
    duration: float | Unavailable,
    runs: int | Unavailable,
    left_out: int | Unavailable,
) -> list[Family]:
    """The exporter's status. ``found``: the last reading of the devices, None without one.
    ``stale``: the reading is too old, because the driver does not respond; then its sources are
    down. ``taken_at`` in seconds since the Unix epoch, ``duration`` in seconds.
    """
    responding = set()
    families = [family(_BUILD, [((__version__,), 1)])]
    if found is not None and not stale:
        responding = {source.name for source in found.sources if source.available}
    families.append(family(_UP, [((name,), int(name in responding)) for name in sources]))
    if found is not None and not stale:
        driver = found.driver
        versions = tuple(map(_word, (driver.version, driver.cuda, driver.nvml)))
        if any(versions):
            families.append(family(_DRIVER, [(versions, 1)]))
        errors = Counter((error.source, error.status.value) for error in found.errors)
        families.append(family(_ERRORS, sorted(errors.items())))
    for metric, value in (
        (_TIMESTAMP, taken_at),
        (_DURATION, duration),
        (_RUNS, runs),
        (_LEFT_OUT, left_out),
    ):
        families.append(family(metric, [((), value)]))
    return [one for one in families if one.samples]


def _word(reading: Reading[str]) -> str:
    return "" if isinstance(reading.value, Unavailable) else reading.value
