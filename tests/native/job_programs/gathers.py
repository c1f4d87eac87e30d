# ranks: 3
from job import dist, join, numbers, show, torch

rank, ranks, device = join()
own = torch.arange(3.0, device=device) + 10 * rank
parts = [torch.empty(3, device=device) for _ in range(ranks)]
dist.all_gather(parts, own)
show("all_gather", [numbers(part) for part in parts])
whole = torch.empty(3 * ranks, device=device)
dist.all_gather_into_tensor(whole, own)
show("into_tensor", numbers(whole))
parts = [torch.empty(3, device=device) for _ in range(ranks)] if rank == 1 else None
dist.gather(own, parts, dst=1)
show("gather", None if parts is None else [numbers(part) for part in parts])
given = [torch.full((2,), float(i), device=device) for i in range(ranks)] if rank == 2 else None
got = torch.empty(2, device=device)
dist.scatter(got, given, src=2)
show("scatter", numbers(got))
total = own.clone()
dist.reduce(total, dst=0)
show("reduce", numbers(total) if rank == 0 else None)
source = torch.arange(2.0 * ranks, device=device) * (rank + 1)
part = torch.empty(2, device=device)
dist.reduce_scatter_tensor(part, source)
show("reduce_scatter", numbers(part))
copy = own.clone()
dist.broadcast(copy, src=1)
show("broadcast", numbers(copy))
dist.barrier()
dist.destroy_process_group()
