"""Distributed tensors (``torch.distributed.tensor``) on a virtual machine."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine

_MODULE: Final = "torch.distributed.tensor"


class DistributedTensors:
    """What torch does for distributed tensors, changed where it would need CUDA itself."""

    def __init__(self, machine: Machine, patches: Patches) -> None:
        self._machine = machine
        self._patches = patches
        self._installed = False

    def install(self) -> None:
        """Do so now, if the program has imported them. To import them here would cost 1 s."""
        if self._installed or _MODULE not in sys.modules:
            return
        self._installed = True
        machine = self._machine
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        original = ShardingPropagator._propagate_tensor_meta_non_cached

        @functools.wraps(original)
        def propagate(propagator: Any, schema: Any) -> Any:
            op = schema.op
            if torch.Tag.nondeterministic_seeded in op.tags and op._schema.is_mutable:
                # Torch would fill a fake CUDA tensor, by a copy that asks for CUDA's device guard,
                # which a build without CUDA has not. The tensor keeps its shape.
                return schema.args_schema[0].tensor_meta
            with machine.dispatch.below():
                return original(propagator, schema)

        self._patches.set(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate)
