# ranks: 3
from job import dist, join, numbers, show, torch

rank, ranks, device = join()
for kind in ("SUM", "PRODUCT", "MIN", "MAX"):
    for dtype in (
        torch.float32,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.bfloat16,
        torch.half,
    ):
        values = torch.tensor([1, 2, -3, 4], dtype=dtype, device=device) + rank
        dist.all_reduce(values, op=getattr(dist.ReduceOp, kind))
        show(kind, dtype, numbers(values.float()))
mean = torch.arange(4.0, device=device) * (rank + 1)
if device.type == "cuda":
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
else:
    dist.all_reduce(mean)
    mean /= ranks
show("mean", numbers(mean))
many = torch.full((300_000,), float(rank), device=device)
dist.all_reduce(many)
show("many", many.sum().item(), many[-1].item())
flags = torch.tensor([rank == 1, False], device=device)
dist.all_reduce(flags, op=dist.ReduceOp.MAX) if device.type == "cpu" else dist.all_reduce(flags)
show("flags", flags.tolist())
dist.destroy_process_group()
