"""Collectives whose handles are waited for, or not: on CUDA tensors, and gloo on the host's."""

from __future__ import annotations

from hazard_case import HOST, RAW, WAW, Case, case

_DOCS = "PyTorch docs, torch.distributed: synchronous and asynchronous collective operations"
_BEGIN = """
import torch.distributed as dist
dist.init_process_group("{}", store=dist.HashStore(), rank=0, world_size=1)
"""


def _case(name: str, kinds: tuple[str, ...], text: str, backend: str = "nccl") -> Case:
    return case(name, _DOCS, kinds, _BEGIN.format(backend) + text)


CASES: tuple[Case, ...] = (
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
