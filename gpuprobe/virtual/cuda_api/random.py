"""Random numbers on a virtual device come from the CPU's default generator.

So a program's losses are those of its CPU run. A seed for the device alone is remembered and
reported, and does not reseed the CPU; the device's state is the CPU generator's state.
"""

from __future__ import annotations

from typing import Any

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine

__all__ = ["install"]

_Real: Any = torch._C.Generator


class _Kind(type(_Real)):  # type: ignore[misc]
    """``isinstance(torch.default_generator, torch.Generator)`` stays true."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _Real)


class Generator(_Real, metaclass=_Kind):
    """``torch.Generator`` that may claim to be a CUDA device's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        wanted = torch.device(device) if not isinstance(device, torch.device) else device
        made = super().__new__(cls, device="cpu")
        if wanted.type == "cuda" and wanted.index is None:
            wanted = torch.device("cuda", torch.cuda.current_device())
        made._device = wanted
        return made

    @property
    def device(self) -> torch.device:
        return self._device


class _Default(Generator):
    """A device's default generator: the CPU's under another name."""

    def manual_seed(self, seed: int) -> Any:
        self._seed = int(seed)
        return self

    def seed(self) -> int:
        self._seed = int(torch.default_generator.initial_seed())
        return self._seed

    def initial_seed(self) -> int:
        return getattr(self, "_seed", 0)

    def get_state(self) -> Any:
        return torch.default_generator.get_state()

    def set_state(self, state: Any) -> Any:
        torch.default_generator.set_state(state)
        return self

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> Any:
        return self


def install(machine: Machine, patches: Patches) -> None:
    patches.set(torch, "Generator", Generator)
    generators = tuple(
        _Default(torch.device("cuda", index)) for index in range(len(machine.devices))
    )
    patches.set(torch.cuda, "default_generators", generators)
