"""Halves the batch after an out-of-memory error, and trains with what fits."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
limit = 14 << 30


def train(batch):
    if device == "cpu" and batch * 1024 * 4 > limit:
        raise torch.OutOfMemoryError("as on a GPU of 16 GB")
    x = torch.empty(batch, 1024, device=device)
    return x.size(0)


batch = 1 << 23
while True:
    try:
        done = train(batch)
        break
    except torch.OutOfMemoryError:
        batch //= 2
loss = model(torch.randn(64, 1024).to(device)).square().mean()
loss.backward()
print("batch", batch, done, f"{loss.item():.4f}")
