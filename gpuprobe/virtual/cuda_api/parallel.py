"""What ``torch.nn.DataParallel`` asks of C++: copies to and from several devices."""

from __future__ import annotations

from typing import Any

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine


def install(machine: Machine, patches: Patches) -> None:
    """Source of each: ``torch/csrc/cuda/comm.cpp``."""

    def on(index: int) -> torch.device:
        return torch.device("cuda", index)

    def broadcast(tensor: Any, devices: Any) -> list[Any]:
        return [tensor.to(on(index)) for index in devices]

    def broadcast_coalesced(tensors: Any, devices: Any, buffer_size: int = 0) -> list[list[Any]]:
        first = list(tensors)
        return [
            first if place == 0 else [tensor.to(on(index)) for tensor in first]
            for place, index in enumerate(devices)
        ]

    def scatter(
        tensor: Any, devices: Any, chunk_sizes: Any, dim: int, streams: Any = None
    ) -> tuple[Any, ...]:
        devices = list(devices)
        chunks = (
            tensor.split(list(chunk_sizes), dim)
            if chunk_sizes is not None
            else tensor.chunk(len(devices), dim)
        )
        return tuple(chunk.to(on(index)) for chunk, index in zip(chunks, devices, strict=False))

    def gather(tensors: Any, dim: int, destination: Any = None) -> Any:
        if destination == -1:
            device = torch.device("cpu")
        elif destination is None:
            device = on(machine.local.device)
        else:
            device = on(destination)
        return torch.cat([tensor.to(device) for tensor in tensors], dim)

    patches.set(torch.cuda.nccl, "is_available", lambda tensors: False)
    patches.set_each(
        torch._C,
        {
            "_broadcast": broadcast,
            "_broadcast_coalesced": broadcast_coalesced,
            "_scatter": scatter,
            "_gather": gather,
        },
    )
