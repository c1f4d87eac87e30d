"""Programs written in issues: convolutions in half precision, and a softmax of a large tensor."""

from __future__ import annotations

import sys

import torch
from figures import figure
from torch import nn


def convolutions() -> None:
    """pytorch/pytorch#123533, which takes its convolution from diffusers: a plain one."""
    convolution = nn.Conv2d(256, 256, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1)).half()
    convolution.to("cuda:0")
    for width in range(1024, 2177, 128):
        pixels = torch.zeros((1, 256, 2048, width)).half().to("cuda:0")
        convolution(pixels)
        figure(f"w{width} allocated", torch.cuda.memory_allocated())
        figure(f"w{width} reserved", torch.cuda.memory_reserved())
        torch.cuda.empty_cache()


def softmax() -> None:
    """pytorch/pytorch#72450, in a comment of March 2022."""
    x = torch.rand([5120, 2, 384, 384], dtype=torch.bfloat16, device="cuda:0", requires_grad=True)
    figure("created", torch.cuda.memory_allocated())
    x = torch.nn.functional.softmax(x, dim=-1)
    loss = torch.mean(x)
    figure("forward", torch.cuda.memory_allocated())
    loss.backward()
    figure("backward", torch.cuda.memory_allocated())
    figure("peak", torch.cuda.max_memory_allocated())


def unet() -> None:
    """torchgpipe's benchmark of memory with a U-Net, without a pipeline."""
    from figures import source

    folder = source("kakaobrain+torchgpipe", "benchmarks/models", ".")
    sys.path.insert(0, str(folder / "benchmarks" / "models"))
    from unet import unet as network

    model = network(depth=5, num_convs=6, base_channels=72, input_channels=3, output_channels=1)
    model.to("cuda:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pictures = torch.rand(32, 3, 192, 192, device="cuda:0")
    target = torch.rand(32, 1, 192, 192, device="cuda:0")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        output = model(pictures)
        loss = nn.functional.binary_cross_entropy_with_logits(output, target)
        loss.backward()
        optimizer.step()
    figure("reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    {"convolutions": convolutions, "softmax": softmax, "unet": unet}[sys.argv[1]]()
