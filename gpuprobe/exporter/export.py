"""Exporting the metrics of this machine's GPUs and runs: once, or until SIGTERM."""

from __future__ import annotations

import io
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from gpuprobe.errors import GpuprobeError
from gpuprobe.exporter.readings import ExportSettings, MachineMetrics, families_of
from gpuprobe.model.io.files import is_special, new_file

if TYPE_CHECKING:
    from gpuprobe.exporter.readings import ReadingThread
    from gpuprobe.reporters.metrics.metrics import Family
    from gpuprobe.reporters.metrics.otlp import OtlpPusher


class Once(NamedTuple):
    """The result of one export. ``anything``: whether there was a source of device readings, or a
    run; ``messages``: one line per problem.
    """

    anything: bool
    messages: tuple[str, ...]


def export_once(
    settings: ExportSettings,
    *,
    stream: IO[str] | None = None,
    textfile: str | None = None,
    otlp: str | None = None,
) -> Once:
    """Read once, write the metrics in Prometheus' text format to ``stream`` and into ``textfile``,
    and push them to the endpoint ``otlp`` (``http://localhost:4318``).

    Raises UsageError for an unknown fleet, for a run that is a file, for a malformed endpoint and
    if ``textfile`` cannot be written; MissingExtra if a package that ``otlp`` needs is not
    installed, EnvironmentUnavailable if the endpoint rejects the metrics. A machine without a
    driver is not an error: the metrics report it.
    """
    from gpuprobe.reporters.metrics import prometheus

    with ExitStack() as stack:
        meter = stack.enter_context(MachineMetrics(settings))
        pusher = None if otlp is None else _pusher(otlp, stack)
        measured = meter.read()
        families = families_of(measured)
        if pusher is not None:
            pusher.push(families, taken_ns=round(measured.taken_at * 1e9))
    if textfile is not None:
        write_textfile(textfile, families)
    if stream is not None:
        prometheus.write(families, stream)
    return Once(measured.anything, measured.messages)


def export(
    settings: ExportSettings,
    *,
    listen: str | None = None,
    textfile: str | None = None,
    otlp: str | None = None,
    notify: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Serve the metrics on ``listen`` (``127.0.0.1:9400``) until SIGTERM; every
    ``settings.interval`` seconds, write them into ``textfile`` and push them to the endpoint
    ``otlp``. At the end ``textfile`` is removed, so that its values are not mistaken for current
    ones. Call it in the main thread.

    ``notify`` gets a line for each way in which metrics are exported, ``warn`` a line for each
    problem; no problem of a device, the driver, a run or the endpoint ends the export. Raises
    UsageError and MissingExtra as `export_once` does, UsageError for a malformed address,
    EnvironmentUnavailable if it cannot listen there.
    """
    from gpuprobe.exporter.http import MetricsServer, parse_listen
    from gpuprobe.exporter.readings import ReadingThread

    # Messages of the threads. The main thread prints them: it alone receives signals.
    reports: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
    with _until_terminated(), ExitStack() as stack:
        meter = MachineMetrics(settings)
        server = None
        if listen is not None:
            server = MetricsServer(*parse_listen(listen))
            stack.callback(server.close)
        pusher = None if otlp is None else _pusher(otlp, stack)
        reader = ReadingThread(meter, interval=settings.interval, report=reports.put)
        stack.callback(reader.close)
        if textfile is not None:
            write_textfile(textfile, reader.families())
            if not is_special(Path(textfile)):
                stack.callback(Path(textfile).unlink, missing_ok=True)
            writes = _Every(
                f"writing {textfile}",
                settings.interval,
                lambda: write_textfile(textfile, reader.families()),
                reports.put,
            )
            stack.callback(writes.close)
            notify(f"writing {textfile} every {settings.interval:g} s")
        if pusher is not None:
            push = partial(_push, pusher, reader)
            pushes = _Every(
                f"the push to {pusher.url}", settings.interval, push, reports.put, at_once=True
            )
            stack.callback(pushes.close)
            stack.callback(pusher.close)  # runs first: it stops a push that is being retried
            notify(f"pushing to {pusher.url} every {settings.interval:g} s")
        if server is not None:
            server.start(reader.families, reports.put)
            if not server.loopback:
                warn(
                    f"listening on {server.host}: anyone who can reach this machine can read its "
                    "GPUs, processes and runs without a password"
                )
            notify(f"serving {server.url}")
        while True:
            report = reports.get()
            if isinstance(report, BaseException):
                raise report
            warn(report)


def _pusher(endpoint: str, stack: ExitStack) -> OtlpPusher:
    from gpuprobe.reporters.metrics.otlp import OtlpPusher

    pusher = OtlpPusher(endpoint)
    stack.callback(pusher.close)
    return pusher


def _push(pusher: OtlpPusher, reader: ReadingThread) -> None:
    families = reader.families()
    pusher.push(families, taken_ns=time.time_ns())


class _Every:
    """A thread that calls ``act`` every ``interval`` seconds, first after an interval or, with
    ``at_once``, immediately. Reports when it starts to fail, and when ``what`` works again.
    """

    def __init__(
        self,
        what: str,
        interval: float,
        act: Callable[[], None],
        report: Callable[[str | BaseException], None],
        *,
        at_once: bool = False,
    ) -> None:
        self._first = 0.0 if at_once else interval
        self._what = what
        self._interval = interval
        self._act = act
        self._report = report
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="gpuprobe-every", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(1.0)

    def _work(self) -> None:
        trouble = ""
        wait = self._first
        try:
            while not self._ended.wait(wait):
                wait = self._interval
                try:
                    self._act()
                except GpuprobeError as error:
                    if trouble != str(error):
                        self._report(str(error))
                    trouble = str(error)
                else:
                    if trouble:
                        self._report(f"{self._what} works again")
                    trouble = ""
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._report(error)


class _Terminated(BaseException):
    """SIGTERM was received."""


@contextmanager
def _until_terminated() -> Iterator[None]:
    """End the block at the first SIGTERM, without an error."""
    received = False

    def on_signal(*_: object) -> None:
        nonlocal received
        if not received:  # a second one must not interrupt the cleanup
            received = True
            raise _Terminated

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    except _Terminated:
        return
    finally:
        signal.signal(signal.SIGTERM, before)


def write_textfile(path: str | os.PathLike[str], families: Sequence[Family]) -> None:
    """Write a file for node_exporter's textfile collector, atomically.

    Raises UsageError if it cannot be written.
    """
    from gpuprobe.reporters.metrics import prometheus

    # The collector reads *.prom: the unfinished file has another name.
    with new_file(path, force=True) as stream:
        text = io.TextIOWrapper(stream, "utf-8", newline="\n", write_through=True)
        prometheus.write(families, text)
        text.detach()
