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
from typing import IO, TYPE_CHECKING

from gpuprobe.errors import GpuprobeError
from gpuprobe.exporter.readings import ExportSettings, MachineMetrics, families_of
from gpuprobe.model.io.files import is_special, new_file

if TYPE_CHECKING:
    from gpuprobe.exporter.thread import ReadingThread
    from gpuprobe.reporters.metrics.metrics import Family
    from gpuprobe.reporters.metrics.otlp import OtlpPusher

__all__ = ["ExportSettings", "Once", "export", "export_once", "write_textfile"]


class Once:
    """What one export came to. ``anything``: there was a source of device readings, or a run;
    ``messages``: what was wrong, a line each.
    """

    def __init__(self, anything: bool, messages: tuple[str, ...]) -> None:
        self.anything = anything
        self.messages = messages


def export_once(
    settings: ExportSettings,
    *,
    stream: IO[str] | None = None,
    textfile: str | None = None,
    otlp: str | None = None,
) -> Once:
    """Read once, and write the metrics as Prometheus' text to ``stream`` and into ``textfile``,
    and push them to the endpoint ``otlp`` (``http://localhost:4318``).

    Raises UsageError for an unknown fleet, for a run that is a file, for a malformed endpoint
    and where ``textfile`` cannot be written; MissingExtra where ``otlp`` needs what is not
    installed, EnvironmentUnavailable where the endpoint does not take them. A machine without a
    driver is no error: the metrics say so.
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
    """Serve the metrics on ``listen`` (``127.0.0.1:9400``); write them into ``textfile`` and push
    them to the endpoint ``otlp`` every ``settings.interval`` seconds. Until SIGTERM; then
    ``textfile`` is removed, so that nobody takes its values for today's. To be called in the main
    thread.

    ``notify`` gets a line about what is served where, ``warn`` what goes wrong; nothing that
    goes wrong with a device, the driver, a run or the endpoint ends this. Raises UsageError and
    MissingExtra as `export_once` does, UsageError for a malformed address,
    EnvironmentUnavailable where the address cannot be listened on.
    """
    from gpuprobe.exporter.http import MetricsServer, parse_listen
    from gpuprobe.exporter.thread import ReadingThread

    # Threads report here; this one, which alone may be interrupted, prints them.
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
            every = _Every(
                f"writing {textfile}",
                settings.interval,
                lambda: write_textfile(textfile, reader.families()),
                reports.put,
            )
            stack.callback(every.close)
            notify(f"writing {textfile} every {settings.interval:g} s")
        if pusher is not None:
            push = partial(_push, pusher, reader)
            pushes = _Every(
                f"the push to {pusher.url}", settings.interval, push, reports.put, at_once=True
            )
            stack.callback(pushes.close)
            stack.callback(pusher.close)  # first: it breaks off a push that is tried again
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
    """Does something every ``interval`` seconds in a thread, the first time after an interval or
    ``at_once``; a failure is reported when it begins, and when it has ended. ``what`` is done is
    said there.
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
    """SIGTERM came."""


@contextmanager
def _until_terminated() -> Iterator[None]:
    """Inside, SIGTERM ends the block, once, as Ctrl-C would; then it is over without an error."""
    came = False

    def on_signal(*_: object) -> None:
        nonlocal came
        if not came:  # a second one must not break off the tidying up
            came = True
            raise _Terminated

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    except _Terminated:
        return
    finally:
        signal.signal(signal.SIGTERM, before)


def write_textfile(path: str | os.PathLike[str], families: Sequence[Family]) -> None:
    """Write a file for node_exporter's textfile collector: it appears whole or not at all.

    Raises UsageError where it cannot be written.
    """
    from gpuprobe.reporters.metrics import prometheus

    # The collector reads *.prom: the unfinished file is not called so.
    with new_file(path, force=True) as stream:
        text = io.TextIOWrapper(stream, "utf-8", newline="\n", write_through=True)
        prometheus.write(families, text)
        text.detach()
