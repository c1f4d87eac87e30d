"""Exporting the metrics of this machine's GPUs and runs: once, or until told to stop."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from gpuprobe.api.export_meter import ExportSettings, Meter, families_of
from gpuprobe.errors import UsageError

if TYPE_CHECKING:
    from gpuprobe.reporters.metrics import Family

__all__ = ["ExportSettings", "Once", "export", "export_once", "write_textfile"]


class Once:
    """What one export came to. ``anything``: there was a source of device readings, or a run;
    ``messages``: what was wrong, a line each.
    """

    def __init__(self, anything: bool, messages: tuple[str, ...]) -> None:
        self.anything = anything
        self.messages = messages


def export_once(
    settings: ExportSettings, *, stream: IO[str] | None = None, textfile: str | None = None
) -> Once:
    """Read once, and write the metrics as Prometheus' text to ``stream`` and into ``textfile``.

    Raises UsageError for an unknown fleet, for a run that is a file, and where ``textfile``
    cannot be written. A machine without a driver is no error: the metrics say so.
    """
    from gpuprobe.reporters import prometheus

    with Meter(settings) as meter:
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
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Serve the metrics on ``listen`` (``127.0.0.1:9400``), and write them into ``textfile``
    every ``settings.interval`` seconds, until SIGTERM; then ``textfile`` is removed, so that
    nobody takes its values for today's. To be called in the main thread.

    ``say`` is told what is served where, ``warn`` what goes wrong; nothing that goes wrong with a
    device, the driver or a run ends this. Raises UsageError as `export_once` does and for a
    malformed address, EnvironmentUnavailable where the address cannot be listened on.
    """
    from gpuprobe.api.export_http import MetricsServer, parse_listen
    from gpuprobe.api.export_reader import Reader

    # Threads report here; this one, which alone may be interrupted, says it.
    reports: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
    with _until_terminated(), ExitStack() as stack:
        meter = Meter(settings)
        server = None
        if listen is not None:
            server = MetricsServer(*parse_listen(listen))
            stack.callback(server.close)
        reader = Reader(meter, interval=settings.interval, report=reports.put)
        stack.callback(reader.close)
        if textfile is not None:
            write_textfile(textfile, reader.families())
            stack.callback(Path(textfile).unlink, missing_ok=True)
            every = _Every(
                settings.interval, lambda: write_textfile(textfile, reader.families()), reports.put
            )
            stack.callback(every.close)
            say(f"writing {textfile} every {settings.interval:g} s")
        if server is not None:
            server.start(reader.families, reports.put)
            if not server.loopback:
                warn(
                    f"listening on {server.host}: whoever can reach this machine can read its "
                    "GPUs, processes and runs; there is no password"
                )
            say(f"serving {server.url}")
        while True:
            report = reports.get()
            if isinstance(report, BaseException):
                raise report
            warn(report)


class _Every:
    """Does something every ``interval`` seconds in a thread; a failure is reported when it
    begins, and when it has ended.
    """

    def __init__(
        self,
        interval: float,
        act: Callable[[], None],
        report: Callable[[str | BaseException], None],
    ) -> None:
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
                except UsageError as error:
                    if trouble != str(error):
                        self._report(str(error))
                    trouble = str(error)
                else:
                    if trouble:
                        self._report(f"it works again: {trouble}")
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
    from gpuprobe.reporters import prometheus

    where = Path(path)
    # The collector reads *.prom: the unfinished file must not be called so.
    temporary = where.with_name(f".{where.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                prometheus.write(families, file)
            temporary.replace(where)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {where}: {error.strerror or error}") from error
