"""One training step of any model: precision, optimizer, accumulation, clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Step", "Training", "Work"]

Step = Callable[[], Tensor]
"""Does one training step and returns its loss, on the device."""


@dataclass(frozen=True)
class Work:
    """A model, its data and its loss. ``data(step)`` gives a batch in host memory."""

    model: nn.Module
    data: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]  # (model, *batch)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "adamw-loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=False),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "sgd-momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4
    ),
    "sgd-nesterov-fused": lambda parameters: torch.optim.SGD(
        parameters, lr=1e-3, momentum=0.9, nesterov=True, fused=True
    ),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4),
}


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    ``precision``: ``fp32``; ``bf16`` and ``fp16`` are autocast, the latter with a gradient
    scaler; ``pure-bf16`` makes the parameters bf16. ``accumulate`` counts micro-batches a
    step. ``on_device`` makes the parameters on the device instead of copying them there.
    """

    optimizer: str = "adamw"
    precision: str = "fp32"
    accumulate: int = 1
    set_to_none: bool = True
    clip: float = 0.0
    channels_last: bool = False
    on_device: bool = False

    def start(self, make: Callable[[], Work], device: str) -> Step:
        """Put the model on the device and return the step."""
        with torch.device(device) if self.on_device else contextlib.nullcontext():
            work = make()
        model = work.model.to(device)
        if self.precision == "pure-bf16":
            model = model.to(torch.bfloat16)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)
        model.train()
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        kind = torch.device(device).type
        # A scale at which no step is skipped: when optimizer state appears should not depend on
        # the values.
        scaler = torch.amp.GradScaler(kind, init_scale=256.0) if self.precision == "fp16" else None
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        count = 0

        def step() -> Tensor:
            nonlocal count
            optimizer.zero_grad(set_to_none=self.set_to_none)
            for _ in range(self.accumulate):
                batch = [part.to(device, non_blocking=True) for part in work.data(count)]
                count += 1
                if self.channels_last:
                    batch[0] = batch[0].contiguous(memory_format=torch.channels_last)
                if self.precision == "pure-bf16":
                    batch = [
                        part.to(torch.bfloat16) if part.is_floating_point() else part
                        for part in batch
                    ]
                with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
                    loss = work.loss(model, *batch) / self.accumulate
                (loss if scaler is None else scaler.scale(loss)).backward()
            if self.clip:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            return loss.detach()

        return step
