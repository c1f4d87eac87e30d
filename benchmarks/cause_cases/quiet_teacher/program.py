import torch
import torch.nn.functional as F
from torch import nn

teacher = (
    nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(2048, 2048), nn.GELU())])
    .cuda()
    .eval()
    .requires_grad_(False)
)
student = nn.Sequential(nn.Linear(2048, 1024), nn.GELU(), nn.Linear(1024, 2048)).cuda()
optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(4096, 2048, device="cuda")
    with torch.no_grad():
        target = teacher(x)
    loss = F.mse_loss(student(x), target)
    del x, target
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
