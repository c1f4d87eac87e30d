import torch
from torch import nn

model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(2560, 2560), nn.GELU())]).cuda()
weights = [p for p in model.parameters() if p.dim() == 2]
x = torch.randn(256, 2560, device="cuda")


def optimize(weight, steps=3):
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()


for weight in weights:
    optimize(weight)


@torch.no_grad()
def evaluate():
    total = 0.0
    for _ in range(4):
        total += model(torch.randn(16384, 2560, device="cuda")).mean().item()
    return total


print(evaluate())
