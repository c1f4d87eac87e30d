"""A histogram of activations, from the device and from NumPy."""

import sys

import numpy as np
import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
with torch.no_grad():
    out = model(torch.randn(512, 1024).to(device))
    counts = torch.histc(out, bins=4, min=-2, max=2).cpu()
    other = np.histogram(out.cpu().numpy(), bins=4, range=(-2, 2))[0]
print("counts", [int(c) for c in counts.tolist()], [int(c) for c in other])
