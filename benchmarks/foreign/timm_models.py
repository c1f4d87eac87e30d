"""One model of a family of timm, with random weights: a few steps of SGD on small images."""

from __future__ import annotations

from typing import Any


def train(name: str, device: str, steps: int = 2) -> list[Any]:
    """The losses, as tensors on the device."""
    import timm
    import torch

    torch.manual_seed(0)
    size: dict[str, Any] = {}
    image = 64
    fixed = ("vit_", "deit", "beit", "eva", "swin", "cait", "mixer", "volo")
    if any(family in name for family in fixed):
        size = {"img_size": image}
    model = timm.create_model(name, pretrained=False, num_classes=10, **size).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(2, 3, image, image)
    labels = torch.tensor([1, 2])
    losses = []
    for _ in range(steps):
        out = model(images.to(device))
        loss = torch.nn.functional.cross_entropy(out, labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses
