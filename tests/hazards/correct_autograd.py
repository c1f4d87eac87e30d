"""Correct programs of several streams: torch's own tests of streaming backward, and training."""

from __future__ import annotations

from hazard_case import Case, case

_NOTES = "PyTorch notes, CUDA semantics: stream semantics of backward passes"
_TESTS = "PyTorch, test/test_autograd.py: TestAutogradStreamSynchronization"
_DIST = """
import torch.distributed as dist
dist.init_process_group("{}", store=dist.HashStore(), rank=0, world_size=1)
"""


def _case(name: str, source: str, text: str, gpus: int = 1) -> Case:
    return case(name, source, (), text, gpus)


CASES: tuple[Case, ...] = (
    _case(
        "streaming_backward_on_the_stream_of_its_forward",
        "PyTorch, test/test_autograd.py: test_streaming_backwards_sync",
        """
main = cuda.current_stream()
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        assert cuda.current_stream() == s, cuda.current_stream()
        return grad * 2
x = torch.ones(8, device="cuda", requires_grad=True)
s.wait_stream(main)
with cuda.stream(s):
    y = Double.apply(x)
    y.sum().backward()
main.wait_stream(s)
assert x.grad.sum() == 16
assert cuda.current_stream() == main
""",
    ),
    _case(
        "streaming_backward_of_several_streams",
        "PyTorch, test/test_autograd.py: test_streaming_backwards_multiple_streams",
        """
main = cuda.current_stream()
streams = [main, cuda.Stream(), cuda.Stream()]
x = torch.ones(8, device="cuda", requires_grad=True)
parts = []
for stream in streams:
    if stream != main:
        stream.wait_stream(main)
    with cuda.stream(stream):
        parts.append(x * 2)
        parts[-1].record_stream(main)
for stream in streams[1:]:
    main.wait_stream(stream)
loss = torch.stack(parts).sum()
loss.backward()
total = x.grad + 1
""",
    ),
    _case(
        "streaming_backward_with_a_final_callback",
        "PyTorch, test/test_autograd.py: test_streaming_backwards_callback",
        """
class Called(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out):
        ctx.out, ctx.leaf = out, x
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        leaf, out = ctx.leaf, ctx.out
        def callback():
            out.append(leaf.grad * 2)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        return grad, None
x = torch.ones(8, device="cuda", requires_grad=True)
seen = []
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = Called.apply(x, seen)
cuda.current_stream().wait_stream(s)
y.sum().backward()
z = seen[0] + 1
""",
    ),
    _case(
        "root_gradient_given_on_the_callers_stream",
        "PyTorch, test/test_autograd.py: test_streaming_backwards_sync_graph_root",
        """
fwd, bwd = cuda.Stream(), cuda.Stream()
x = torch.ones(8, device="cuda", requires_grad=True)
fwd.wait_stream(cuda.current_stream())
with cuda.stream(fwd):
    y = x * 3
bwd.wait_stream(cuda.current_stream())
with cuda.stream(bwd):
    root = torch.ones(8, device="cuda")
    torch.autograd.backward(y, root)
    a = x.grad + 1
    del a
    x.grad.record_stream(bwd)
    (g,) = torch.autograd.grad(x.mul(2).sum(), x)
    b = g + 1
cuda.synchronize()
""",
    ),
    _case(
        "current_stream_in_hooks_is_the_nodes",
        _NOTES,
        """
main, seen = cuda.current_stream(), []
x = torch.ones(8, device="cuda", requires_grad=True)
s.wait_stream(main)
with cuda.stream(s):
    y = x * 2
    y.register_hook(lambda grad: seen.append(cuda.current_stream()))
main.wait_stream(s)
z = y + 1
z.register_hook(lambda grad: seen.append(cuda.current_stream()))
x.register_post_accumulate_grad_hook(lambda p: seen.append(cuda.current_stream()))
z.sum().backward()
assert seen == [main, s, s], seen
assert cuda.current_stream() == main
""",
    ),
    _case(
        "accumulator_keeps_the_stream_of_its_construction",
        _TESTS,
        """
main, seen = cuda.current_stream(), []
x = torch.ones(8, device="cuda", requires_grad=True)
s.wait_stream(main)
with cuda.stream(s):
    kept = x.view_as(x).grad_fn.next_functions[0][0]
kept.register_hook(lambda *given: seen.append(cuda.current_stream()))
(x * 2).sum().backward()
del kept
x.register_post_accumulate_grad_hook(lambda p: seen.append(cuda.current_stream()))
(x * 2).sum().backward()
assert seen == [s, main], seen
y = x.grad + 1
""",
    ),
    _case(
        "consumer_waits_for_its_single_producer",
        _TESTS + ".test_consumer_to_single_producer_case_2_correctness",
        """
class Producer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        out = grad.clone()
        out.add_(1)
        return out
class Consumer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad * 1
t, u = cuda.Stream(), cuda.Stream()
x = torch.ones(8, device="cuda", requires_grad=True)
t.wait_stream(cuda.current_stream())
with cuda.stream(t):
    y = Consumer.apply(x)
u.wait_stream(t)
with cuda.stream(u):
    z = Producer.apply(y)
y.record_stream(u)
cuda.current_stream().wait_stream(u)
z.sum().backward()
g = x.grad + 1
""",
    ),
    _case(
        "accumulation_runs_on_the_consumers_stream",
        _TESTS + ".test_consumer_to_multi_producer_case_4_correctness",
        """
a, b = cuda.Stream(), cuda.Stream()
main = cuda.current_stream()
x = torch.ones(8, device="cuda", requires_grad=True)
y = x * 2
for stream in (a, b):
    stream.wait_stream(main)
with cuda.stream(a):
    p = y * 3
with cuda.stream(b):
    q = y * 5
y.record_stream(a)
y.record_stream(b)
main.wait_stream(a)
main.wait_stream(b)
(p + q).sum().backward()
g = x.grad * 2
""",
    ),
    _case(
        "side_stream_backward_overlaps",
        _TESTS + ".test_side_stream_backward_overlap",
        """
main = cuda.current_stream()
a = torch.ones(8, device="cuda", requires_grad=True)
b = a.clone()
s.wait_stream(main)
with cuda.stream(s):
    d = b.sin()
c = b.cos()
main.wait_stream(s)
d.record_stream(main)
(c.sum() + d.sum()).backward()
g = a.grad + 1
""",
    ),
    _case(
        "gradients_used_where_backward_was_called",
        _NOTES,
        """
x = torch.ones(8, device="cuda", requires_grad=True)
y = (x * 2).sum()
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y.backward()
    z = x.grad + 1
cuda.synchronize()
""",
    ),
    _case(
        "gradients_used_after_a_wait",
        _NOTES,
        """
x = torch.ones(8, device="cuda", requires_grad=True)
y = (x * 2).sum()
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y.backward()
cuda.current_stream().wait_stream(s)
z = x.grad + 1
""",
    ),
    _case(
        "forward_on_side_backward_on_main",
        _NOTES,
        """
m = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    loss = m(torch.ones(4, 8, device="cuda")).sum()
cuda.current_stream().wait_stream(s)
loss.backward()
with torch.no_grad():
    for p in m.parameters():
        p.sub_(p.grad)
""",
    ),
    _case(
        "second_order_gradients_on_a_side_stream",
        _NOTES,
        """
x = torch.ones(8, device="cuda", requires_grad=True)
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = (x ** 3).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (g * g).sum().backward()
    z = x.grad * 2
cuda.current_stream().wait_stream(s)
w = x.grad + 1
""",
    ),
    _case(
        "checkpoint_recomputed_on_the_forward_stream",
        "PyTorch, torch.utils.checkpoint",
        """
from torch.utils.checkpoint import checkpoint
m = nn.Sequential(nn.Linear(8, 8), nn.GELU()).cuda()
for reentrant in (False, True):
    x = torch.ones(4, 8, device="cuda", requires_grad=True)
    s.wait_stream(cuda.current_stream())
    with cuda.stream(s):
        y = checkpoint(m, x, use_reentrant=reentrant).sum()
    cuda.current_stream().wait_stream(s)
    y.backward()
    g = x.grad + 1
    x.record_stream(s)
""",
    ),
    _case(
        "gradient_hook_hands_over_to_a_communication_stream",
        "PyTorch, DDP design note; Megatron-LM's overlapped reduction",
        """
comm = cuda.Stream()
m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
total = torch.zeros((), device="cuda")
comm.wait_stream(cuda.current_stream())
def hook(p):
    comm.wait_stream(cuda.current_stream())
    with cuda.stream(comm):
        p.grad.mul_(0.5)
for p in m.parameters():
    p.register_post_accumulate_grad_hook(hook)
opt = torch.optim.SGD(m.parameters(), 0.1)
for _ in range(2):
    m(torch.ones(4, 8, device="cuda")).sum().backward()
    cuda.current_stream().wait_stream(comm)
    opt.step()
    opt.zero_grad()
""",
    ),
    _case(
        "optimizer_step_in_backward",
        "PyTorch tutorials: optimizer step in backward",
        """
m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
opts = {p: torch.optim.SGD([p], 0.1) for p in m.parameters()}
def hook(p):
    opts[p].step()
    opts[p].zero_grad()
for p in m.parameters():
    p.register_post_accumulate_grad_hook(hook)
for _ in range(2):
    m(torch.ones(4, 8, device="cuda")).sum().backward()
""",
    ),
    _case(
        "deepspeed_all_producer_streams_awaited",
        "https://github.com/deepspeedai/DeepSpeed/pull/8080",
        """
a, b, reduction = cuda.Stream(), cuda.Stream(), cuda.Stream()
main = cuda.current_stream()
ws = [torch.ones(64, device="cuda", requires_grad=True) for _ in range(2)]
bucket = torch.zeros(128, device="cuda")
for stream in (a, b, reduction):
    stream.wait_stream(main)
producers = set()
def fill(p):
    at = next(i for i, w in enumerate(ws) if w is p)
    bucket[64 * at : 64 * at + 64].copy_(p.grad)
    producers.add(cuda.current_stream())
    if len(producers) == 2:
        for stream in producers:
            reduction.wait_stream(stream)
        with cuda.stream(reduction):
            bucket.div_(2)
losses = []
for w, stream in zip(ws, (a, b)):
    w.register_post_accumulate_grad_hook(fill)
    with cuda.stream(stream):
        losses.append((w * 2).sum())
main.wait_stream(a)
main.wait_stream(b)
(losses[0] + losses[1]).backward()
assert producers == {a, b}, producers
main.wait_stream(reduction)
g = bucket + 1
""",
    ),
    _case(
        "ddp_ordinary_training",
        "PyTorch docs, DistributedDataParallel",
        _DIST.format("gloo")
        + """
m = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
opt = torch.optim.SGD(m.parameters(), 0.1)
for _ in range(2):
    m(torch.ones(4, 8, device="cuda")).sum().backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    _case(
        "ddp_built_and_run_on_a_side_stream",
        "PyTorch notes, CUDA semantics: usage with DistributedDataParallel",
        _DIST.format("gloo")
        + """
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    m = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
    for _ in range(2):
        loss = m(torch.ones(4, 8, device="cuda")).sum()
        loss.backward()
cuda.current_stream().wait_stream(s)
g = [p.grad + 1 for p in m.parameters()]
""",
    ),
    _case(
        "fsdp1_ordinary_training",
        "PyTorch docs, FullyShardedDataParallel",
        _DIST.format("gloo")
        + """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
inner = FSDP(nn.Linear(8, 8).cuda())
m = FSDP(nn.Sequential(inner, nn.ReLU(), nn.Linear(8, 8).cuda()))
opt = torch.optim.SGD(m.parameters(), 0.1)
for _ in range(3):
    m(torch.ones(4, 8, device="cuda")).sum().backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    _case(
        "fsdp1_prefetching_and_offloading",
        "PyTorch docs, FullyShardedDataParallel",
        _DIST.format("gloo")
        + """
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP
inner = FSDP(nn.Linear(8, 8), device_id=0, cpu_offload=CPUOffload(True))
m = FSDP(nn.Sequential(inner, nn.Linear(8, 8)), device_id=0, cpu_offload=CPUOffload(True),
         forward_prefetch=True)
opt = torch.optim.SGD(m.parameters(), 0.1)
for _ in range(2):
    m(torch.ones(4, 8, device="cuda")).sum().backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    _case(
        "fsdp2_ordinary_training",
        "PyTorch docs, fully_shard",
        _DIST.format("gloo")
        + """
from torch.distributed.fsdp import fully_shard
m = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
for layer in (m[0], m[2]):
    fully_shard(layer)
fully_shard(m)
opt = torch.optim.SGD(m.parameters(), 0.1)
for _ in range(3):
    m(torch.ones(4, 8, device="cuda")).sum().backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    _case(
        "fsdp2_accumulating_without_reducing",
        "PyTorch docs, fully_shard: set_requires_gradient_sync",
        _DIST.format("gloo")
        + """
from torch.distributed.fsdp import fully_shard
m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
fully_shard(m[0])
fully_shard(m)
opt = torch.optim.SGD(m.parameters(), 0.1)
for at in range(4):
    m.set_requires_gradient_sync(at % 2 == 1)
    m(torch.ones(4, 8, device="cuda")).sum().backward()
    if at % 2:
        opt.step()
        opt.zero_grad()
""",
    ),
    _case(
        "pipeline_stages_on_streams",
        "torchgpipe, PyTorch docs: pipeline parallelism",
        """
main, streams = cuda.current_stream(), [cuda.Stream(), cuda.Stream()]
stages = [nn.Linear(8, 8).cuda() for _ in range(2)]
for stream in streams:
    stream.wait_stream(main)
losses = []
for _ in range(3):
    h = torch.ones(4, 8, device="cuda")
    streams[0].wait_stream(main)
    h.record_stream(streams[0])
    with cuda.stream(streams[0]):
        h = stages[0](h)
    streams[1].wait_stream(streams[0])
    h.record_stream(streams[1])
    with cuda.stream(streams[1]):
        losses.append(stages[1](h).sum())
main.wait_stream(streams[1])
sum(losses).backward()
opt = torch.optim.SGD([p for stage in stages for p in stage.parameters()], 0.1)
opt.step()
""",
    ),
    _case(
        "model_parallel_on_two_devices",
        "PyTorch tutorials: model parallelism",
        """
a, b = nn.Linear(8, 8).to("cuda:0"), nn.Linear(8, 8).to("cuda:1")
opt = torch.optim.SGD([*a.parameters(), *b.parameters()], 0.1)
for _ in range(2):
    opt.zero_grad()
    b(a(torch.ones(4, 8, device="cuda:0")).to("cuda:1")).sum().backward()
    opt.step()
""",
        2,
    ),
    _case(
        "asynchronous_reduction_of_each_gradient",
        "PyTorch docs, torch.distributed",
        _DIST.format("nccl")
        + """
m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
opt = torch.optim.SGD(m.parameters(), 0.1)
for _ in range(2):
    m(torch.ones(4, 8, device="cuda")).sum().backward()
    works = [dist.all_reduce(p.grad, async_op=True) for p in m.parameters()]
    for work in works:
        work.wait()
    opt.step()
    opt.zero_grad()
""",
    ),
    _case(
        "functional_collective_awaited",
        "PyTorch, torch.distributed._functional_collectives",
        _DIST.format("nccl")
        + """
import torch.distributed._functional_collectives as funcol
x = torch.ones(8, device="cuda")
a = funcol.all_reduce(x, "sum", dist.group.WORLD)
b = a + 1
group = dist.group.WORLD.group_name
c = torch.ops._c10d_functional.all_reduce(x, "sum", group)
c = torch.ops._c10d_functional.wait_tensor(c)
d = c * 2
""",
    ),
    _case(
        "collective_of_a_side_stream_joined",
        "https://github.com/pytorch/pytorch/issues/188655",
        _DIST.format("nccl")
        + """
main = cuda.current_stream()
x = torch.ones(8, device="cuda")
s.wait_stream(main)
with cuda.stream(s):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
main.wait_stream(s)
del x
y = torch.zeros(8, device="cuda")
""",
    ),
    _case(
        "activations_offloaded_by_saved_tensor_hooks",
        "PyTorch, torch.autograd.graph.save_on_cpu",
        """
m = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
for _ in range(2):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = m(torch.ones(4, 8, device="cuda")).square().sum()
    loss.backward()
""",
    ),
    _case(
        "activations_offloaded_on_a_stream",
        "TRL, torchtune: OffloadActivations",
        """
side = cuda.Stream()
kept = []
def pack(t):
    if not t.is_cuda:
        return t
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        host.copy_(t, non_blocking=True)
    t.record_stream(side)
    kept.append(host)
    return len(kept) - 1
def unpack(at):
    if not isinstance(at, int):
        return at
    with cuda.stream(side):
        back = kept[at].to("cuda", non_blocking=True)
    cuda.current_stream().wait_stream(side)
    back.record_stream(cuda.current_stream())
    return back
x = torch.ones(4, 8, device="cuda", requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
    y = (x.exp() * x.sin()).sum()
y.backward()
g = x.grad + 1
""",
    ),
    _case(
        "two_backwards_on_two_streams_of_one_weight",
        _NOTES,
        """
main, t = cuda.current_stream(), cuda.Stream()
w = torch.ones(8, device="cuda", requires_grad=True)
for stream in (s, t):
    stream.wait_stream(main)
with cuda.stream(s):
    (w * 2).sum().backward()
t.wait_stream(s)
with cuda.stream(t):
    (w * 3).sum().backward()
main.wait_stream(t)
g = w.grad + 1
""",
    ),
)
