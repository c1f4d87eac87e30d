"""Whether two models are equal, and whether training changed one."""

import copy
import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
before = copy.deepcopy(model)
print("same", torch.equal(model.weight, before.weight))
model(torch.randn(8, 1024).to(device)).square().mean().backward()
torch.optim.SGD(model.parameters(), 0.1).step()
print("same", torch.equal(model.weight, before.weight))
print("close", torch.allclose(model.weight, before.weight, atol=1e-9))
