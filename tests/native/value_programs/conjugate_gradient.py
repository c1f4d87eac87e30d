"""Conjugate gradients until the residual is small."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
a = torch.randn(1024, 1024)
a = (a @ a.T / 1024 + 2 * torch.eye(1024)).to(device)
b = torch.randn(1024).to(device)
x = torch.zeros_like(b)
r = b - a @ x
p, rs, done = r.clone(), r @ r, 0
for _ in range(50):
    ap = a @ p
    alpha = rs / (p @ ap)
    x += alpha * p
    r -= alpha * ap
    new = r @ r
    done += 1
    if torch.sqrt(new) < 1e-1:
        break
    p = r + (new / rs) * p
    rs = new
print("done", done)
