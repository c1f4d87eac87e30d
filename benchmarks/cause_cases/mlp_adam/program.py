import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    *[m for _ in range(4) for m in (nn.Linear(2048, 2048), nn.ReLU())], nn.Linear(2048, 10)
).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
running = 0.0
for step in range(5):
    x = torch.randn(2048, 2048, device="cuda")
    y = torch.randint(0, 10, (2048,), device="cuda")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    running += loss.item()
print(running / 5)
