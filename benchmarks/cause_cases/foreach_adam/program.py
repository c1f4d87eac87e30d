import torch
from torch import nn

model = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(1536, 1536), nn.ReLU())]).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(4):
    loss = model(torch.randn(128, 1536, device="cuda")).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
