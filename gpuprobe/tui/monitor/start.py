"""From options to a running dashboard."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprobe.api.monitor import Monitor
from gpuprobe.model.machine.monitor import Moment
from gpuprobe.model.machine.selection import Selection
from gpuprobe.tui.monitor import settings
from gpuprobe.tui.monitor.app import TopApp
from gpuprobe.tui.monitor.reader_thread import MachineReader

if TYPE_CHECKING:
    from gpuprobe.api.monitor import MomentLog


class Logged:
    """Readings of ``reader``, each of which is written to ``log`` as well."""

    def __init__(self, reader: MachineReader, log: MomentLog) -> None:
        self._reader = reader
        self._log = log

    def read(self) -> Moment | None:
        moment = self._reader.read()
        if moment is not None:
            self._log.write(moment)
        return moment


def show(args: argparse.Namespace, selection: Selection) -> int:
    """Run the dashboard of what is selected until it is left; returns its exit code.

    Raises UsageError and DataError before a screen is opened, where the log cannot be written or
    the file to replay is none; and a fault of gpuprobe's own that ended the screen.
    """
    with ExitStack() as stack:
        source: Callable[[], AbstractContextManager[MachineReader]]
        if args.replay is not None:
            from gpuprobe.api.monitor import ReplayedLog  # 5 ms, as `MomentLog`

            opened = nullcontext(stack.enter_context(ReplayedLog(args.replay)))
            source = partial(_same, opened)  # it is not opened again after a failure
        else:
            log = None
            if args.log is not None:
                from gpuprobe.api.monitor import MomentLog

                log = MomentLog(args.log)
                stack.callback(log.close)
            source = partial(_machine, args.demo, args.interval, log)
        app = TopApp(
            args.demo,
            args.interval,
            source=source,
            replayed="" if args.replay is None else Path(args.replay).name,
            readonly=args.readonly,
            settings_file=settings.settings_path(),
            selection=selection,
        )
        return app.show()


def _same(opened: AbstractContextManager[MachineReader]) -> AbstractContextManager[MachineReader]:
    return opened


@contextmanager
def _machine(demo: str | None, interval: float, log: MomentLog | None) -> Iterator[MachineReader]:
    with Monitor(demo, interval=interval, moving=True) as monitor:
        yield monitor if log is None else Logged(monitor, log)
