"""The positions of large activations, and a buffer of that size."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
body = torch.nn.Linear(1024, 1024).to(device)
with torch.no_grad():
    out = body(torch.randn(256, 1024).to(device))
    places = (out > 1.0).nonzero()
    buffer = torch.zeros(places.size(0), 16, device=device)
print("places", tuple(places.shape), tuple(buffer.shape))
