"""Saves where the loss is the best so far, and resumes from the file."""

import io
import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), 1.5)
x, y = torch.randn(64, 1024).to(device), torch.randn(64, 1024).to(device)
best, file, saves = 1e9, io.BytesIO(), 0
for epoch in range(5):
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if loss.item() < best:
        best = loss.item()
        saves += 1
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "epoch": epoch, "best": best}, file)
file.seek(0)
kept = torch.load(file, map_location=device)
model.load_state_dict(kept["model"])
print("saves", saves, "epoch", kept["epoch"], f"{kept['best']:.4f}")
