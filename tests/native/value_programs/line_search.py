"""Backtracking line search: the step is halved until the loss falls."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
weight = torch.randn(1024, 1024).to(device).requires_grad_()
x, y = torch.randn(64, 1024).to(device), torch.randn(64, 1024).to(device)


def objective(w):
    return (x @ w - y).square().sum()


tried = 0
for _ in range(3):
    loss = objective(weight)
    (grad,) = torch.autograd.grad(loss, weight)
    step = 1.0
    while objective(weight - step * grad).item() > loss.item() - 0.5 * step * grad.norm().item():
        step /= 2
        tried += 1
        if step < 1e-8:
            break
    weight = (weight - step * grad).detach().requires_grad_()
print("tried", tried)
