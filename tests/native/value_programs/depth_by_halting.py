"""Adaptive computation: layers run until the halting score is reached."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
layer = torch.nn.Linear(1024, 1024).to(device)
halt = torch.nn.Linear(1024, 1).to(device)
x = torch.randn(8, 1024).to(device)
total, depth = torch.zeros(8, 1).to(device), 0
while (total < 1).any() and depth < 20:
    x = torch.tanh(layer(x)) + x
    total = total + halt(x).sigmoid() * 0.5
    depth += 1
x.mean().backward()
print("depth", depth)
