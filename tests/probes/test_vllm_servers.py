"""Servers of vLLM: real processes with its command line, and real HTTP servers on loopback."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from gpuprobe.model.machine.devices import GpuProcess, Inventory
from gpuprobe.model.machine.monitor import Moment, ServerLoad
from gpuprobe.model.values import Bytes, Reading, Unavailable
from gpuprobe.probes.host import ProcTree
from gpuprobe.probes.vllm import (
    EVERY_S,
    MOST_BYTES,
    Metrics,
    ServerWatch,
    endpoint_of,
    parse_metrics,
    read_metrics,
)
from gpuprobe.tui.monitor.processes import ListOptions, process_rows, server_text

HTTP = b"HTTP/1.1 200 OK\r\n"


def exposed(
    used: Sequence[float], running: Sequence[int], waiting: Sequence[int], cache: str
) -> bytes:
    """What vLLM sends: its gauges have the labels model_name and engine."""
    registry = CollectorRegistry()
    for name, values in (
        (cache, used),
        ("vllm:num_requests_running", running),
        ("vllm:num_requests_waiting", waiting),
        ("vllm:num_requests_running_other", [77]),
    ):
        gauge = Gauge(name, "of vLLM", ("model_name", "engine"), registry=registry)
        for engine, value in enumerate(values):
            gauge.labels(model_name="a } b", engine=str(engine)).set(value)
    return generate_latest(registry)


ONE = exposed([0.421], [3], [1], "vllm:kv_cache_usage_perc")


# -- command lines


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/v/bin/python /v/bin/vllm serve m", ("127.0.0.1", 8000)),
        ("vllm serve m --port 8100", ("127.0.0.1", 8100)),
        ("vllm serve m --port=8100 --host=::", ("::1", 8100)),
        ("vllm serve m --host 0.0.0.0", ("127.0.0.1", 8000)),
        ("vllm serve m --host localhost --port 1", ("127.0.0.1", 1)),
        ("python -m vllm.entrypoints.openai.api_server --port 9", ("127.0.0.1", 9)),
        ("python /x/vllm/entrypoints/openai/api_server.py --host 10.0.0.7", ("10.0.0.7", 8000)),
        ("vllm serve m --port", None),
        ("vllm serve m --port 0", None),
        ("vllm serve m --port 99999", None),
        ("vllm serve m --port 8000000000000000000000", None),
        ("vllm serve m --uds /tmp/s", None),
        ("vllm serve m --ssl_keyfile k", None),
        ("vllm serve m --headless", None),
        ("vllm serve m --config c.yaml", None),
        ("vllm serve m --config c.yaml --port 7", ("127.0.0.1", 7)),
    ],
)
def test_the_command_line_names_the_endpoint(
    command: str, expected: tuple[str, int] | None
) -> None:
    found = endpoint_of(command.split())
    assert (None if isinstance(found, Unavailable) else found) == expected
    assert found is not None


@pytest.mark.parametrize(
    "command",
    ["", "vllm", "vllm bench serve", "python train.py vllm --port 1", "cat vllm serve.py"],
)
def test_other_programs_are_no_servers(command: str) -> None:
    assert endpoint_of(command.split()) is None


# -- texts


def test_the_gauges_of_all_engines_are_joined() -> None:
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
        text = exposed([0.25, 0.75], [3, 4], [0, 2], name).decode()
        assert parse_metrics(text) == Metrics(0.75, 7, 2)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1.5e300", "seven"])
def test_impossible_values_are_missing(value: str) -> None:
    found = parse_metrics(
        f"vllm:kv_cache_usage_perc {value}\nvllm:num_requests_running {value}\n"
        "vllm:num_requests_waiting 2\n"
    )
    assert isinstance(found.kv_cache, Unavailable)
    assert isinstance(found.running, Unavailable)
    assert found.waiting == 2


@given(st.text())
def test_any_text_is_parsed(text: str) -> None:
    parse_metrics(text)
    parse_metrics(f"vllm:num_requests_running{{{text}")


# -- endpoints


@contextmanager
def answering(handle: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server on loopback that gives each connection to ``handle``; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    try:
                        handle(connection)
                    except OSError:
                        continue  # the other end has left

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def sending(*parts: bytes) -> Callable[[socket.socket], None]:
    def handle(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        for part in parts:
            connection.sendall(part)

    return handle


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize(
    "response",
    [
        HTTP + b"Content-Length: %d\r\n\r\n" % len(ONE) + ONE,
        HTTP + b"\r\n" + ONE,
        HTTP + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(ONE),  # as uvicorn sends
    ],
)
def test_a_response_is_read(response: bytes) -> None:
    with answering(sending(response)) as port:
        assert read_metrics(("127.0.0.1", port)) == Metrics(0.421, 3, 1)


BAD = {
    "nothing": (b"", "without response"),
    "nonsense": (bytes(range(256)) * 9, "not HTTP"),
    "headers": (HTTP + b"a: b\r\n" * 500, "not HTTP"),
    "long header": (HTTP + b"a" * 100_000, "not HTTP"),
    "truncated": (HTTP + b"Content-Length: 999999\r\n\r\n" + ONE, "not HTTP"),
    "chunk": (HTTP + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + ONE, "not HTTP"),
    "status": (b"HTTP/1.1 503 Busy\r\n\r\n" + ONE, "status 503"),
    "megabytes": (HTTP + b"\r\n" + ONE * (MOST_BYTES // len(ONE) + 1), "larger than 2 MiB"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_response_is_a_reason(kind: str) -> None:
    response, reason = BAD[kind]
    with answering(sending(response)) as port:
        found = read_metrics(("127.0.0.1", port))
    assert isinstance(found, Unavailable)
    assert reason in found.reason


def test_a_body_that_is_no_text_of_metrics_has_no_values() -> None:
    with answering(sending(HTTP + b"\r\n\xff\x00<html>")) as port:
        found = read_metrics(("127.0.0.1", port))
    assert isinstance(found, Metrics)
    assert isinstance(found.kv_cache, Unavailable)


def test_redirects_are_not_followed() -> None:
    visited: list[socket.socket] = []
    with answering(visited.append) as other:
        place = b"Location: http://127.0.0.1:%d/metrics\r\n\r\n" % other
        with answering(sending(b"HTTP/1.1 307 Moved\r\n" + place)) as port:
            found = read_metrics(("127.0.0.1", port))
    assert isinstance(found, Unavailable)
    assert "status 307" in found.reason
    assert visited == []


def test_a_response_that_drips_is_given_up_after_the_limit() -> None:
    done = threading.Event()

    def drip(connection: socket.socket) -> None:
        # Each byte comes within the time of a single read; only the total is limited.
        while not done.wait(0.05):
            connection.sendall(b"H")

    with answering(drip) as port:
        found = read_metrics(("127.0.0.1", port), limit=0.3)
        done.set()
    assert found == Unavailable("/metrics did not respond within 0.3 s")


def test_an_endpoint_that_hangs_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:  # nothing accepts
        found = read_metrics(("127.0.0.1", silent.getsockname()[1]), limit=0.2)
    assert found == Unavailable("/metrics did not respond within 0.2 s")


def test_only_addresses_of_this_machine_get_requests() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    refused = read_metrics(("127.0.0.1", port))
    assert isinstance(refused, Unavailable)
    assert "refused" in refused.reason
    for host in ("192.0.2.1", "example.org", "127.0.0.1.example.org", "2001:db8::1", "a b\r\n"):
        found = read_metrics((host, port))
        assert found == Unavailable("its --host is not an address of this machine"), host


# -- processes

_SLEEP = "import sys; sys.stdin.read()"
_PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {_SLEEP!r}], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
child.communicate()
"""


@contextmanager
def server_process(folder: Path, *options: str) -> Iterator[tuple[int, int]]:
    """A process with vLLM's command line and its child, as an engine core is; their PIDs."""
    program = folder / "vllm"
    program.write_text(_PARENT)
    with subprocess.Popen(
        [sys.executable, str(program), "serve", "some/model", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.communicate()


def on_gpu(*pids: int) -> list[GpuProcess]:
    return [GpuProcess(pid, "GPU-a", ("compute",), Reading(Bytes(1), "nvml")) for pid in pids]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_engine_core_belongs_to_its_server(tmp_path: Path) -> None:
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ONE)

        def log_message(self, *args: object) -> None:
            pass

    clock = Clock()
    watch = ServerWatch(ProcTree("/proc"), clock)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as metrics:
        thread = threading.Thread(target=metrics.serve_forever)
        thread.start()
        port = metrics.server_port
        with server_process(tmp_path, "--port", str(port)) as (server, core):
            processes = on_gpu(core, os.getpid())
            (first,) = watch.read(processes)
            assert (first.pid, first.processes, first.port) == (server, (core,), port)
            assert isinstance(first.kv_cache.value, Unavailable)  # nothing waits for a response
            watch.wait()
            (second,) = watch.read(processes)
            assert (second.kv_cache.value, second.running.value) == (0.421, 3)
            assert second.waiting.value == 1
            watch.wait()
            assert paths == ["/metrics"]  # the second reading came too soon for a request
            clock.now += EVERY_S
            watch.read(on_gpu(core, server))
            watch.wait()
            assert paths == ["/metrics"] * 2
            (both,) = watch.read(on_gpu(core, server, core))
            assert both.processes == (core, server)
        clock.now += EVERY_S
        assert watch.read(processes) == ()  # it has ended
        metrics.shutdown()
        thread.join()
    assert paths == ["/metrics"] * 2


def test_without_a_server_there_is_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was made")

    monkeypatch.setattr(socket, "socket", refuse)
    watch = ServerWatch(ProcTree("/proc"))
    assert watch.read(on_gpu(os.getpid(), 1, 1 << 30)) == ()
    assert watch.read([]) == ()


def test_a_server_that_hangs_has_one_thread_and_slows_no_reading(tmp_path: Path) -> None:
    clock = Clock()
    watch = ServerWatch(ProcTree("/proc"), clock)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with server_process(tmp_path, f"--port={port}") as (_, core):
            before = threading.active_count()
            for _ in range(20):
                clock.now += EVERY_S
                (load,) = watch.read(on_gpu(core))
                assert isinstance(load.kv_cache.value, Unavailable)
                assert threading.active_count() <= before + 1
            watch.wait()
            (load,) = watch.read(on_gpu(core))
            assert "did not respond" in str(load.kv_cache.value)
            watch.wait()


def test_a_server_of_another_network_namespace_gets_no_request(tmp_path: Path) -> None:
    folder = tmp_path / "proc" / "42"
    (folder / "ns").mkdir(parents=True)
    (folder / "ns" / "net").symlink_to("net:[1]")
    (folder / "cmdline").write_bytes(b"vllm\0serve\0m\0")
    (folder / "stat").write_text("42 (vllm) S 1" + " 0" * 48)
    (load,) = ServerWatch(ProcTree(tmp_path / "proc")).read(on_gpu(42))
    assert load.kv_cache.value == load.running.value
    assert "another network namespace" in str(load.kv_cache.value)
    assert (load.host, load.port) == ("", 0)


# -- on the screen


def load(used: object, running: object, waiting: object) -> ServerLoad:
    return ServerLoad(
        7,
        (8, 9),
        "127.0.0.1",
        8000,
        Reading(used, "vllm"),  # type: ignore[arg-type]
        Reading(running, "vllm"),  # type: ignore[arg-type]
        Reading(waiting, "vllm"),  # type: ignore[arg-type]
    )


def test_the_rows_of_its_processes_show_the_server() -> None:
    missing = Unavailable("refused\x1b[2J")
    assert server_text(load(0.42, 3, 1)) == "vLLM :8000, KV 42%, 3 running, 1 waiting"
    assert server_text(load(missing, 3, missing)) == "vLLM :8000, 3 running"
    assert "\x1b" not in server_text(load(missing, missing, missing))
    moment = Moment(
        Inventory(0.0, (), processes=tuple(on_gpu(8, 9, 10))), servers=(load(0.42, 3, 1),)
    )
    rows = {row.pid: row.server for row in process_rows(moment, ListOptions())}
    assert rows[8] == rows[9] == "vLLM :8000, KV 42%, 3 running, 1 waiting"
    assert rows[10] == ""
    found = process_rows(moment, ListOptions(needle="vllm"))
    assert {row.pid for row in found} == {8, 9}
