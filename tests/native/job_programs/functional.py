# ranks: 2
import torch.distributed._functional_collectives as functional
from job import dist, join, numbers, show, torch

rank, ranks, device = join()
own = torch.arange(4.0, device=device) * (rank + 1)
group = dist.group.WORLD
show("all_reduce", numbers(functional.all_reduce(own, "sum", group)))
show("all_gather", numbers(functional.all_gather_tensor(own, 0, group)))
show("reduce_scatter", numbers(functional.reduce_scatter_tensor(own, "sum", 0, group)))
show("broadcast", numbers(functional.broadcast(own, 1, group)))
show("all_to_all", numbers(functional.all_to_all_single(own, None, None, group)))
dist.destroy_process_group()
