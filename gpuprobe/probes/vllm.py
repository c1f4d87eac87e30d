"""Servers of vLLM on the GPUs, and what their ``/metrics`` report: KV cache and requests.

A server is a process with vLLM's command line (``vllm serve``, or the module
``vllm.entrypoints.openai.api_server``) that is on a GPU, or is an ancestor of one that is: engine
cores and workers are its children. Without one, no request is made.

Requests go to an address of this machine alone, each in a thread, at most one per server. It has
`LIMIT_S` seconds and `MOST_BYTES` in total; redirects are not followed.
"""

from __future__ import annotations

import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Final

from gpuprobe.model.machine.devices import GpuProcess
from gpuprobe.model.machine.monitor import ServerLoad
from gpuprobe.model.values import Reading, ReadStatus, Unavailable
from gpuprobe.probes.host import ProcTree

LIMIT_S: Final = 2.0
"""Seconds that a request may take, from connecting to the last byte."""

MOST_BYTES: Final = 2 << 20
"""A server of vLLM sends about a tenth of this."""

EVERY_S: Final = 1.0
"""Seconds between two requests to a server, at least."""

MOST_SERVERS: Final = 16
_RENEW_S: Final = 30.0
"""Seconds after which the ancestors of a process are read again."""

_DEPTH: Final = 16
"""Ancestors that are searched. An engine core is a child of the server, a worker a grandchild."""

_PORT: Final = 8000  # vllm/entrypoints/openai/cli_args.py
_MODULE: Final = "vllm.entrypoints.openai.api_server"
_FILE: Final = "vllm/entrypoints/openai/api_server.py"

KV_CACHE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""Gauges of the used fraction of the KV cache, 1 for all: the current name, and that until vLLM 0.9
(vllm/v1/metrics/loggers.py)."""
RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"

# The text format: name, labels, value, time (Prometheus, "Exposition formats").
_SAMPLE: Final = re.compile(
    rf"^({'|'.join((*KV_CACHE, RUNNING, WAITING))})(?:\{{[^\n]*\}})?"
    r"[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$",
    re.M,
)

_NOT_YET: Final = Unavailable("not read yet", ReadStatus.NOT_COLLECTED)

Endpoint = tuple[str, int]


def endpoint_of(arguments: Sequence[str]) -> Endpoint | Unavailable | None:
    """The address and port of the server that this command line starts: those of ``--host`` and
    ``--port``, with loopback for all addresses. None for another program; Unavailable for a server
    that cannot be queried.
    """
    begin = _options_begin(arguments)
    if begin is None:
        return None
    options = dict(_options(arguments[begin:]))
    if "uds" in options:
        return Unavailable("it serves a Unix socket", ReadStatus.UNSUPPORTED)
    if "ssl-keyfile" in options or "ssl-certfile" in options:
        return Unavailable("it serves TLS", ReadStatus.UNSUPPORTED)
    if "headless" in options:
        return Unavailable("it has no API server (--headless)", ReadStatus.UNSUPPORTED)
    if "config" in options and "port" not in options:
        return Unavailable("its port is in its --config", ReadStatus.UNSUPPORTED)
    port = options.get("port", str(_PORT))
    if not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 1 << 16):
        return Unavailable("its --port is not a port")
    host = options.get("host", "")
    loopback = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}
    return loopback.get(host, host), int(port)


def _options_begin(arguments: Sequence[str]) -> int | None:
    """The position after vLLM's own command; None for another program."""
    for at, argument in enumerate(arguments[:-1]):
        following = arguments[at + 1]
        if os.path.basename(argument) == "vllm" and following == "serve":  # noqa: PTH119
            return at + 2
        if argument == "-m" and following == _MODULE:
            return at + 2
    for at, argument in enumerate(arguments[:3]):
        if argument.endswith(_FILE):
            return at + 1
    return None


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Long options with their values, spelled with dashes, as vLLM's parser accepts them."""
    for at, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            if not equals and at + 1 < len(arguments):
                value = arguments[at + 1]
            yield name.replace("_", "-"), value


# -- the endpoint


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a server reports. ``kv_cache``: the used fraction, of the engine that uses most;
    requests of all engines together.
    """

    kv_cache: float | Unavailable
    running: int | Unavailable
    waiting: int | Unavailable


def parse_metrics(text: str) -> Metrics:
    """The values of a ``/metrics`` text. One that is missing or impossible is Unavailable."""
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        found.setdefault(name, []).append(number)
    cache = next((found[name] for name in KV_CACHE if name in found), [])
    used: float | Unavailable = Unavailable(f"no {KV_CACHE[0]} in /metrics")
    if cache:
        valid = all(0 <= one <= 1 for one in cache)
        used = max(cache) if valid else Unavailable(f"{KV_CACHE[0]} is not a fraction")
    return Metrics(used, _requests(found, RUNNING), _requests(found, WAITING))


def _requests(found: dict[str, list[float]], name: str) -> int | Unavailable:
    values = found.get(name, [])
    if not values:
        return Unavailable(f"no {name} in /metrics")
    if not all(0 <= one < 1 << 53 for one in values):  # neither is NaN
        return Unavailable(f"{name} is not a count")
    return int(sum(values))


class _Received:
    """A response that has been received, where `http.client` expects a socket."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, mode: str) -> BytesIO:
        return BytesIO(self._content)


def read_metrics(endpoint: Endpoint, limit: float = LIMIT_S) -> Metrics | Unavailable:
    """What the server at this address of this machine reports, within ``limit`` seconds. Never
    raises for what the other end does.
    """
    from http.client import HTTPException, HTTPResponse  # 15 ms, only with a server of vLLM

    try:
        content = _get(endpoint, time.monotonic() + limit)
        if isinstance(content, Unavailable):
            return content
        response = HTTPResponse(_Received(content))  # type: ignore[arg-type]
        response.begin()
        if response.status != 200:
            return Unavailable(f"/metrics returned status {response.status}")
        return parse_metrics(response.read().decode("utf-8", "replace"))
    except TimeoutError:
        return Unavailable(f"/metrics did not respond within {limit:g} s")
    except OSError as error:
        return Unavailable(f"/metrics: {error.strerror or error}")
    except (HTTPException, ValueError) as error:  # ValueError: a length that is not a number
        return Unavailable(f"/metrics is not HTTP: {type(error).__name__}")


def _get(endpoint: Endpoint, deadline: float) -> bytes | Unavailable:
    """The whole response. Raises OSError, and TimeoutError after the deadline."""
    host, port = endpoint
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not _is_local(family, host):
        return Unavailable("its --host is not an address of this machine")
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(_left(deadline))
        connection.connect((host, port))
        name = f"[{host}]" if ":" in host else host
        request = f"GET /metrics HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode("ascii"))
        parts: list[bytes] = []
        size = 0
        while True:
            connection.settimeout(_left(deadline))
            part = connection.recv(1 << 16)
            if not part:
                return b"".join(parts)
            parts.append(part)
            size += len(part)
            if size > MOST_BYTES:
                return Unavailable(f"/metrics is larger than {MOST_BYTES >> 20} MiB")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _is_local(family: socket.AddressFamily, host: str) -> bool:
    """Whether this is an address of this machine, in numbers: only such a one can be bound."""
    try:
        socket.inet_pton(family, host)  # a name is not resolved
        with socket.socket(family, socket.SOCK_STREAM) as own:
            own.bind((host, 0))
    except (OSError, ValueError):
        return False
    return True


# -- repeated readings


@dataclass(slots=True)
class _Server:
    """A server between two readings."""

    endpoint: Endpoint | Unavailable
    request: threading.Thread | None = None
    requested_at: float = -math.inf
    newest: Metrics | Unavailable = _NOT_YET


@dataclass(slots=True)
class _Family:
    """The server that a process belongs to, if any, and when this was read."""

    server: tuple[int, int] | None
    read_at: float


@dataclass(slots=True)
class ServerWatch:
    """Repeated readings of the servers of one ``/proc``. Reading never waits for a server: it
    returns what the last response had. ``clock`` in seconds.
    """

    tree: ProcTree
    clock: Callable[[], float] = time.monotonic
    _families: dict[tuple[int, int], _Family] = field(default_factory=dict)
    _servers: dict[tuple[int, int], _Server] = field(default_factory=dict)

    def read(self, processes: Iterable[GpuProcess]) -> tuple[ServerLoad, ...]:
        """The servers of these processes, by PID."""
        now = self.clock()
        members: dict[tuple[int, int], list[int]] = {}
        current: dict[tuple[int, int], _Family] = {}
        for pid in dict.fromkeys(process.pid for process in processes):
            stat = self.tree.stat(pid)
            if isinstance(stat, Unavailable):
                continue
            key = pid, stat.start
            family = self._families.get(key)
            if family is None or now - family.read_at >= _RENEW_S:
                family = _Family(self._server_of(pid), now)
            current[key] = family
            if family.server is not None:
                members.setdefault(family.server, []).append(pid)
        self._families = current
        self._servers = {key: self._servers[key] for key in members}
        chosen = sorted(members)[:MOST_SERVERS]
        return tuple(self._load(key, tuple(members[key]), now) for key in chosen)

    def _server_of(self, pid: int) -> tuple[int, int] | None:
        """PID and start of the server that is this process or its nearest such ancestor."""
        for _ in range(_DEPTH):
            stat = self.tree.stat(pid)
            if isinstance(stat, Unavailable):
                return None
            raw = self.tree.read(str(pid), "cmdline")
            found = None if isinstance(raw, Unavailable) else endpoint_of(raw.split("\0"))
            if found is not None:
                key = pid, stat.start
                if key not in self._servers:
                    elsewhere = self._elsewhere(pid)
                    self._servers[key] = _Server(found if elsewhere is None else elsewhere)
                return key
            if stat.parent <= 1:
                return None
            pid = stat.parent
        return None

    def _elsewhere(self, pid: int) -> Unavailable | None:
        """Why the loopback of a process is not that of this one; None if it is."""
        try:
            theirs = os.readlink(f"{self.tree.root}/{pid}/ns/net")  # noqa: PTH115
            ours = os.readlink("/proc/self/ns/net")  # noqa: PTH115
        except OSError as error:
            return Unavailable(f"its network namespace: {error.strerror}", ReadStatus.DENIED)
        if theirs != ours:
            return Unavailable("it is in another network namespace", ReadStatus.UNSUPPORTED)
        return None

    def _load(self, key: tuple[int, int], members: tuple[int, ...], now: float) -> ServerLoad:
        server = self._servers[key]
        endpoint = server.endpoint
        load = ServerLoad(key[0], members)
        if isinstance(endpoint, Unavailable):
            newest: Metrics | Unavailable = endpoint
        else:
            newest = server.newest
            load = replace(load, host=endpoint[0], port=endpoint[1])
            self._request(server, endpoint, now)
        if isinstance(newest, Unavailable):
            newest = Metrics(newest, newest, newest)
        return replace(
            load,
            kv_cache=Reading(newest.kv_cache, "vllm"),
            running=Reading(newest.running, "vllm"),
            waiting=Reading(newest.waiting, "vllm"),
        )

    def _request(self, server: _Server, endpoint: Endpoint, now: float) -> None:
        """Send a request in a thread, unless one is in progress or the last one is recent."""
        busy = server.request is not None and server.request.is_alive()
        if busy or now - server.requested_at < EVERY_S:
            return
        server.requested_at = now

        def request() -> None:
            server.newest = read_metrics(endpoint)

        server.request = threading.Thread(target=request, name="gpuprobe-vllm", daemon=True)
        server.request.start()

    def wait(self) -> None:
        """Wait for the requests in progress, each of which has `LIMIT_S` seconds."""
        for server in list(self._servers.values()):
            if server.request is not None:
                server.request.join()
