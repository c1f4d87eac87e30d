"""``gpuprobe export``: printed, served and written, by real processes over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from default_sigint import default_sigint
from prometheus_client.parser import text_string_to_metric_families

from gpuprobe.cli import main
from gpuprobe.errors import EnvironmentUnavailable, UsageError
from gpuprobe.exporter.http import MetricsServer, parse_listen
from gpuprobe.model.run.session import Environment, Session, Step
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.reporters.metrics.exporter import SELF_METRICS, self_families
from gpuprobe.reporters.metrics.gpu import GPU_METRICS
from gpuprobe.reporters.metrics.metrics import Family
from gpuprobe.reporters.metrics.run import RUN_METRICS

EXPORTED = {m.name for m in (*GPU_METRICS, *RUN_METRICS, *SELF_METRICS)}


def parsed(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Name -> its samples, by the official client's parser; every name is in the tables."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for one in text_string_to_metric_families(text):
        for sample in one.samples:
            assert sample.name in EXPORTED
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def run_of(path: Path) -> Path:
    writer = RecordingWriter.create(path)
    writer.session(
        Session(1.0, os.getpid(), ("x",), "counters", ("cpu",)),
        Environment("0.1", "3.11", "Linux", socket.gethostname()),
    )
    writer.step(Step(0, 0, 5))
    writer.close()
    return path


# -- once


def test_once_prints_what_the_official_parser_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--prometheus", "--once", "--demo", "--processes", "2"]) == 0
    out, err = capsys.readouterr()
    found = parsed(out)
    assert err == ""
    assert len(found["gpuprobe_gpu_up"]) == 8
    assert found["gpuprobe_source_up"] == [({"source": "nvml"}, 1)]
    assert len(found["gpuprobe_driver_info"]) == 1
    assert found["gpuprobe_gpu_process_memory_bytes"]
    assert found["gpuprobe_runs"] == [({}, 0)]


def test_without_a_driver_it_says_so_and_exits_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--prometheus", "--once", "--demo", "no-driver"]) == 3
    out, err = capsys.readouterr()
    found = parsed(out)
    assert found["gpuprobe_source_up"] == [({"source": "nvml"}, 0)]
    assert not [name for name in found if name.startswith("gpuprobe_gpu")]
    assert "kernel driver is not loaded" in err


def test_runs_need_no_driver(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "a.gpuprobe")
    options = ["--once", "--demo", "no-driver", "--runs", str(run)]
    assert main(["export", "--prometheus", *options]) == 0
    found = parsed(capsys.readouterr().out)
    assert [value for _, value in found["gpuprobe_run_steps_total"]] == [1]
    # A name from the program's directory cannot end a line or act on a terminal.
    hostile = run_of(tmp_path / 'b\n"\x1b[31m\\.gpuprobe')
    assert main(["export", "--prometheus", *options, str(hostile)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    names = {labels["recording"] for labels, _ in parsed(out)["gpuprobe_run_info"]}
    assert names == {"a.gpuprobe", 'b\\x0a"\\x1b[31m\\.gpuprobe'}


def test_a_file_appears_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.prom"
    path.write_text("old")
    before = os.umask(0o027)
    try:
        assert main(["export", "--textfile", str(path), "--once", "--demo"]) == 0
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    assert capsys.readouterr() == ("", "")
    assert len(parsed(path.read_text("utf-8"))["gpuprobe_gpu_up"]) == 8
    assert [entry.name for entry in tmp_path.iterdir()] == ["gpu.prom"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "nothing to export to"),
        (["--once"], "nothing to export to"),
        (["--prometheus", "--once", "--listen", "1"], "--listen requires --prometheus"),
        (["--textfile", "x", "--listen", "1"], "--listen requires --prometheus"),
        (["--prometheus", "--interval", "0"], "--interval takes"),
        (["--prometheus", "--interval", "nan"], "--interval takes"),
        (["--prometheus", "--max-runs", "0"], "--max-runs takes"),
        (["--prometheus", "--processes", "-1"], "--processes takes"),
        (["--prometheus", "--demo", "banana"], "no such fleet"),
        (["--prometheus", "--listen", "localhost:http"], "not an address"),
        (["--prometheus", "--once", "--runs", __file__], "not a directory"),
        (["--once", "--textfile", "/no/such/folder/x.prom", "--demo"], "cannot write"),
    ],
)
def test_mistakes(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "Traceback" not in err


# -- serving


@contextmanager
def exporting(
    *options: str, libraries: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """``gpuprobe export`` in a process of its own, and what it said until it was serving. With
    ``libraries``, a folder of driver libraries to load, else a demo.
    """
    environ = dict(os.environ)
    if libraries is not None:
        environ["LD_LIBRARY_PATH"] = str(libraries)
    words = ["export", *(["--demo"] * (libraries is None)), *options]
    with default_sigint():
        process = subprocess.Popen(
            [sys.executable, "-m", "gpuprobe", *words],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line.rstrip())
            if "serving" in line or ("writing" in line and "--prometheus" not in options):
                break
        else:
            pytest.fail(f"it did not serve: {said}")
        yield process, said
    finally:
        process.kill()
        process.communicate(timeout=30)


def url_in(said: list[str]) -> str:
    (url,) = re.findall(r"serving (http://\S+)", said[-1])
    return str(url)


def test_it_serves_until_sigterm(tmp_path: Path) -> None:
    textfile, run = tmp_path / "gpu.prom", run_of(tmp_path / "run.gpuprobe")
    options = ["--listen", "127.0.0.1:0", "--textfile", str(textfile), "--runs", str(tmp_path)]
    with exporting("--prometheus", "--interval", "0.1", *options) as (process, said):
        url = url_in(said)
        assert url.startswith("http://127.0.0.1:")
        assert not [line for line in said if "warning" in line]
        with urlopen(url, timeout=30) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert "Python" not in answer.headers["Server"]
            found = parsed(answer.read().decode("utf-8"))
        assert len(found["gpuprobe_gpu_up"]) == 8
        assert [value for _, value in found["gpuprobe_run_steps_total"]] == [1]
        assert parsed(textfile.read_text("utf-8"))["gpuprobe_run_steps_total"]

        writer = (run / "rank-00000.jsonl").open("a", encoding="utf-8")
        with writer:
            writer.write('{"type":"step","index":1,"start_ns":5,"duration_ns":5}\n')
        steps = 0.0
        while steps != 2:  # scrapes until a reading is young enough to know
            with urlopen(url, timeout=30) as answer:
                found = parsed(answer.read().decode("utf-8"))
            ((_, steps),) = found["gpuprobe_run_steps_total"]
        while parsed(textfile.read_text("utf-8"))["gpuprobe_run_steps_total"][0][1] != 2:
            pass

        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "")
        assert not textfile.exists()


def test_ctrl_c_ends_it() -> None:
    with exporting("--prometheus", "--listen", "0") as (process, _):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (130, "", "")


def test_a_port_in_use_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["export", "--prometheus", "--listen", f"127.0.0.1:{port}"]) == 3
    err = capsys.readouterr().err
    assert "cannot listen on" in err
    assert "in use" in err
    assert "--listen" in err


def test_other_addresses_than_loopback_are_warned_of() -> None:
    with exporting("--prometheus", "--listen", ":0") as (process, said):
        assert re.search(r"warning: listening on 0\.0\.0\.0: .*without a password", said[0])
        process.terminate()
        process.wait(30)


def test_a_scrape_makes_no_cuda_context(tmp_path: Path) -> None:
    """Real libraries, compiled from a description of a machine: NVML is loaded, CUDA is not."""
    import fleet_library as build

    if build.compiler() is None:
        pytest.skip("no C compiler")
    folder = build.build("8xh100", tmp_path / "lib")
    assert (folder / "libcuda.so.1").exists()
    options = ("--prometheus", "--listen", "0", "--interval", "0.1", "--no-discovery")
    with exporting(*options, libraries=folder) as (process, said):
        for _ in range(3):
            with urlopen(url_in(said), timeout=30) as answer:
                found = parsed(answer.read().decode("utf-8"))
            assert len(found["gpuprobe_gpu_power_watts"]) == 8
        maps = Path(f"/proc/{process.pid}/maps").read_text("utf-8")
        assert "libnvidia-ml.so.1" in maps
        assert "libcuda" not in maps


def test_nothing_of_a_device_library_but_nvml_is_loaded() -> None:
    code = (
        "import sys, io\n"
        "from gpuprobe.exporter.export import ExportSettings, export_once\n"
        "export_once(ExportSettings(demo='8xh100'), stream=io.StringIO())\n"
        "print('\\n'.join(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    modules = set(done.stdout.split())
    assert "pynvml" in modules
    heavy = {"torch", "pycuda", "textual", "numpy", "http.server", "opentelemetry"}
    assert not modules & (heavy | {"gpuprobe.probes.cuda_driver"})


# -- the server itself


@pytest.fixture
def server() -> Iterator[tuple[MetricsServer, list[str], list[float]]]:
    reports: list[str] = []
    asked: list[float] = []

    def families(timeout: float) -> list[Family]:
        asked.append(timeout)
        if timeout == 0.8:
            raise ZeroDivisionError("a bug")
        return self_families(None, sources=("nvml",), taken_at=1, duration=2, runs=0, left_out=0)

    server = MetricsServer("127.0.0.1", 0)
    server.start(families, reports.append)
    yield server, reports, asked
    server.close()


Served = tuple[MetricsServer, list[str], list[float]]


def test_pages(server: Served) -> None:
    root = server[0].url.removesuffix("/metrics")
    with urlopen(root + "/", timeout=30) as answer:
        assert b"metrics" in answer.read()
    with urlopen(root + "/metrics?x=y", timeout=30) as answer:
        assert parsed(answer.read().decode())["gpuprobe_build_info"]
    with urlopen(Request(root + "/metrics", method="HEAD"), timeout=30) as answer:
        assert int(answer.headers["Content-Length"]) > 100
        assert answer.read() == b""
    for path, method, code in (("/x", "GET", 404), ("/metrics", "POST", 501)):
        with pytest.raises(HTTPError) as error:
            urlopen(Request(root + path, method=method), timeout=30)
        assert error.value.code == code
        error.value.close()


def test_a_scrape_waits_less_than_its_client(server: Served) -> None:
    for given in ("2", "1000", "words", "-5", "nan"):
        request = Request(server[0].url, headers={"X-Prometheus-Scrape-Timeout-Seconds": given})
        urlopen(request, timeout=30).close()
    waits = server[2]
    assert waits[:3] == [1.6, 8.0, 8.0]
    assert all(0 < wait <= 8 for wait in waits)


def test_a_request_that_fails_is_reported_and_the_next_one_served(server: Served) -> None:
    request = Request(server[0].url, headers={"X-Prometheus-Scrape-Timeout-Seconds": "1"})
    with pytest.raises((HTTPError, http.client.HTTPException, ConnectionError)):
        urlopen(request, timeout=30)
    urlopen(server[0].url, timeout=30).close()
    assert server[1] == ["a request failed: ZeroDivisionError: a bug"]


def test_clients_that_send_nothing_or_go_away_do_no_harm(server: Served) -> None:
    host, port = "127.0.0.1", int(server[0].url.rpartition(":")[2].partition("/")[0])
    idle = [socket.create_connection((host, port)) for _ in range(5)]
    idle[0].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    idle[0].close()
    urlopen(server[0].url, timeout=30).close()
    for one in idle:
        one.close()
    assert server[1] == []


def _connected(server: MetricsServer, count: int) -> list[socket.socket]:
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    return [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(count)]


def test_connections_are_bounded(server: Served) -> None:
    idle = _connected(server[0], 40)
    # Each beyond the bound replaces the oldest: reading from that ends.
    assert [one.recv(1) for one in idle[:8]] == [b""] * 8
    urlopen(server[0].url, timeout=30).close()
    assert threading.active_count() < 45
    for one in idle:
        one.close()


def test_requests_that_do_not_end_block_no_scrape(server: Served) -> None:
    slow = _connected(server[0], 40)
    stop = threading.Event()

    def send() -> None:
        while not stop.wait(0.05):
            for one in slow:
                with contextlib.suppress(OSError):
                    one.sendall(b"G")

    thread = threading.Thread(target=send)
    thread.start()
    try:
        for _ in range(5):
            urlopen(server[0].url, timeout=30).close()
    finally:
        stop.set()
        thread.join()
        for one in slow:
            one.close()


def test_a_request_has_a_deadline_that_no_byte_extends(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuprobe.exporter.http._TO_REQUEST", 0.3)
    (slow,) = _connected(server[0], 1)
    sent = 0
    with pytest.raises(OSError):  # noqa: PT011, PT012 - reset, or broken pipe, some day
        while True:
            slow.sendall(b"G")
            sent += 1
            time.sleep(0.02)
    assert sent
    slow.close()


def test_other_machines_do_not_replace_clients_of_this_one(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = _connected(server[0], 32)
    urlopen(server[0].url, timeout=30).close()  # all of them were accepted: it replaced the first
    monkeypatch.setattr("gpuprobe.exporter.http._is_loopback", lambda address: False)
    others = _connected(server[0], 8)
    local[1].setblocking(False)
    assert [one.recv(1) for one in others[:7]] == [b""] * 7  # each replaces the one before
    with pytest.raises(BlockingIOError):
        local[1].recv(1)
    for one in (*local, *others):
        one.close()


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("127.0.0.1:9400", ("127.0.0.1", 9400)),
        ("9400", ("127.0.0.1", 9400)),
        (":9400", ("0.0.0.0", 9400)),
        ("[::1]:9400", ("::1", 9400)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_addresses(text: str, meaning: tuple[str, int]) -> None:
    assert parse_listen(text) == meaning


@pytest.mark.parametrize("text", ["", "host", "host:", "host:-1", "host:65536", "::1:80", "a:b"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="not an address"):
        parse_listen(text)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(EnvironmentUnavailable, match="cannot listen on 192"):
        MetricsServer("192.0.2.1", 0)  # TEST-NET-1: nobody's


def test_ipv6() -> None:
    try:
        server = MetricsServer("::1", 0)
    except EnvironmentUnavailable as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    assert server.loopback
    assert server.url.startswith("http://[::1]:")
    server.close()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("fleet", ["8xh100", "hostile", "lost-gpu", "no-driver"])
def test_promtool_has_nothing_to_say(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["export", "--prometheus", "--once", "--demo", fleet, "--processes", "3"])
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=capsys.readouterr().out,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
