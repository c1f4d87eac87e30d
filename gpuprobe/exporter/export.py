"""Exporting the metrics of this machine's GPUs and runs: once, or until SIGTERM."""

from __future__ import annotations

import io
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from gpuprobe.errors import GpuprobeError
from gpuprobe.exporter.readings import ExportSettings, MachineMetrics, families_of
from gpuprobe.model.io.files import is_special, new_file

if TYPE_CHECKING:
    from gpuprobe.reporters.metrics.metrics import Family


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
) -> Once:
    """Read once, and write the metrics in Prometheus' text format to ``stream`` and into
    ``textfile``.

    Raises UsageError for an unknown fleet, for a run that is a file and if ``textfile`` cannot be
    written. A machine without a driver is not an error: the metrics report it.
    """
    from gpuprobe.reporters.metrics import prometheus

    with MachineMetrics(settings) as meter:
        measured = meter.read()
        families = families_of(measured)
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
    notify: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Serve the metrics on ``listen`` (``127.0.0.1:9400``) until SIGTERM; every
    ``settings.interval`` seconds, write them into ``textfile``. At the end ``textfile`` is removed,
    so that its values are not mistaken for current ones. Call it in the main thread.

    ``notify`` gets a line for each way in which metrics are exported, ``warn`` a line for each
    problem; no problem of a device, the driver or a run ends the export. Raises UsageError as
    `export_once` does and for a malformed address, EnvironmentUnavailable if it cannot listen
    there.
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


class _Every:
    """A thread that calls ``act`` every ``interval`` seconds, first after an interval.
    Reports when it starts to fail, and when ``what`` works again.
    """

    def __init__(
        self,
        what: str,
        interval: float,
        act: Callable[[], None],
        report: Callable[[str | BaseException], None],
    ) -> None:
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
        try:
            while not self._ended.wait(self._interval):
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
