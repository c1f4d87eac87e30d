# ranks: 3
from job import dist, join, network, number, rows, show, torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

rank, ranks, device = join()
model = network().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
averager = PeriodicModelAverager(period=2, warmup_steps=1)
for step in range(6):
    loss = (model(rows(4, 8, seed=10 * step + rank).to(device)) - rank).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    averager.average_parameters(model.parameters())
    show(step, number(loss.item()), number(sum(p.double().sum() for p in model.parameters())))
dist.destroy_process_group()
