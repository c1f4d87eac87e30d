"""Metrics over OTLP, through OpenTelemetry's official SDK and exporter (extra ``otel``).

The SDK's instruments are not used: the SDK queries them one by one, at its own times, and they keep
reporting their last value. Each push is one whole reading, in the SDK's data classes, without
values that could not be read.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from gpuprobe._version import __version__
from gpuprobe.errors import EnvironmentUnavailable, MissingExtra, UsageError
from gpuprobe.reporters.metrics.metrics import Family, Metric

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData

_PATH = "/v1/metrics"  # opentelemetry.io/docs/specs/otlp, "OTLP/HTTP Request"


def metrics_url(endpoint: str) -> str:
    """The URL that metrics are posted to: ``http://host:4318`` gets the path ``/v1/metrics``, an
    endpoint with a path is unchanged. Raises UsageError for an invalid URL.
    """
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        valid = False
    if not valid:
        raise UsageError(
            f"not an OTLP endpoint: {endpoint!r}", hint="as in --otlp http://localhost:4318"
        )
    return urlunsplit(parts._replace(path=_PATH)) if parts.path in ("", "/") else endpoint


def attributes_of(metric: Metric, labels: Sequence[str]) -> dict[str, str]:
    """The attributes of a sample: conventional names, or ``gpuprobe.<label>``. As in Prometheus, an
    empty label is omitted.
    """
    named = {
        metric.otel.attributes.get(label, f"gpuprobe.{label}"): value
        for label, value in zip(metric.labels, labels, strict=True)
        if value
    }
    return {**metric.otel.constant, **named}


def metrics_data(families: Iterable[Family], *, taken_ns: int) -> MetricsData:
    """A reading in the SDK's data classes. ``taken_ns``: its time, since the Unix epoch.

    Counters are cumulative. The start of most is unknown (the driver's load, a run's start), so
    their start time is 0, the protocol's "unknown": receivers count from the first value.
    """
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Gauge,
        MetricsData,
        NumberDataPoint,
        ResourceMetrics,
        ScopeMetrics,
        Sum,
    )
    from opentelemetry.sdk.metrics.export import Metric as OtelMetric
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    metrics = []
    for one in families:
        otel = one.metric.otel
        points = [
            NumberDataPoint(
                attributes=attributes_of(one.metric, sample.labels),
                start_time_unix_nano=0,
                time_unix_nano=taken_ns,
                value=sample.value,
            )
            for sample in one.samples
        ]
        data: Gauge | Sum
        if otel.instrument == "gauge":
            data = Gauge(points)
        else:
            cumulative = AggregationTemporality.CUMULATIVE
            data = Sum(points, cumulative, is_monotonic=otel.instrument == "counter")
        metrics.append(OtelMetric(otel.name, one.metric.help, one.metric.ucum, data))
    resource = Resource.create(
        {
            "service.name": "gpuprobe",
            "service.version": __version__,
            "host.name": socket.gethostname(),
        }
    )
    scope = ScopeMetrics(InstrumentationScope("gpuprobe", __version__), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


class OtlpPusher:
    """Pushes readings to ``endpoint`` by OTLP over HTTP (protobuf).

    Headers, certificates and compression are set by the SDK's environment variables
    (``OTEL_EXPORTER_OTLP_HEADERS``, …). Raises MissingExtra without the SDK, UsageError for a
    malformed endpoint.
    """

    def __init__(self, endpoint: str, *, timeout: float = 10.0) -> None:
        self.url = metrics_url(endpoint)
        try:
            # 130 ms, 40 MB: the SDK, protobuf and requests.
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics.export import MetricExportResult
        except ImportError as error:
            raise MissingExtra(
                "opentelemetry-exporter-otlp-proto-http", "otel", why="--otlp"
            ) from error
        self._success = MetricExportResult.SUCCESS
        self._log = _Collected()
        self._exporter: Any = OTLPMetricExporter(endpoint=self.url, timeout=timeout)
        self._closed = False

    def push(self, families: Iterable[Family], *, taken_ns: int) -> None:
        """Push one reading; the SDK retries until its timeout.

        Raises EnvironmentUnavailable if the endpoint does not accept it.
        """
        data = metrics_data(families, taken_ns=taken_ns)
        with self._log as reasons:
            result = self._exporter.export(data)
        if result is not self._success:
            reason = f": {reasons[-1]}" if reasons else ""
            raise EnvironmentUnavailable(
                f"{self.url} does not accept the metrics{reason}",
                hint="is an OpenTelemetry collector listening at this address?",
            )

    def close(self) -> None:
        """Cancel a push in progress, and shut down. Can be called twice."""
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()


class _Collected(logging.Handler):
    """Collects the SDK's log messages of this thread, instead of printing them on stderr: the SDK
    reports its failures only there.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._logger = logging.getLogger("opentelemetry")
        self._lines: list[str] = []
        self._thread = 0

    def __enter__(self) -> list[str]:
        self._lines = []
        self._thread = threading.get_ident()
        self._propagate = self._logger.propagate
        self._logger.propagate = False
        self._logger.addHandler(self)
        return self._lines

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagate

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self._lines.append(record.getMessage())
