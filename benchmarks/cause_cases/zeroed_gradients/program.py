import torch
from torch import nn

model = nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(2048, 2048), nn.ReLU())]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
for step in range(4):
    x = torch.randn(4096, 2048, device="cuda")
    optimizer.zero_grad(set_to_none=False)
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
print(loss.item())
