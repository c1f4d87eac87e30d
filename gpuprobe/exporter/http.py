"""The HTTP server that Prometheus scrapes: one page of text, from the standard library."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from gpuprobe._version import __version__
from gpuprobe.errors import EnvironmentUnavailable, UsageError
from gpuprobe.exporter.readings import READ_TIMEOUT

if TYPE_CHECKING:
    from gpuprobe.reporters.metrics.metrics import Family

Request = socket.socket | tuple[bytes, socket.socket]

_MOST = 32  # simultaneous connections
_TO_REQUEST = 5.0  # seconds in which a client must have sent its whole request
_TO_RESPOND = READ_TIMEOUT + 5.0  # seconds until the client must have received the whole response

_INDEX = """<!doctype html><html lang="en"><meta charset="utf-8"><title>gpuprobe</title>
<p><a href="metrics">metrics</a> of this machine's GPUs and runs, for Prometheus</p></html>
"""


def parse_listen(text: str) -> tuple[str, int]:
    """``HOST:PORT``, ``[IPv6]:PORT``, ``PORT`` (loopback) or ``:PORT`` (every address).

    Raises UsageError for anything else. Port 0: any free port.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not port.isdecimal() or int(port) > 65535 or (":" in host and not bracketed):
        raise UsageError(
            f"not an address to listen on: {text!r}", hint="as in --listen 127.0.0.1:9400"
        )
    return (host or "0.0.0.0") if colon else "127.0.0.1", int(port)


class MetricsServer:
    """Serves ``/metrics`` on ``host`` and ``port`` from `start` to `close`.

    The constructor binds the address. Raises EnvironmentUnavailable if it is in use, if it does not
    belong to this machine or without the permission.
    """

    def __init__(self, host: str, port: int) -> None:
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            (family, _, _, _, address), *_ = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            self._server = _Server((str(address[0]), int(address[1])), family)
        except OSError as error:
            raise EnvironmentUnavailable(
                f"cannot listen on {shown}: {error.strerror or error}",
                hint="choose another address or port: --listen 127.0.0.1:9401",
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="gpuprobe-http", daemon=True
        )

    @property
    def host(self) -> str:
        """The numeric address that it listens on."""
        return str(self._server.server_address[0])

    @property
    def loopback(self) -> bool:
        """Whether it is reachable from this machine only."""
        return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self._server.server_address[1]}/metrics"

    def start(
        self, families: Callable[[float], list[Family]], report: Callable[[str], None]
    ) -> None:
        """Respond to requests with the result of ``families``, which is called from several
        threads, with its time limit in seconds. ``report`` gets a line about each failed request.
        """
        self._server.families = families
        self._server.report = report
        self._thread.start()

    def close(self) -> None:
        """Stop listening, without waiting for requests in progress."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


@dataclass
class _Connection:
    """A connection. ``deadline``: when it is closed, by the monotonic clock."""

    request: socket.socket
    local: bool
    deadline: float
    waiting: bool = True  # for its request

    def close(self) -> None:
        """End it, in whichever call its thread waits."""
        with contextlib.suppress(OSError):  # the client has disconnected
            self.request.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    """Connections are bounded and have deadlines, so that none can keep others from being served.
    One too many replaces the oldest that has not sent its request; a client on another machine does
    not replace one on this machine.
    """

    daemon_threads = True
    request_queue_size = 4 * _MOST
    block_on_close = False  # a scrape that waits for the driver must not delay the end
    families: Callable[[float], list[Family]]
    report: Callable[[str], None]

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        self._lock = threading.Lock()
        self._open: dict[socket.socket, _Connection] = {}  # the oldest first
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # That of HTTPServer resolves this machine's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "gpuprobe", int(self.server_address[1])

    def service_actions(self) -> None:
        """Close connections whose deadline has passed. Called ten times a second."""
        now = time.monotonic()
        with self._lock:
            late = [one for one in self._open.values() if one.deadline < now]
        for one in late:
            one.close()

    def process_request(self, request: Request, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        local = _is_loopback(client_address)
        connection = _Connection(request, local, time.monotonic() + _TO_REQUEST)
        with self._lock:
            replaced = self._to_replace(local) if len(self._open) >= _MOST else None
            admitted = replaced is not None or len(self._open) < _MOST
            if replaced is not None:
                del self._open[replaced.request]
            if admitted:
                self._open[request] = connection
        if replaced is not None:
            replaced.close()
        if admitted:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def _to_replace(self, local: bool) -> _Connection | None:
        waiting = [one for one in self._open.values() if one.waiting and (local or not one.local)]
        return min(waiting, key=lambda one: (one.local, one.deadline), default=None)

    def requested(self, request: socket.socket) -> None:
        """The whole request was received."""
        with self._lock:
            connection = self._open.get(request)
            if connection is not None:
                connection.waiting = False
                connection.deadline = time.monotonic() + _TO_RESPOND

    def process_request_thread(self, request: Request, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def handle_error(self, request: Request, client_address: object) -> None:
        import sys

        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, TimeoutError)):  # the client has disconnected
            self.report(f"a request failed: {type(error).__name__}: {error}")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = f"gpuprobe/{__version__}"
    sys_version = ""
    timeout = _TO_RESPOND

    def do_GET(self) -> None:
        self.server.requested(self.connection)
        path = self.path.partition("?")[0]
        if path == "/metrics":
            from gpuprobe.reporters.metrics.prometheus import CONTENT_TYPE, render

            families = self.server.families(self._timeout())
            self._respond(200, CONTENT_TYPE, render(families))
        elif path == "/":
            self._respond(200, "text/html; charset=utf-8", _INDEX)
        else:
            self._respond(404, "text/plain; charset=utf-8", "not found; see /metrics\n")

    do_HEAD = do_GET

    def _timeout(self) -> float:
        """Seconds that this scrape may wait: less than Prometheus' own timeout."""
        timeout = self.headers.get("X-Prometheus-Scrape-Timeout-Seconds", "")
        try:
            return min(READ_TIMEOUT, max(0.1, 0.8 * float(timeout)))
        except ValueError:
            return READ_TIMEOUT

    def _respond(self, code: int, kind: str, text: str) -> None:
        body = text.encode("utf-8")
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a line for each scrape has no use."""


def _is_loopback(address: object) -> bool:
    host = str(address[0]) if isinstance(address, tuple) else ""
    try:
        return ipaddress.ip_address(host.partition("%")[0].removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False
