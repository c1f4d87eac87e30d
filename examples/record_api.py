"""Record a training loop from inside, and read the recording back.

``gpuprobe run`` needs no change to a script. Where you own the loop, ``gpuprobe.record`` lets
you say what a step is and name phases of your own beside the forward, backward and optimizer
phases, which are found by themselves.

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
                scores = model(inputs)
                loss = functional.cross_entropy(scores, labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                with rec.phase("accuracy"):
                    accuracy = (scores.argmax(dim=1) == labels).float().mean().item()
            print(f"step {step} loss {loss.item()!r} accuracy {accuracy:.3f}", flush=True)


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
