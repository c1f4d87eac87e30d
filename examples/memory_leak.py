"""A training loop with a bug: it grows with every step.

The losses are kept as tensors, for a mean that is printed at the end. Each one keeps the graph
it came from alive, and because the backward pass was told to retain that graph, every
activation of its step too. ``--fixed`` keeps plain numbers instead, which is all that the mean
needs.

    gpuprobe run --level trace --output leak.gpuprobe examples/memory_leak.py
    gpuprobe report leak.gpuprobe
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional


def train(steps: int, fixed: bool) -> None:
    torch.manual_seed(1337)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    losses: list[torch.Tensor | float] = []
    for step in range(steps):
        inputs = torch.randn(256, 64, device=device)
        loss = functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        optimizer.zero_grad(set_to_none=True)
        # retain_graph is what people reach for when a second use of a graph fails. It keeps the
        # saved activations for as long as the loss lives.
        loss.backward(retain_graph=not fixed)
        optimizer.step()
        losses.append(loss.item() if fixed else loss)
        print(f"step {step} loss {loss.item()!r}", flush=True)
    numbers = [loss.item() if isinstance(loss, torch.Tensor) else loss for loss in losses]
    print(f"mean loss {sum(numbers) / steps!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A training loop that grows with every step.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--fixed", action="store_true", help="keep numbers, not tensors")
    args = parser.parse_args()
    train(args.steps, args.fixed)


if __name__ == "__main__":
    main()
