"""Saved activations are moved to the CPU, and back for the backward pass."""

import torch
import torch.nn as nn

model = nn.Sequential(
    nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)
).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x = torch.randn(65536, 1024, device="cuda", dtype=torch.bfloat16)
for _ in range(4):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = model(x).float().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
