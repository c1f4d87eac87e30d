# ranks: 2
from job import dist, join, network, number, rows, show, torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

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
