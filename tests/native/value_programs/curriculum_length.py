"""Sequences become longer once the accuracy is above one half."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 2).to(device)
wide = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
length = 64
for _ in range(5):
    x = torch.randn(length, 1024)
    y = (x[:, 0] > 0).long().to(device)
    logits = model(wide(x.to(device)))
    loss = torch.nn.functional.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    accuracy = (logits.argmax(1) == y).float().mean().item()
    if accuracy > 0.5:
        length *= 2
    print("length", length)
