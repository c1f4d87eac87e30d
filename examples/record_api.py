"""Record a training loop from inside, and read the recording back.

``gpuprobe run`` needs no change to a script. Where you own the loop, ``gpuprobe.record`` lets
you say what a step is and give its phases the names you use.

    python examples/record_api.py own.gpuprobe
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional

import gpuprobe


def train(path: str, steps: int) -> None:
    torch.manual_seed(1337)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    labels = torch.arange(8, device=device).repeat(32)

    with gpuprobe.record(path, model=model, optimizer=optimizer, level="trace") as rec:
        for step in range(steps):
            with rec.step():
                with rec.phase("data"):
                    inputs = functional.one_hot(labels, 64).float()
                    inputs += 0.5 * torch.randn(256, 64, device=device)
                with rec.phase("forward"):
                    loss = functional.cross_entropy(model(inputs), labels)
                with rec.phase("backward"):
                    loss.backward()
                with rec.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            print(f"step {step} loss {loss.item()!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record a training loop from inside.")
    parser.add_argument("path", help="the recording to write, such as own.gpuprobe")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    train(args.path, args.steps)

    recording = gpuprobe.load(args.path)
    print(f"recorded {len(recording.steps)} steps")


if __name__ == "__main__":
    main()
