# ranks: 2
from job import dist, join, network, number, rows, show, torch
from torch.nn.parallel import DistributedDataParallel

rank, ranks, device = join()
model = DistributedDataParallel(network().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=3)
for step in range(8):
    loss = model(rows(8, 8, seed=10 * step + rank).to(device)).square().mean()
    if step == 4 and rank == 1:
        loss = loss * float("inf")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    show(step, number(loss.item()), scaler.get_scale())
dist.destroy_process_group()
