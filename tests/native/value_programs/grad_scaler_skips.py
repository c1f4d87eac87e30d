"""Counts optimizer steps below a scaler, with a scheduler that follows them."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
scaler = torch.amp.GradScaler(device)
for _ in range(4):
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(torch.randn(64, 1024).to(device)).square().mean()
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scale <= scaler.get_scale():
        schedule.step()
    optimizer.zero_grad()
print("rate", optimizer.param_groups[0]["lr"], "scale", scaler.get_scale())
