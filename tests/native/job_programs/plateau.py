# ranks: 2
from job import dist, join, network, number, rows, show, torch
from torch.nn.parallel import DistributedDataParallel

rank, ranks, device = join()
model = DistributedDataParallel(network().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
length = 4
for epoch in range(10):
    batch = rows(length, 8, seed=epoch * 2 + rank).to(device)
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    schedule.step(total.item() / ranks)
    rate = optimizer.param_groups[0]["lr"]
    if rate < 1.0:
        length *= 2
    show(epoch, number(total.item()), rate, length)
    if rate < 0.1:
        break
dist.destroy_process_group()
