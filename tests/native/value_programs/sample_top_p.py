"""Nucleus sampling keeps as many tokens as the probabilities require."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
body = torch.nn.Linear(1024, 2048).to(device)
with torch.no_grad():
    for _ in range(3):
        logits = body(torch.randn(1, 1024).to(device) * 4)[0]
        probabilities, order = torch.softmax(logits, -1).sort(descending=True)
        kept = (probabilities.cumsum(0) < 0.9).sum().item() + 1
        print("kept", kept, tuple(order[:kept].shape))
