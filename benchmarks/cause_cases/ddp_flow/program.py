import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class FlowHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(8, 32, 1)

    def forward(self, x):
        return {"flow": self.head(x)}


dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
torch.cuda.set_device(0)
model = DistributedDataParallel(FlowHead().cuda(), device_ids=[0], find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    frames = torch.randn(2, 8, 768, 768, device="cuda")
    loss = model(frames)["flow"].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
dist.destroy_process_group()
