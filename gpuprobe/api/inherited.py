"""A process that inherits a simulated GPU, or a recording, from the one that started it."""

from __future__ import annotations

from gpuprobe.native import process
from gpuprobe.sampler.processes import children
from gpuprobe.sampler.processes.recorded import note_assumed


def follow_torch() -> None:
    """Called when such a process has imported torch."""
    if process.loaded() is not None:
        process.when_used(_compute)
    children.arrive()


def _compute() -> None:
    from multiprocessing.util import Finalize

    from gpuprobe.native.session import current

    session = current()
    if session is not None:
        Finalize(None, lambda: note_assumed(session.assumed), exitpriority=90)
