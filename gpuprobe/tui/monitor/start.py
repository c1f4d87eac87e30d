"""From options to a running dashboard."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from gpuprobe.api.monitor import MomentLog, Monitor, ReplayedLog
from gpuprobe.model.machine.monitor import Moment
from gpuprobe.tui.monitor import settings
from gpuprobe.tui.monitor.app import TopApp
from gpuprobe.tui.monitor.feed import Reader

__all__ = ["Logged", "show"]


class Logged:
    """Readings of ``reader``, each of which is written to ``log`` as well."""

    def __init__(self, reader: Reader, log: MomentLog) -> None:
        self._reader = reader
        self._log = log

    def read(self) -> Moment | None:
        moment = self._reader.read()
        if moment is not None:
            self._log.write(moment)
        return moment


def show(args: argparse.Namespace) -> int:
    """Run the dashboard until it is left; returns its exit code.

    Raises UsageError and DataError before a screen is opened, where the log cannot be written or
    the file to replay is none; and a fault of gpuprobe's own that ended the screen.
    """
    with ExitStack() as stack:
        source: Callable[[], AbstractContextManager[Reader]]
        if args.replay is not None:
            replayed = stack.enter_context(ReplayedLog(args.replay))
            source = _once(replayed)
        else:
            source = _machine(args.demo, args.interval)
            if args.log is not None:
                log = MomentLog(args.log)
                stack.callback(log.close)
                source = _logged(source, log)
        app = TopApp(
            args.demo,
            args.interval,
            source=source,
            replayed="" if args.replay is None else Path(args.replay).name,
            readonly=args.readonly,
            settings_file=settings.settings_path(),
        )
        app.run()
        if app.crash is not None:
            raise app.crash
        return app.return_code or 0


def _machine(demo: str | None, interval: float) -> Callable[[], AbstractContextManager[Reader]]:
    return lambda: Monitor(demo, interval=interval, moving=True)


def _once(reader: Reader) -> Callable[[], AbstractContextManager[Reader]]:
    """What is open already: it is not opened again after a failure, nor closed."""

    @contextmanager
    def source() -> Iterator[Reader]:
        yield reader

    return source


def _logged(
    inner: Callable[[], AbstractContextManager[Reader]], log: MomentLog
) -> Callable[[], AbstractContextManager[Reader]]:
    @contextmanager
    def source() -> Iterator[Reader]:
        with inner() as reader:
            yield Logged(reader, log)

    return source
