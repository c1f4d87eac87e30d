"""Finetuning ViT-g/14 with an optimizer on the GPU or on the host, as torchao's page on its
low-bit optimizers describes it, with pictures of 224 pixels.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any

import torch
from figures import figure


def main(precision: str, offload: str) -> None:
    timm: Any = importlib.import_module("timm")
    name = "vit_giant_patch14_dinov2.lvd142m"
    model = timm.create_model(name, pretrained=False, num_classes=45, img_size=224)
    model.set_grad_checkpointing()
    full = precision == "bf16"
    if full:
        model.bfloat16()
    model.to("cuda")
    optimizer_class: Any = functools.partial(torch.optim.AdamW, fused=True)
    if offload != "none":
        found = importlib.util.find_spec("torchao.optim")
        where = "torchao.optim" if found else "torchao.prototype.low_bit_optim"
        outer = importlib.import_module(where).CPUOffloadOptimizer
        optimizer_class = functools.partial(
            outer, optimizer_class=optimizer_class, offload_gradients=offload == "gradients"
        )
    optimizer = optimizer_class(model.parameters(), lr=1e-4, weight_decay=0)
    model.train()
    try:
        for _ in range(3):
            pictures = torch.zeros(32, 3, 224, 224, dtype=torch.bfloat16 if full else torch.float32)
            labels = torch.zeros(32, dtype=torch.long)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not full):
                output = model(pictures.to("cuda"))
                loss = torch.nn.functional.cross_entropy(output, labels.to("cuda"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except torch.cuda.OutOfMemoryError:
        figure("verdict", "OOM")
        return
    figure("verdict", "fits")
    figure("peak", torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main(*sys.argv[1:])
