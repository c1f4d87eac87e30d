"""Resumes the optimizer from a file, with step counts that decide."""

import io
import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.AdamW(model.parameters(), capturable=device == "cuda")
x = torch.randn(64, 1024).to(device)
for _ in range(3):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
file = io.BytesIO()
torch.save(optimizer.state_dict(), file)
file.seek(0)
again = torch.optim.AdamW(model.parameters(), capturable=device == "cuda")
again.load_state_dict(torch.load(file))
step = int(again.state_dict()["state"][0]["step"])
while step < 6:
    model(x).square().mean().backward()
    again.step()
    again.zero_grad()
    step = int(again.state_dict()["state"][0]["step"])
print("step", step)
