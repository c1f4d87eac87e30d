"""``--otlp``: the official SDK against a receiver of its protocol, over a real socket."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gpuprobe.cli import main
from gpuprobe.errors import UsageError
from gpuprobe.reporters.metrics.exporter import SELF_METRICS
from gpuprobe.reporters.metrics.gpu import GPU_METRICS
from gpuprobe.reporters.metrics.metrics import Metric, Otel
from gpuprobe.reporters.metrics.otlp import attributes_of, metrics_url
from gpuprobe.reporters.metrics.run import RUN_METRICS

METRICS = (*GPU_METRICS, *RUN_METRICS, *SELF_METRICS)


@dataclass
class Receiver:
    """Takes what is posted to ``/v1/metrics``, and answers with ``status``."""

    port: int = 0
    status: int = 200
    requests: list[Any] = field(default_factory=list)
    came: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
        ExportMetricsServiceResponse,
    )

    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/metrics"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            found.requests.append(ExportMetricsServiceRequest.FromString(body))
            answer = ExportMetricsServiceResponse().SerializeToString()
            self.send_response(found.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            found.came.release()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join(30)


def attributes(pairs: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in pairs}


def points(metric: Any) -> Any:
    return (metric.gauge if metric.HasField("gauge") else metric.sum).data_points


def number(point: Any) -> float:
    return float(getattr(point, point.WhichOneof("value")))


def test_a_reading_arrives_as_the_conventions_have_it(
    receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--otlp", receiver.endpoint, "--once", "--demo", "lost-gpu"]) == 0
    assert capsys.readouterr().out == ""
    (request,) = receiver.requests
    (resource,) = request.resource_metrics
    about = attributes(resource.resource.attributes)
    assert about["service.name"] == "gpuprobe"
    assert about["host.name"]
    (scope,) = resource.scope_metrics
    assert scope.scope.name == "gpuprobe"
    found = {metric.name: metric for metric in scope.metrics}
    assert len(found) == len(scope.metrics)

    used = found["hw.gpu.memory.usage"]
    assert (used.unit, used.sum.is_monotonic, used.sum.aggregation_temporality) == ("By", False, 2)
    # Of four GPUs one gives no handle and one fell off the bus: theirs are not there, not 0.
    assert len(points(used)) == 2
    for point in points(used):
        told = attributes(point.attributes)
        assert told["hw.id"].startswith("GPU-")
        assert (told["hw.type"], told["hw.vendor"]) == ("gpu", "NVIDIA")
        assert "A100" in told["hw.model"]
        assert number(point) > 0
        assert point.time_unix_nano > 1_600_000_000 * 10**9
    up = [number(point) for point in points(found["gpuprobe.gpu.up"])]
    assert sorted(up) == [0, 0, 1, 1]
    energy = found["hw.energy"]
    assert (energy.unit, energy.sum.is_monotonic) == ("J", True)
    tasks = {attributes(p.attributes)["hw.gpu.task"] for p in points(found["hw.gpu.utilization"])}
    assert tasks == {"general", "encoder", "decoder"}
    assert found["hw.temperature"].unit == "Cel"
    assert found["hw.power"].gauge.data_points


def test_what_is_pushed_is_what_prometheus_gets(
    receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--once", "--demo", "--processes", "2"]
    assert main(["export", "--prometheus", "--otlp", receiver.endpoint, *options]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    ((scope,),) = [r.scope_metrics for r in receiver.requests[0].resource_metrics]
    pushed = [number(point) for metric in scope.metrics for point in points(metric)]
    assert sorted(pushed) == sorted(float(line.rpartition(" ")[2]) for line in lines)


def test_it_pushes_again_and_again_until_sigterm(receiver: Receiver) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gpuprobe", "export", "--demo", "empty"),
            *("--otlp", receiver.endpoint, "--interval", "0.1"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for _ in range(2):
            assert receiver.came.acquire(timeout=60)
        receiver.status = 400  # not to be tried again
        for _ in range(3):
            assert receiver.came.acquire(timeout=60)
        receiver.status = 200
        for _ in range(3):
            assert receiver.came.acquire(timeout=60)
        process.terminate()
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "")
    said, *warnings = err.splitlines()
    assert said == f"gpuprobe: pushing to {receiver.endpoint}/v1/metrics every 0.1 s"
    assert len(warnings) == 2, err
    assert "does not accept the metrics" in warnings[0]
    assert "400" in warnings[0]
    assert warnings[1].endswith(f"the push to {receiver.endpoint}/v1/metrics works again")


def test_an_endpoint_that_refuses_is_said(
    receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    receiver.status = 401
    assert main(["export", "--otlp", receiver.endpoint, "--once", "--demo", "empty"]) == 3
    err = capsys.readouterr().err
    assert "does not accept the metrics" in err
    assert "401" in err
    assert len(err.splitlines()) == 2  # the SDK's own log line is not printed beside ours


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/metrics"),
        ("https://otel.example/", "https://otel.example/v1/metrics"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/metrics"),
        ("https://otel.example/in/v1/metrics?x=1", "https://otel.example/in/v1/metrics?x=1"),
    ],
)
def test_endpoints(endpoint: str, url: str) -> None:
    assert metrics_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint", ["localhost:4318", "grpc://x:4317", "http://", "http://x:port", "", "http://[::1"]
)
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(UsageError, match="not an OTLP endpoint"):
        metrics_url(endpoint)


def test_without_the_extra_the_install_line_is_given() -> None:
    code = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from gpuprobe.cli import main\n"
        "sys.exit(main(['export', '--otlp', 'http://localhost:1', '--once', '--demo', 'empty']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3
    assert "pip install 'gpuprobe[otel]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_names_are_those_of_the_official_conventions() -> None:
    """Every ``hw.*`` metric and attribute is in OpenTelemetry's own list, with its unit."""
    hw = pytest.importorskip(
        "opentelemetry.semconv._incubating.metrics.hw_metrics", reason="needs the extra otel"
    )
    from opentelemetry.semconv._incubating.attributes import hw_attributes

    metrics = {value for key, value in vars(hw).items() if key.startswith("HW_")}
    known = {value for key, value in vars(hw_attributes).items() if key.startswith("HW_")}
    used = [metric for metric in METRICS if metric.otel.name.startswith("hw.")]
    assert len(used) >= 8
    for metric in used:
        assert metric.otel.name in metrics
        named = {*metric.otel.attributes.values(), *metric.otel.constant}
        for name in named:
            assert name in known or not name.startswith("hw."), name
        assert metric.otel.constant["hw.type"] == "gpu"


def test_attributes_of_every_metric_are_told_apart() -> None:
    for metric in METRICS:
        told = attributes_of(metric, [f"value of {label}" for label in metric.labels])
        assert len(told) == len(metric.labels) + len(metric.otel.constant), metric.name


def test_an_empty_label_is_no_attribute() -> None:
    metric = Metric("gpuprobe_x", "gauge", "", "X.", ("a", "b"), "", Otel("gpuprobe.x", "gauge"))
    assert attributes_of(metric, ("", "1")) == {"gpuprobe.b": "1"}
