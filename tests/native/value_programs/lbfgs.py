"""L-BFGS with strong Wolfe conditions evaluates as often as values require."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 512).to(device)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
x, y = torch.randn(64, 1024).to(device), torch.randn(64, 512).to(device)
calls = 0


def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss


optimizer.step(closure)
print("calls", calls)
