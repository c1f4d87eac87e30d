"""Gradient scaling, whose scale grows with each healthy step."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
for step in range(5):
    loss = model(torch.randn(64, 1024).to(device)).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    optimizer.zero_grad()
    print("step", step, "scale", scaler.get_scale(), scaler.get_scale() < before)
