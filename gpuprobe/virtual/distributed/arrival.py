"""How a spawned process comes to the virtual GPUs of the program that spawned it."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

from gpuprobe.patching import when_imported
from gpuprobe.virtual.catalogue.gpus import GpuModel


class Arrival:
    """What is unpickled in a spawned process before it imports the program, for which it has the
    GPUs from the moment that torch is imported: what a module does at its top level finds them.

    ``gpus``, how they ``compute``, and the allocator's settings (``conf``).
    """

    def __init__(self, gpus: Sequence[GpuModel], compute: str, conf: str) -> None:
        self._given = (tuple(gpus), compute, conf)

    def __reduce__(self) -> Any:
        return _arrive, self._given


def _arrive(gpus: Sequence[GpuModel], compute: str, conf: str) -> None:
    def enter() -> None:
        from gpuprobe.virtual.session import VirtualSession, machine_of

        session = VirtualSession(machine_of(gpus, compute, conf))
        session.machine.unknown_as_nan = compute == "shapes"
        session.start()
        atexit.register(session.stop)

    when_imported("torch", enter)
