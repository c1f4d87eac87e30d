"""Speculative decoding accepts as many drafts as agree."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
large = torch.nn.Linear(1024, 1024).to(device)
small = torch.nn.Linear(1024, 1024).to(device)
with torch.no_grad():
    small.weight.copy_(large.weight + 0.003 * torch.randn(1024, 1024).to(device))
    length = 1
    for _ in range(6):
        x = torch.randn(4, 1024).to(device)
        drafts, truth = small(x).argmax(-1).tolist(), large(x).argmax(-1).tolist()
        accepted = 0
        for a, b in zip(drafts, truth):
            if a != b:
                break
            accepted += 1
        length += accepted + 1
print("length", length)
