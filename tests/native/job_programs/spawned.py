# launch: python
import os

import torch.multiprocessing as mp
from job import BACKEND, DEVICE, dist, network, number, rows, show, torch


def work(rank, ranks, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(BACKEND, rank=rank, world_size=ranks)
    device = torch.device(DEVICE, rank) if DEVICE == "cuda" else torch.device("cpu")
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    value = torch.full((2,), float(rank + 1), device=device)
    dist.all_reduce(value)
    show("sum", value.tolist())
    model = torch.nn.parallel.DistributedDataParallel(network(seed=rank).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(rows(4, 8, seed=10 * step + rank).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(step, number(loss.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (2, port), 2)
    print("rank 0: joined")
