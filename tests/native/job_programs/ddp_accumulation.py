# ranks: 2
import contextlib

from job import dist, join, network, number, rows, show, torch
from torch.nn.parallel import DistributedDataParallel

rank, ranks, device = join()
model = DistributedDataParallel(network(inner=64).to(device), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
best, waited, length = float("inf"), 0, 4
for step in range(12):
    with model.no_sync() if step % 2 == 0 else contextlib.nullcontext():
        batch = rows(length, 8, seed=10 * step + rank).to(device)
        loss = model(batch).square().mean()
        loss.backward()
    if step % 2:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if mean.item() < best:
            best, length = mean.item(), length * 2
        show(step, number(norm), number(mean.item()), "length", length)
dist.destroy_process_group()
