"""Train a small convolutional network with batch norm, in plain PyTorch.

The data are made in code: pictures of stripes, whose class is the direction the stripes run
in, under noise. Runs on a CUDA device if there is one, else on the CPU.

    python examples/train_cnn.py
    gpuprobe run examples/train_cnn.py --workers 2
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

CLASSES = 4
SIZE = 32  # pixels, both ways


class Stripes(Dataset[tuple[torch.Tensor, int]]):
    """Pictures (1, SIZE, SIZE) of stripes at CLASSES angles.

    Item ``i`` depends on ``i`` and the seed only, so every number of workers sees the same.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed
        axis = torch.arange(SIZE, dtype=torch.float32)
        self.y, self.x = torch.meshgrid(axis, axis, indexing="ij")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = index % CLASSES
        angle = math.pi * label / CLASSES
        shift = 2 * math.pi * torch.rand((), generator=generator)
        along = self.x * math.cos(angle) + self.y * math.sin(angle)
        noise = torch.randn((SIZE, SIZE), generator=generator)
        return (torch.sin(along + shift) + 0.5 * noise).unsqueeze(0), label


def make_model(channels: int) -> nn.Sequential:
    """Three convolutions with batch norm, each halving the picture, and a linear classifier."""
    layers: list[nn.Module] = []
    before = 1
    for after in (channels, 2 * channels, 4 * channels):
        layers += [
            nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        before = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES)]
    return nn.Sequential(*layers)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(
        Stripes(args.steps * args.batch_size, args.seed),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(args.seed),
    )
    model = make_model(args.channels).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9)

    print(f"device {device.type}, {sum(p.numel() for p in model.parameters())} parameters")
    for step, (pictures, labels) in enumerate(loader):
        pictures, labels = pictures.to(device), labels.to(device)
        scores = model(pictures)
        loss = functional.cross_entropy(scores, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        accuracy = (scores.argmax(dim=1) == labels).float().mean().item()
        print(f"step {step} loss {loss.item()!r} accuracy {accuracy:.3f}", flush=True)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small convolutional network.")
    parser.add_argument("--steps", type=positive, default=20, help="optimizer steps")
    parser.add_argument("--batch-size", type=positive, default=32)
    parser.add_argument("--channels", type=positive, default=16, help="of the first layer")
    parser.add_argument("--workers", type=int, default=0, help="loader processes")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1337)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
