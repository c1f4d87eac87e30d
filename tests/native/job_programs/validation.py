# ranks: 4
from job import dist, join, network, number, rows, show, torch
from torch.nn.parallel import DistributedDataParallel

rank, ranks, device = join()
model = DistributedDataParallel(network().to(device))
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
best, saved = None, 0
for epoch in range(6):
    batch = rows(8, 8, seed=epoch * ranks + rank).to(device)
    loss = (model(batch).squeeze(1) - batch[:, 1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        batch = rows(10 + rank, 8, seed=1000 + rank).to(device)
        right = ((model.module(batch).squeeze(1) > 0) == (batch[:, 1] > 0)).sum()
    counts = torch.stack([right, torch.tensor(len(batch), device=device)])
    dist.all_reduce(counts)
    accuracy = (counts[0] / counts[1]).item()
    if best is None or accuracy > best:
        best, saved = accuracy, saved + 1
    show(epoch, number(accuracy), saved)
dist.destroy_process_group()
