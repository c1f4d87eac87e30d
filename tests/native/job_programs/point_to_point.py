# ranks: 3
from job import dist, join, numbers, show, torch

rank, ranks, device = join()
after, before = (rank + 1) % ranks, (rank - 1) % ranks
value = torch.full((4,), float(rank), device=device)
for turn in range(ranks - 1):  # around a ring
    got = torch.empty(4, device=device)
    work = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, value, after), dist.P2POp(dist.irecv, got, before)]
    )
    for one in work:
        one.wait()
    value = got + 10
    show("ring", turn, numbers(value))
if rank == 0:
    dist.send(torch.arange(5.0, device=device), 2)
    dist.isend(torch.tensor([3.0, 4.0], device=device), 1).wait()
elif rank == 1:
    got = torch.zeros(2, device=device)
    dist.irecv(got, 0).wait()
    show("irecv", numbers(got))
else:
    got = torch.zeros(5, device=device)
    dist.recv(got, 0)
    show("recv", numbers(got))
dist.destroy_process_group()
