"""A process that inherits a simulated GPU, or a recording, from the one that started it."""

from __future__ import annotations

import sys
from types import TracebackType

from gpuprobe.native import process
from gpuprobe.sampler.processes import children
from gpuprobe.sampler.processes.notes import note_assumed


def follow_torch() -> None:
    """Called when such a process has imported torch."""
    if process.loaded() is not None:
        process.when_used(_compute)
    children.arrive()
    _show_errors_without_own_frames()


def _compute() -> None:
    from multiprocessing.util import Finalize

    from gpuprobe.native.session import current

    session = current()
    if session is not None:
        Finalize(None, lambda: note_assumed(session.assumed), exitpriority=90)


def _show_errors_without_own_frames() -> None:
    """An error that ends this process is shown with the frames that it has without gpuprobe."""
    original = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        own = trace is error.__traceback__
        try:
            from gpuprobe.sampler.program import cut_traceback, show_by  # 5 ms, as it fails

            cut_traceback(error)
        except Exception:  # noqa: BLE001 - the program has replaced the import: our frames show
            original(kind, error, trace)
            return
        show_by(original, error, error.__traceback__ if own else trace)

    sys.excepthook = excepthook
