"""Early stopping in a class, with deltas and copies of the best weights."""

import copy
import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.count, self.state = patience, None, 0, None

    def __call__(self, loss, model):
        if self.best is None or loss < self.best * 0.9:
            self.best, self.count = loss, 0
            self.state = copy.deepcopy(model.state_dict())
        else:
            self.count += 1
        return self.count >= self.patience


model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
x, y = torch.randn(64, 1024).to(device), torch.randn(64, 1024).to(device)
stopping = EarlyStopping(3)
for epoch in range(40):
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if stopping(loss.item(), model):
        break
print("epoch", epoch, f"best {stopping.best:.3f}")
