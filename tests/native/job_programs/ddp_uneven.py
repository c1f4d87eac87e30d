# ranks: 2
from job import dist, join, network, number, rows, show, torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

rank, ranks, device = join()
model = DistributedDataParallel(network().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Join([model]):
    for step in range(3 + 2 * rank):
        batch = rows(4, 8, seed=10 * step + rank).to(device)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(step, number(loss.item()))
show("weights", number(sum(p.double().abs().sum() for p in model.parameters())))
dist.destroy_process_group()
