"""The bounds of ``--compute auto`` on a machine of virtual GPUs."""

from __future__ import annotations

from gpuprobe.torch_support.budget import MEMORY, OPERATIONS, Allowance
from gpuprobe.virtual.machine import Machine

__all__ = ["MEMORY", "OPERATIONS", "Budget"]


class Budget:
    """Raises `TooLarge` in the program once a machine has done more than it may."""

    def __init__(
        self, machine: Machine, memory: int | None = None, operations: float = OPERATIONS
    ) -> None:
        allowance = Allowance(memory, operations)
        machine.meter = allowance.count
        for device in machine.devices:
            device.bound = allowance.memory
            device.beyond = allowance.too_much
