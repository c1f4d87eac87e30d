# ranks: 2
from job import dist, join, network, number, rows, show, torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

rank, ranks, device = join()
model = DistributedDataParallel(network().to(device))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05)
for step in range(5):
    loss = model(rows(8, 8, seed=10 * step + rank).to(device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, number(loss.item()), number(sum(p.double().sum() for p in model.parameters())))
optimizer.consolidate_state_dict(to=0)
if rank == 0:
    show("state", len(optimizer.state_dict()["state"]))
dist.destroy_process_group()
