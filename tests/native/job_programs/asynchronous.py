# ranks: 2
from job import dist, join, numbers, show, torch

rank, ranks, device = join()
values = [torch.full((3,), float(i + rank), device=device) for i in range(4)]
work = [dist.all_reduce(value, async_op=True) for value in values]
other = torch.ones(3, device=device) * rank  # while they run
for one in reversed(work):
    one.wait()
show([numbers(value) for value in values], numbers(other))
whole = torch.empty(4, device=device)
work = dist.all_gather_into_tensor(
    whole, torch.tensor([1.0, 2.0], device=device) * (rank + 1), async_op=True
)
future = torch.ones(1, device=device) * (5 if rank else 3)
second = dist.broadcast(future, src=1, async_op=True)
work.wait()
second.wait()
show(numbers(whole), numbers(future), work.is_completed())
with (
    dist._coalescing_manager(device=device, async_ops=True)
    if device.type == "cuda"
    else __import__("contextlib").nullcontext() as manager
):
    for value in values:
        dist.all_reduce(value)
if manager is not None:
    manager.wait()
show([numbers(value) for value in values])
dist.destroy_process_group()
