"""Vision models in plain PyTorch: ViT, ResNet-50, ConvNeXt, U-Net, VAE, GAN."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .training import Work


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def labels(classes: int, batch: int, seed: int) -> Tensor:
    return torch.randint(0, classes, (batch,), generator=torch.Generator().manual_seed(seed))


def _classification(model: nn.Module, batch: int, size: int, classes: int) -> Work:
    def data(step: int) -> tuple[Tensor, ...]:
        return noise(batch, 3, size, size, seed=step), labels(classes, batch, step)

    return Work(model, data, lambda model, x, y: F.cross_entropy(model(x), y))


# -- ViT


class ViT(nn.Module):
    """ViT with torch's own encoder layers (``nn.TransformerEncoderLayer``, norm first)."""

    def __init__(
        self, size: int, patch: int, width: int, depth: int, heads: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.label = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.label.expand(len(x), -1, -1), x), 1) + self.places
        return self.head(self.norm(self.encoder(x)[:, 0]))


def vit(
    *,
    size: int = 224,
    patch: int = 16,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    classes: int = 1000,
    batch: int,
) -> Work:
    return _classification(ViT(size, patch, width, depth, heads, classes), batch, size, classes)


# -- ResNet


class Bottleneck(nn.Module):
    def __init__(self, inside: int, middle: int, stride: int) -> None:
        super().__init__()
        out = 4 * middle
        self.conv1 = nn.Conv2d(inside, middle, 1, bias=False)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(middle, out, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(middle), nn.BatchNorm2d(middle)
        self.norm3 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        inside = width
        for stage, depth in enumerate(depths):
            middle = width << stage
            for block in range(depth):
                stride = 2 if stage and not block else 1
                blocks.append(Bottleneck(inside, middle, stride))
                inside = 4 * middle
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def resnet50(
    *,
    depths: tuple[int, ...] = (3, 4, 6, 3),
    width: int = 64,
    size: int = 224,
    classes: int = 1000,
    batch: int,
) -> Work:
    return _classification(ResNet(depths, width, classes), batch, size, classes)


# -- ConvNeXt


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.mix(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of (batch, channels, height, width)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext(
    *,
    depths: tuple[int, ...] = (3, 3, 9, 3),
    widths: tuple[int, ...] = (96, 192, 384, 768),
    size: int = 224,
    classes: int = 1000,
    batch: int,
) -> Work:
    parts: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        if stage:
            parts += [ChannelNorm(widths[stage - 1]), nn.Conv2d(widths[stage - 1], width, 2, 2)]
        parts += [ConvNeXtBlock(width) for _ in range(depth)]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(widths[-1])]
    model = nn.Sequential(*parts, *pool, nn.Linear(widths[-1], classes))
    return _classification(model, batch, size, classes)


# -- U-Net of a diffusion model


class ResBlock(nn.Module):
    def __init__(self, inside: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inside), nn.GroupNorm(8, out)
        self.conv1 = nn.Conv2d(inside, out, 3, padding=1)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.skip = nn.Conv2d(inside, out, 1) if inside != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class PixelAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).flatten(2).transpose(1, 2)
        y, _ = self.attention(y, y, y, need_weights=False)
        return x + y.transpose(1, 2).unflatten(2, x.shape[2:])


class UNet(nn.Module):
    def __init__(self, width: int, levels: int, channels: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.width, self.time = width, nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU())
        time = 4 * width
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList(
            ResBlock(widths[max(level - 1, 0)], widths[level], time) for level in range(levels)
        )
        self.shrink = nn.ModuleList(nn.Conv2d(w, w, 3, 2, 1) for w in widths[:-1])
        self.middle = ResBlock(widths[-1], widths[-1], time)
        self.attention = PixelAttention(widths[-1])
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(widths[level], widths[level - 1], 2, 2)
            for level in range(levels - 1, 0, -1)
        )
        self.up = nn.ModuleList(
            ResBlock(2 * widths[level - 1], widths[level - 1], time)
            for level in range(levels - 1, 0, -1)
        )
        self.leave = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        steps = torch.arange(self.width // 2, device=x.device) / (self.width // 2)
        angles = when[:, None] * torch.exp(-9.21 * steps)[None, :]
        time = self.time(torch.cat((angles.sin(), angles.cos()), 1))
        x = self.enter(x)
        kept = []
        for level, block in enumerate(self.down):
            x = block(x, time)
            if level < len(self.shrink):
                kept.append(x)
                x = self.shrink[level](x)
        x = self.attention(self.middle(x, time))
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat((grow(x), kept.pop()), 1), time)
        return self.leave(x)


def unet(
    *, width: int = 64, levels: int = 4, channels: int = 3, size: int = 64, batch: int
) -> Work:
    def data(step: int) -> tuple[Tensor, ...]:
        clean = noise(batch, channels, size, size, seed=step)
        return clean, noise(batch, channels, size, size, seed=step + 1), labels(1000, batch, step)

    def loss(model: nn.Module, clean: Tensor, added: Tensor, when: Tensor) -> Tensor:
        part = (when.to(clean.dtype) / 1000)[:, None, None, None]
        noisy = torch.sqrt(1 - part) * clean + torch.sqrt(part) * added
        return F.mse_loss(model(noisy, when.to(clean.dtype)), added)

    return Work(UNet(width, levels, channels), data, loss)


# -- VAE


class VAE(nn.Module):
    def __init__(self, width: int, latent: int, size: int) -> None:
        super().__init__()
        self.small = size // 4
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * self.small**2, 2 * latent),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, 2 * width * self.small**2),
            nn.Unflatten(1, (2 * width, self.small, self.small)),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logvar = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        return self.decoder(z), mean, logvar


def vae(*, width: int = 64, latent: int = 128, size: int = 64, batch: int) -> Work:
    def data(step: int) -> tuple[Tensor, ...]:
        return (noise(batch, 3, size, size, seed=step).sigmoid(),)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        made, mean, logvar = model(x)
        rebuilt = F.binary_cross_entropy_with_logits(made, x, reduction="sum")
        spread = -0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())
        return (rebuilt + spread) / len(x)

    return Work(VAE(width, latent, size), data, loss)


# -- GAN: two models, two optimizers


def gan(
    device: str, *, width: int = 64, latent: int = 100, size: int = 64, batch: int
) -> Callable[[], Tensor]:
    """DCGAN. ``size`` must be 16 times a power of two."""
    makers: list[nn.Module] = [nn.ConvTranspose2d(latent, 8 * width, size // 16, bias=False)]
    channels = 8 * width
    for out in (4 * width, 2 * width, width):
        makers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        makers.append(nn.ConvTranspose2d(channels, out, 4, 2, 1, bias=False))
        channels = out
    makers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    makers += [nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh()]
    judges: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
    for inside in (width, 2 * width, 4 * width):
        judges += [nn.Conv2d(inside, 2 * inside, 4, 2, 1, bias=False)]
        judges += [nn.BatchNorm2d(2 * inside), nn.LeakyReLU(0.2, inplace=True)]
    judges += [nn.Conv2d(8 * width, 1, size // 16), nn.Flatten(0)]
    generator = nn.Sequential(*makers).to(device)
    judge = nn.Sequential(*judges).to(device)
    first = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    second = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        real = noise(batch, 3, size, size, seed=count).tanh().to(device)
        fake = generator(torch.randn(batch, latent, 1, 1, device=device))
        yes, no = torch.ones(batch, device=device), torch.zeros(batch, device=device)
        second.zero_grad()
        loss = F.binary_cross_entropy_with_logits(judge(real), yes)
        loss = loss + F.binary_cross_entropy_with_logits(judge(fake.detach()), no)
        loss.backward()
        second.step()
        first.zero_grad()
        fooled = F.binary_cross_entropy_with_logits(judge(fake), yes)
        fooled.backward()
        first.step()
        return (loss + fooled).detach()

    return step
