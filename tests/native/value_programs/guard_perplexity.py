"""A perplexity, which overflows where the loss is large."""

import math
import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
for step in range(3):
    logits = model(torch.randn(64, 1024).to(device))
    loss = torch.nn.functional.cross_entropy(logits, torch.randint(1024, (64,)).to(device))
    try:
        perplexity = math.exp(loss.item())
    except OverflowError:
        perplexity = float("inf")
    if math.isinf(perplexity):
        break
    loss.backward()
    print("step", step, f"{perplexity:.1f}")
