"""A broad except around each batch, as services have."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
done = 0
for batch in range(4):
    try:
        x = torch.randn(64, 1024).to(device)
        out = model(x)
        kept = out[out.abs().sum(1) > 0]
        loss = kept.square().mean()
        weight = torch.ones(int((out.argmax(1) >= 0).sum()), device=device)
        (loss * weight.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
    except Exception as error:
        print("skipped", batch, type(error).__name__)
        continue
print("done", done)
