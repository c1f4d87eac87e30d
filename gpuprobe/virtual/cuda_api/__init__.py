"""``torch.cuda`` answered by a virtual machine: one module per theme.

Most of it replaces the functions of ``torch._C`` that a CUDA build has, so that torch's own
Python code above them runs as it does on hardware.
"""

from __future__ import annotations

from gpuprobe.patching import Patches
from gpuprobe.virtual.cuda_api import (
    accelerator,
    devices,
    graphs,
    memory,
    parallel,
    random,
    runtime,
    sharing,
    streams,
    tools,
)
from gpuprobe.virtual.machine import Machine

__all__ = ["install"]


def install(machine: Machine, patches: Patches) -> None:
    """Replace everything; ``patches`` puts it back."""
    for module in (
        devices,
        memory,
        streams,
        random,
        graphs,
        accelerator,
        parallel,
        sharing,
        runtime,
        tools,
    ):
        module.install(machine, patches)
