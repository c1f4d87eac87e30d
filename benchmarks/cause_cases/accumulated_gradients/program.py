import torch
from torch import nn

model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(1536, 1536), nn.GELU())]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
for step in range(3):
    for micro in range(4):
        x = torch.randn(3072, 1536, device="cuda")
        loss = model(x).pow(2).mean() / 4
        del x
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
