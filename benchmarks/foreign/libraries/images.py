"""Images and volumes: kornia, MONAI, vit-pytorch."""

from __future__ import annotations

from typing import Any

from foreign.libraries.adaptation import steps_of
from foreign.programs import program


@program("kornia/filters-and-edges", "kornia")
def filters(device: str) -> Any:
    import kornia
    import torch

    model = torch.nn.Conv2d(3, 3, 3, padding=1).to(device)
    images = torch.rand(2, 3, 32, 32).to(device)

    def loss() -> Any:
        out = model(images).sigmoid()
        edges = kornia.filters.sobel(kornia.filters.gaussian_blur2d(out, (3, 3), (1.0, 1.0)))
        return kornia.losses.ssim_loss(out, images, 5) + edges.abs().mean()

    return steps_of(model, loss)


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


@program("kornia/augmentation", "kornia")
def augmentation(device: str) -> Any:
    import kornia.augmentation as K
    import torch

    change = torch.nn.Sequential(
        K.RandomHorizontalFlip(p=0.5),
        K.RandomAffine(10.0, p=0.5),
        K.ColorJitter(0.1, 0.1, 0.1, 0.1, p=0.5),
        K.Normalize(torch.zeros(3), torch.ones(3)),
    ).to(device)
    model = torch.nn.Conv2d(3, 4, 3).to(device)
    images = torch.rand(4, 3, 32, 32).to(device)
    return steps_of(model, lambda: model(change(images)).square().mean())


@program("monai/unet-dice", "monai.networks.nets", "monai.losses", "monai.inferers")
def monai_unet(device: str) -> Any:
    import torch
    from monai.inferers import sliding_window_inference
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    model = UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2)
    ).to(device)
    loss_of = DiceCELoss(to_onehot_y=True, softmax=True)
    volumes = torch.randn(2, 1, 16, 16, 16).to(device)
    labels = torch.randint(0, 2, (2, 1, 16, 16, 16)).to(device)
    found = steps_of(model, lambda: loss_of(model(volumes), labels))
    with torch.no_grad():
        out = sliding_window_inference(volumes[:1], (8, 8, 8), 2, model, overlap=0.25)
    return [*found, out.square().mean().item()]


@program("monai/swin-unetr-transforms", "monai.networks.nets", "monai.transforms", "monai.data")
def monai_swin(device: str) -> Any:
    import numpy as np
    import torch
    from monai.data import DataLoader, Dataset
    from monai.metrics import DiceMetric
    from monai.networks.nets import UNETR
    from monai.transforms import Compose, EnsureChannelFirstd, NormalizeIntensityd, ToTensord

    keys = ["image", "label"]
    change = Compose(
        [
            EnsureChannelFirstd(keys, channel_dim="no_channel"),
            NormalizeIntensityd("image"),
            ToTensord(keys),
        ]
    )
    draw = np.random.default_rng(0)
    rows = [
        {
            "image": draw.standard_normal((16, 16, 16), dtype=np.float32),
            "label": draw.integers(0, 2, (16, 16, 16)).astype(np.float32),
        }
        for _ in range(2)
    ]
    model = UNETR(
        in_channels=1,
        out_channels=1,
        img_size=16,
        feature_size=4,
        hidden_size=32,
        mlp_dim=64,
        num_heads=4,
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    metric = DiceMetric()
    losses = []
    for batch in DataLoader(Dataset(rows, change), batch_size=1):
        image, label = batch["image"].to(device), batch["label"].to(device)
        out = model(image)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(out, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metric(y_pred=(out.sigmoid() > 0.5).float(), y=label)
        losses.append(loss.item())
    return [*losses, metric.aggregate().item()]


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
