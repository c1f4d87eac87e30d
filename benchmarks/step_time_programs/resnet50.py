"""A training step of ResNet-50 v1.5, for lambdal's rows in the truths.

Plain torch in place of NVIDIA's DeepLearningExamples: autocast to float16 with a loss scale,
channels last in memory, SGD with momentum; several GPUs: DistributedDataParallel. Labels are
classes, without smoothing.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))


def convolution(inside: int, out: int, size: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inside, out, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(out))


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inside, width, 1)
        self.second = convolution(width, width, 3, stride)
        self.third = convolution(width, 4 * width, 1)
        changed = stride > 1 or inside != 4 * width
        self.shortcut = convolution(inside, 4 * width, 1, stride) if changed else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.third(self.relu(self.second(self.relu(self.first(x)))))
        return self.relu(y + self.shortcut(x))


def resnet50() -> nn.Sequential:
    layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, padding=1))
    inside = 64
    for width, count, stride in STAGES:
        for number in range(count):
            layers.append(Bottleneck(inside, width, stride if number == 0 else 1))
            inside = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000)]
    return nn.Sequential(*layers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", default="224x64x1", help="side of an image, batch: 224x64x1")
    parser.add_argument("--accumulation", default="1,1")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl")
    for run in options.runs.split(","):
        side, batch, _ = map(int, run.split("x"))
        train((batch, 3, side, side), options.accumulation.count(",") + 1)


def train(size: tuple[int, ...], steps: int) -> None:
    model: nn.Module = resnet50().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    images = torch.empty(size, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.zeros(size[0], dtype=torch.long, device="cuda")
    for _ in range(steps):
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
