"""``torch.cuda.random``: seeds and states of the devices' own generators."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gpuprobe.patching import Patches
from gpuprobe.torch_support.version import installed
from gpuprobe.virtual.generators import Generator
from gpuprobe.virtual.machine import Machine


def install(machine: Machine, patches: Patches) -> None:
    patches.set(torch, "Generator", Generator)
    patches.set(torch.cuda, "default_generators", machine.generators.default)
    if installed() < (2, 9):
        _state_itself(machine, patches)


def _state_itself(machine: Machine, patches: Patches) -> None:
    """Early versions (2.6) set a copy of a state, of which `States` knows less."""
    original = torch.cuda.set_rng_state

    @functools.wraps(original)
    def set_rng_state(new_state: Any, device: Any = "cuda") -> None:
        index = torch.cuda._utils._get_device_index(device, optional=True)
        machine.generators.default[index].set_state(new_state)

    patches.set_all(torch.cuda.random, {"set_rng_state": set_rng_state}, "torch.cuda")
