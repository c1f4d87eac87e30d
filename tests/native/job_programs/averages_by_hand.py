# ranks: 3
from job import dist, join, network, number, rows, show, torch

rank, ranks, device = join()
model = network(seed=rank).to(device)
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    loss = (model(rows(4, 8, seed=10 * step + rank).to(device)) - rank).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    show(step, number(loss.item()), number(mean.item() / ranks))
dist.destroy_process_group()
