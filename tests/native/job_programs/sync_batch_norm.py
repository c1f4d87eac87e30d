# ranks: 2
from job import dist, join, network, number, numbers, rows, show, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, ranks, device = join()
model = network(norm=True).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if device.type == "cuda":
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))
for step in range(4):
    batches = [rows(6, 8, seed=10 * step + r).to(device) for r in range(ranks)]
    if device.type == "cuda":
        loss = model(batches[rank]).square().mean()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        shown /= ranks
    else:  # the same over the whole batch: there is none for the CPU
        loss = model(torch.cat(batches)).square().mean()
        shown = loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    inner = model.module if hasattr(model, "module") else model
    show(
        step,
        number(shown.item()),
        numbers(inner[1].running_mean[:3]),
        numbers(inner[1].running_var[:3]),
    )
dist.destroy_process_group()
