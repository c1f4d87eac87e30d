"""Operators that the host waits for. With ``torch.cuda.set_sync_debug_mode`` they warn, or fail.

Source: ``warn_or_error_on_sync`` in ``c10/cuda/CUDAFunctions.cpp``, which waiting for a stream and
copies that are waited for call. Synchronizing explicitly does not count.
"""

from __future__ import annotations

import warnings
from typing import Any, Final

import torch

from gpuprobe.hazards.rules import SYNCS
from gpuprobe.virtual.machine import Machine

_TEXT: Final = "called a synchronizing CUDA operation"
_WARN: Final = 1


def report(machine: Machine, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
    """After an operator of a device. Raises RuntimeError in mode "error", and warns in "warn"."""
    name = func._schema.name.rpartition("::")[2]
    if name not in SYNCS and not _waits(machine, name, args, kwargs, result):
        return
    if machine.unwaited:
        machine.in_flight.host_has_waited()
    if machine.sync_debug_mode < _WARN:
        return
    if machine.sync_debug_mode > _WARN:
        raise RuntimeError(_TEXT)
    warnings.warn(_TEXT, UserWarning, stacklevel=2)


def _waits(machine: Machine, name: str, args: tuple[Any, ...], kwargs: Any, result: Any) -> bool:
    """Whether it is a copy between host and device that the host waits for."""
    if name == "copy_":
        target, source = args[:2]
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    elif name == "_to_copy" and isinstance(result, torch.Tensor):
        target, source = result, args[0]
        waits = not kwargs.get("non_blocking", False)
    else:
        return False
    return waits and (machine.place_of(target) < 0) != (machine.place_of(source) < 0)
