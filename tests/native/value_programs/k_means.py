"""k-means in which empty clusters are dropped."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
data = torch.nn.Linear(1024, 1024).to(device)(torch.randn(512, 1024).to(device)).detach()
centers = data[:12].clone()
rounds = 0
for _ in range(20):
    labels = torch.cdist(data, centers).argmin(1)
    new = [data[labels == i].mean(0) for i in range(len(centers)) if (labels == i).any()]
    new = torch.stack(new)
    rounds += 1
    if new.shape == centers.shape and torch.allclose(new, centers, atol=1e-3):
        break
    centers = new
print("rounds", rounds, "clusters", len(centers))
