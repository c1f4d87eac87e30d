# ranks: 2
from job import dist, join, network, number, rows, show, torch

rank, ranks, device = join()
model = network().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
best, patience = float("inf"), 0
for epoch in range(50):
    loss = (model(rows(16, 8, seed=rank).to(device)).squeeze(1) - 0.3).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    bad = rank == 1 and epoch >= 6  # only one rank knows
    stop = torch.tensor([int(bad)], device=device)
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    show(epoch, number(loss.item()), int(stop.item()))
    if stop.item():
        break
kept = [torch.zeros(256, 256, device=device) for _ in range(epoch)]
show("stopped after", epoch, "kept", sum(one.numel() for one in kept))
dist.destroy_process_group()
