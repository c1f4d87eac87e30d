# ranks: 4
from job import dist, join, numbers, show, torch
from torch.distributed.device_mesh import init_device_mesh

rank, ranks, device = join()
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
odd = dist.new_group([1, 3])
mine = halves[rank // 2]
value = torch.tensor([float(rank), 1.0], device=device)
dist.all_reduce(value, group=mine)
show("half", numbers(value))
if rank % 2:
    parts = [torch.empty(2, device=device) for _ in range(2)]
    dist.all_gather(parts, value, group=odd)
    show("odd", [numbers(part) for part in parts])
    dist.broadcast(value, src=3, group=odd)
    show("from 3", numbers(value))
mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("rows", "columns"))
for name in ("rows", "columns"):
    value = torch.tensor([float(2**rank)], device=device)
    dist.all_reduce(value, group=mesh.get_group(name))
    show(name, numbers(value))
dist.barrier()
dist.destroy_process_group()
