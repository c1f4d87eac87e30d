"""``torch.cuda.random``: seeds and states of the devices' own generators."""

from __future__ import annotations

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.generators import Generator
from gpuprobe.virtual.machine import Machine


def install(machine: Machine, patches: Patches) -> None:
    patches.set(torch, "Generator", Generator)
    patches.set(torch.cuda, "default_generators", machine.generators.default)
