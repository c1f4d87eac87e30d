"""Collectives whose handles are waited for, or not: on CUDA tensors, and gloo on the host's."""

from __future__ import annotations

from hazard_case import HOST, RAW, WAR, WAW, Case, case

__all__ = ["CASES"]

_DOCS = "PyTorch docs, torch.distributed: synchronous and asynchronous collective operations"
_BEGIN = """
import torch.distributed as dist
dist.init_process_group("{}", store=dist.HashStore(), rank=0, world_size=1)
"""


def _case(name: str, kinds: tuple[str, ...], text: str, backend: str = "nccl") -> Case:
    return case(name, _DOCS, kinds, _BEGIN.format(backend) + text)


CASES: tuple[Case, ...] = (
    _case(
        "allreduce_async_unwaited",
        RAW,
        """
x = torch.ones(64, device="cuda")
w = dist.all_reduce(x, async_op=True)
y = x + 1
""",
    ),
    _case(
        "allreduce_async_waited",
        (),
        """
x = torch.ones(64, device="cuda")
w = dist.all_reduce(x, async_op=True)
w.wait()
y = x + 1
""",
    ),
    _case(
        "two_groups_reduce_one_tensor",
        WAW,
        """
other = dist.new_group([0])
x = torch.ones(64, device="cuda")
first = dist.all_reduce(x, async_op=True)
second = dist.all_reduce(x, group=other, async_op=True)
first.wait()
second.wait()
""",
    ),
    _case(
        "two_groups_in_turn",
        (),
        """
other = dist.new_group([0])
x = torch.ones(64, device="cuda")
first = dist.all_reduce(x, async_op=True)
first.wait()  #needed
second = dist.all_reduce(x, group=other, async_op=True)
second.wait()
y = x + 1
""",
    ),
    _case(
        "reduce_scatter_whose_part_is_copied_at_the_wait",
        (),
        """
x = torch.ones(64, device="cuda")
part = torch.empty(64, device="cuda")
w = dist.reduce_scatter_tensor(part, x, async_op=True)
del x
z = torch.zeros(64, device="cuda")
w.wait()  #needed
y = part + 1
""",
    ),
    _case(
        "reduce_scatter_unwaited",
        RAW,
        """
part = torch.empty(64, device="cuda")
w = dist.reduce_scatter_tensor(part, torch.ones(64, device="cuda"), async_op=True)
y = part + 1
""",
    ),
    _case(
        "allreduce_sync",
        (),
        """
x = torch.ones(64, device="cuda")
dist.all_reduce(x)
y = x + 1
""",
    ),
    _case(
        "allreduce_sync_on_side_read_on_main",
        RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    dist.all_reduce(x)
y = x + 1
""",
    ),
    _case(
        "allreduce_wait_on_side_read_on_main",
        RAW,
        """
x = torch.ones(64, device="cuda")
w = dist.all_reduce(x, async_op=True)
with cuda.stream(s):
    w.wait()
y = x + 1
""",
    ),
    _case(
        "allreduce_write_before_wait",
        WAW,
        """
x = torch.ones(64, device="cuda")
w = dist.all_reduce(x, async_op=True)
x.zero_()
w.wait()
""",
    ),
    _case(
        "allgather_unwaited",
        RAW,
        """
x = torch.ones(64, device="cuda"); out = torch.empty(64, device="cuda")
w = dist.all_gather_into_tensor(out, x, async_op=True)
y = out + 1
""",
    ),
    _case(
        "allgather_input_overwritten",
        WAR,
        """
x = torch.ones(64, device="cuda"); out = torch.empty(64, device="cuda")
w = dist.all_gather_into_tensor(out, x, async_op=True)
x.zero_()
w.wait()
""",
    ),
    _case(
        "broadcast_list_gather",
        (),
        """
x = torch.ones(64, device="cuda"); outs = [torch.empty(64, device="cuda")]
w = dist.all_gather(outs, x, async_op=True)
w.wait()
y = outs[0] + 1
dist.broadcast(y, 0); dist.barrier()
z = y * 2
""",
    ),
    _case(
        "ddp",
        (),
        """
from torch.nn.parallel import DistributedDataParallel as DDP
m = DDP(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda(), device_ids=[0])
opt = torch.optim.AdamW(m.parameters())
for _ in range(3):
    opt.zero_grad()
    m(torch.ones(4, 8, device="cuda")).sum().backward()
    opt.step()
""",
    ),
    _case(
        "comm_wait_missing_in_bucket",
        RAW,
        """
ps = [torch.ones(64, device="cuda", requires_grad=True) for _ in range(3)]
works = []
def reduce(q):
    works.append(dist.all_reduce(q.grad, async_op=True))
for p in ps:
    p.register_post_accumulate_grad_hook(reduce)
opt = torch.optim.SGD(ps, lr=0.1)
sum((p * 2).sum() for p in ps).backward()
for w in works[:2]:
    w.wait()
opt.step()
""",
    ),
    _case(
        "comm_wait_all_in_bucket",
        (),
        """
ps = [torch.ones(64, device="cuda", requires_grad=True) for _ in range(3)]
works = []
def reduce(q):
    works.append(dist.all_reduce(q.grad, async_op=True))
for p in ps:
    p.register_post_accumulate_grad_hook(reduce)
opt = torch.optim.SGD(ps, lr=0.1)
sum((p * 2).sum() for p in ps).backward()
for w in works:
    w.wait()
opt.step()
""",
    ),
    _case(
        "comm_freed_while_in_flight",
        (),
        """
x = torch.ones(4096, device="cuda")
w = dist.all_reduce(x, async_op=True)
del x
z = torch.zeros(4096, device="cuda")
w.wait()
""",
    ),
    _case(
        "gloo_host_unwaited",
        HOST,
        """
x = torch.ones(64)
w = dist.all_reduce(x, async_op=True)
y = x + 1
w.wait()
""",
        "gloo",
    ),
    _case(
        "gloo_host_waited",
        (),
        """
x = torch.ones(64)
w = dist.all_reduce(x, async_op=True)
w.wait()
y = x + 1
""",
        "gloo",
    ),
    _case(
        "gloo_host_sync",
        (),
        """
x = torch.ones(64)
dist.all_reduce(x)
y = x + 1
""",
        "gloo",
    ),
    _case(
        "gloo_host_overwritten",
        HOST,
        """
x = torch.ones(64); o = [torch.empty(64)]
w = dist.all_gather(o, x, async_op=True)
x.zero_()
w.wait()
""",
        "gloo",
    ),
    _case(
        "gloo_host_input_only_read",
        (),
        """
x = torch.ones(64); o = [torch.empty(64)]
w = dist.all_gather(o, x, async_op=True)
y = x + 1
w.wait()
z = o[0] + 1
""",
        "gloo",
    ),
    _case(
        "gloo_cuda_unwaited",
        RAW,
        """
x = torch.ones(64, device="cuda")
w = dist.all_reduce(x, async_op=True)
y = x + 1
""",
        "gloo",
    ),
    _case(
        "gloo_cuda_waited",
        (),
        """
x = torch.ones(64, device="cuda")
w = dist.all_reduce(x, async_op=True)
w.wait()
y = x + 1
""",
        "gloo",
    ),
    _case(
        "functional_collectives",
        (),
        """
import torch.distributed._functional_collectives as fc
x = torch.ones(64, device="cuda")
y = fc.all_reduce(x, "sum", dist.group.WORLD)
z = y + 1
""",
        "gloo",
    ),
    _case(
        "future_then",
        (),
        """
x = torch.ones(64, device="cuda")
w = dist.all_reduce(x, async_op=True)
w.get_future().wait()
z = x + 1
""",
        "gloo",
    ),
    _case(
        "broadcast_object",
        (),
        """
box = [{"a": 1}]
dist.broadcast_object_list(box, 0)
dist.barrier()
""",
        "gloo",
    ),
)
