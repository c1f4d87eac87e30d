"""How long each phase of a step spends in calls that move tensors to a device.

Such a call blocks the program until the copy is over, unless the memory is pinned and the program
asked not to wait. It is measured in jobs of several ranks alone, where a rank that copies slowly is
one that the others wait for: in calls of ``Tensor.to`` that name a device, and of ``Tensor.cuda``.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.patching import patch

_DEVICES: Final = (torch.device, str, int, torch.Tensor)
"""Types of an argument of ``Tensor.to`` that names a device: ``bool`` does not."""


class Copies:
    """What was spent since the last `take`, in the thread that installed it."""

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self._spent: dict[str, int] = {}
        self._thread = 0
        self._within = False

    def install(self) -> list[Callable[[], None]]:
        """Measure from now on; returns what undoes it."""
        self._thread = threading.get_ident()
        return [
            patch(torch.Tensor, name, self._measured(getattr(torch.Tensor, name), always))
            for name, always in (("to", False), ("cuda", True))
        ]

    def _measured(self, original: Callable[..., Any], always: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if (
                torch.compiler.is_compiling()
                or self._within
                or threading.get_ident() != self._thread
                or not (always or _names_device(args, kwargs))
            ):
                return original(*args, **kwargs)
            self._within = True
            began = time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._within = False
                phase = self._phase().partition("/")[0]
                spent = time.perf_counter_ns() - began
                self._spent[phase] = self._spent.get(phase, 0) + spent

        return measured

    def take(self) -> dict[str, int]:
        """By phase of depth one, since the last time. Nanoseconds."""
        found, self._spent = self._spent, {}
        return found


def _names_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "device" in kwargs or "other" in kwargs:
        return True
    return len(args) > 1 and isinstance(args[1], _DEVICES) and not isinstance(args[1], bool)
