"""A wide model with a guard; too large to be computed for an estimate."""

import math
import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8192, 8192), torch.nn.Linear(8192, 8192)).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
done = 0
for _ in range(2):
    loss = model(torch.randn(1024, 8192).to(device)).square().mean()
    if not math.isfinite(loss.item()):
        print("Loss is {}, stopping training".format(loss.item()))
        sys.exit(1)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    done += 1
print("done", done)
