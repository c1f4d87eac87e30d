# ranks: 2
from job import dist, join, number, rows, show, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

rank, ranks, device = join()
mesh = init_device_mesh(device.type, (ranks,))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(
    device
)
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(rows(8, 8, seed=step).to(device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, number(loss.item()))
shared = distribute_tensor(torch.arange(12.0).reshape(6, 2).to(device), mesh, [Shard(0)])
show("sum", number((shared * 2).sum().full_tensor()), tuple(shared.to_local().shape))
dist.destroy_process_group()
