"""Images and volumes: kornia, MONAI, vit-pytorch."""

from __future__ import annotations

from typing import Any

from foreign.libraries.adaptation import steps_of
from foreign.programs import program


@program("kornia/homography", "kornia")
def homography(device: str) -> Any:
    import kornia
    import torch

    class Warp(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.nn.Parameter(torch.zeros(1, 2))
            self.turn = torch.nn.Parameter(torch.zeros(1))

        def forward(self, images: Any) -> Any:
            center = torch.tensor([[15.5, 15.5]], device=images.device)
            scale = torch.ones(1, 2, device=images.device)
            matrix = kornia.geometry.get_rotation_matrix2d(center, self.turn, scale)
            matrix = torch.cat([matrix[..., :2], matrix[..., 2:] + self.shift[..., None]], -1)
            return kornia.geometry.warp_affine(images, matrix, (32, 32))

    model = Warp().to(device)
    images = torch.rand(1, 3, 32, 32).to(device)
    aim = images.roll(2, -1)
    return steps_of(model, lambda: (model(images) - aim).abs().mean(), lr=0.1)


@program("vit-pytorch/vit", "vit_pytorch")
def vit_pytorch(device: str) -> Any:
    import torch
    from vit_pytorch import ViT

    model = ViT(
        image_size=32, patch_size=8, num_classes=4, dim=32, depth=2, heads=2, mlp_dim=64
    ).to(device)
    images = torch.randn(2, 3, 32, 32).to(device)
    labels = torch.tensor([0, 1]).to(device)
    return steps_of(model, lambda: torch.nn.functional.cross_entropy(model(images), labels))
