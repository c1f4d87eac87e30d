import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
torch.cuda.set_device(0)
layers = [m for _ in range(6) for m in (nn.Linear(1792, 1792), nn.GELU())]
model = DistributedDataParallel(nn.Sequential(*layers).cuda(), device_ids=[0])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
for step in range(4):
    x = torch.randn(256, 1792, device="cuda")
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    if step > 0:
        optimizer.step()
print(loss.item())
dist.destroy_process_group()
