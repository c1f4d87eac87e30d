import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

blocks = nn.ModuleList(
    nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(8)
).cuda()
head = nn.Linear(512, 10).cuda()
optimizer = torch.optim.SGD([*blocks.parameters(), *head.parameters()], lr=0.1)
for step in range(3):
    x = torch.randn(8192, 512, device="cuda")
    y = torch.randint(0, 10, (8192,), device="cuda")
    for block in blocks:
        x = x + checkpoint(block, x, use_reentrant=False)
    loss = nn.functional.cross_entropy(head(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del x, y, loss
print(torch.cuda.max_memory_allocated() >> 20)
