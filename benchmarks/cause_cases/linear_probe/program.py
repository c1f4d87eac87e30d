import torch
from torch import nn

torch.manual_seed(0)
backbone = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(1536, 1536), nn.GELU())]).cuda()
head = nn.Linear(1536, 4).cuda()
backbone.eval()
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(2048, 1536, device="cuda")
    y = torch.randint(0, 4, (2048,), device="cuda")
    loss = nn.functional.cross_entropy(head(backbone(x)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
