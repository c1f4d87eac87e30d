# ranks: 2
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from job import dist, join, network, number, rows, show, torch

rank, ranks, device = join()
for name in ("fp16", "allreduce"):
    model = DistributedDataParallel(network(inner=32).to(device))
    hook = default_hooks.fp16_compress_hook if name == "fp16" else default_hooks.allreduce_hook
    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(rows(8, 8, seed=10 * step + rank).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(name, step, number(loss.item()))
dist.destroy_process_group()
