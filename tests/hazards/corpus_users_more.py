"""Variations on the documentation's examples, as users write them: training and devices."""

from __future__ import annotations

from hazard_case import RAW, WAR, WAW, Case, case

__all__ = ["CASES"]

CASES: tuple[Case, ...] = (
    case(
        "graph_partial_replay_then_input",
        "PyTorch notes, CUDA semantics: CUDA graphs",
        WAR,
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
cuda.synchronize()
with cuda.stream(s):
    g.replay()
x.fill_(3)
""",
    ),
    case(
        "graph_output_read_on_side",
        "PyTorch notes, CUDA semantics: CUDA graphs",
        RAW,
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
g.replay()
with cuda.stream(s):
    z = y + 1
""",
    ),
    case(
        "graphed_callable",
        "PyTorch notes, CUDA semantics: CUDA graphs",
        (),
        """
m = nn.Linear(8, 8).cuda()
f = cuda.make_graphed_callables(m, (torch.ones(4, 8, device="cuda"),))
for _ in range(2):
    f(torch.ones(4, 8, device="cuda")).sum().backward()
""",
    ),
    case(
        "graph_capture_with_side_stream",
        "PyTorch notes, CUDA semantics: CUDA graphs",
        (),
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    s.wait_stream(cuda.current_stream())
    with cuda.stream(s):
        a = x * 2
    b = x * 3
    cuda.current_stream().wait_stream(s)  #needed
    c = a + b
g.replay()
d = c + 1
""",
    ),
    case(
        "generator_data_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
def loader(n):
    for i in range(n):
        with cuda.stream(s):
            x = torch.full((64,), float(i), device="cuda")
        cuda.current_stream().wait_stream(s)  #needed
        x.record_stream(cuda.current_stream())  #needed
        yield x
tot = torch.zeros(64, device="cuda")
for x in loader(3):
    tot += x
""",
    ),
    case(
        "generator_yield_inside",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW + WAW,
        """
def loader(n):
    for i in range(n):
        with cuda.stream(s):
            x = torch.full((64,), float(i), device="cuda")
            yield x
tot = torch.zeros(64, device="cuda")
for x in loader(3):
    tot += x
end = tot + 1
del tot
""",
    ),
    case(
        "pipeline_microbatches",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
t = cuda.Stream()
a = nn.Linear(8, 8).cuda(); b = nn.Linear(8, 8).cuda()
cuda.synchronize()
evs = []
outs = []
for i in range(4):
    with cuda.stream(s):
        h = a(torch.ones(4, 8, device="cuda"))
        h.record_stream(t)
        e = s.record_event()
    t.wait_event(e)  #needed
    with cuda.stream(t):
        outs.append(b(h))
cuda.current_stream().wait_stream(t)  #needed
r = torch.stack(outs).sum()
""",
    ),
    case(
        "pipeline_microbatches_no_event",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
t = cuda.Stream()
a = nn.Linear(8, 8).cuda(); b = nn.Linear(8, 8).cuda()
cuda.synchronize()
outs = []
for i in range(4):
    with cuda.stream(s):
        h = a(torch.ones(4, 8, device="cuda"))
    with cuda.stream(t):
        outs.append(b(h))
""",
    ),
    case(
        "weights_created_on_main_used_on_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
m = nn.Linear(8, 8).cuda()
x = torch.ones(4, 8)
with cuda.stream(s):
    y = m(x.cuda())
""",
    ),
    case(
        "lstm_bn_conv_amp",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
m = m.append(nn.LazyLinear(8)).cuda()
l = nn.LSTM(8, 8).cuda(); sc = torch.amp.GradScaler("cuda")
x = torch.randn(2, 3, 8, 8, device="cuda")
with torch.autocast("cuda", dtype=torch.float16):
    h = m(x)
opt = torch.optim.SGD([*m.parameters(), *l.parameters()], lr=0.1)
for _ in range(2):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        o, _ = l(m(x).unsqueeze(0))
        loss = o.float().pow(2).mean()
    sc.scale(loss).backward()
    sc.unscale_(opt)
    nn.utils.clip_grad_norm_(l.parameters(), 1.0)
    sc.step(opt); sc.update()
""",
    ),
    case(
        "autograd_grad_side",
        "PyTorch notes, CUDA semantics: stream semantics of backward passes",
        RAW,
        """
x = torch.ones(64, device="cuda", requires_grad=True)
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = (x * 2).sum()
    (g,) = torch.autograd.grad(y, x)
h = g + 1
""",
    ),
    case(
        "autograd_grad_main_forward_side",
        "PyTorch notes, CUDA semantics: stream semantics of backward passes",
        (),
        """
x = torch.ones(64, device="cuda", requires_grad=True)
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = (x * 2).sum()
cuda.current_stream().wait_stream(s)
(g,) = torch.autograd.grad(y, x)
h = g + 1
""",
    ),
    case(
        "grad_initial_on_other_stream",
        "PyTorch notes, CUDA semantics: stream semantics of backward passes",
        RAW,
        """
x = torch.ones(64, device="cuda", requires_grad=True)
y = x * 2
with cuda.stream(s):
    g0 = torch.ones(64, device="cuda")
y.backward(g0)
""",
    ),
    case(
        "two_backwards_two_streams",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda", requires_grad=True)
y = (x * 2).sum()
with cuda.stream(s):
    s.wait_stream(cuda.default_stream())
    y.backward()
opt = torch.optim.SGD([x], lr=.1)
opt.step()
""",
    ),
    case(
        "zero_grad_after_backward_on_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        WAW,
        """
x = torch.ones(64, device="cuda", requires_grad=True)
x.grad = torch.zeros(64, device="cuda")
y = (x * 2).sum()
with cuda.stream(s):
    s.wait_stream(cuda.default_stream())
    y.backward()
x.grad.zero_()
""",
    ),
    case(
        "checkpoint_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
from torch.utils.checkpoint import checkpoint
m = nn.Linear(8, 8).cuda(); x = torch.ones(4, 8, device="cuda", requires_grad=True)
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = checkpoint(m, x, use_reentrant=False).sum()
cuda.current_stream().wait_stream(s)
y.backward()
g = x.grad + 1
""",
    ),
    case(
        "compiled_fn",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
f = torch.compile(lambda t: t * 2 + 1, backend="eager")
x = torch.ones(64, device="cuda")
y = f(x)
""",
    ),
    case(
        "multi_output_split",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    a, b = x.mul(2).split(32)
c = b + 1
""",
    ),
    case(
        "unbind_write",
        "PyTorch notes, CUDA semantics: CUDA streams",
        WAR,
        """
x = torch.ones(4, 64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x.sum(0)
x.unbind(0)[2].zero_()
""",
    ),
    case(
        "inplace_relu_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.randn(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    F.relu_(x)
y = x.sum()
""",
    ),
    case(
        "kv_cache_slot",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
cache = torch.zeros(8, 64, device="cuda"); t = cuda.Stream()
s.wait_stream(cuda.current_stream()); t.wait_stream(cuda.current_stream())
with cuda.stream(s):
    cache[3].fill_(1)
with cuda.stream(t):
    cache[4].fill_(2)
cuda.current_stream().wait_stream(s); cuda.current_stream().wait_stream(t)
r = cache.sum()
""",
    ),
    case(
        "kv_cache_same_slot",
        "PyTorch notes, CUDA semantics: CUDA streams",
        WAW,
        """
cache = torch.zeros(8, 64, device="cuda"); t = cuda.Stream()
s.wait_stream(cuda.current_stream()); t.wait_stream(cuda.current_stream())
with cuda.stream(s):
    cache[3].fill_(1)
with cuda.stream(t):
    cache[2:4].fill_(2)
cuda.current_stream().wait_stream(s); cuda.current_stream().wait_stream(t)
""",
    ),
    case(
        "heads_on_streams",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
q = torch.zeros(2, 4, 16, 8, device="cuda"); t = cuda.Stream()
s.wait_stream(cuda.current_stream()); t.wait_stream(cuda.current_stream())
with cuda.stream(s):
    q[:, :2].add_(1)
with cuda.stream(t):
    q[:, 2:].add_(1)
cuda.current_stream().wait_stream(s); cuda.current_stream().wait_stream(t)
r = q.sum()
""",
    ),
    case(
        "inner_slices_3d",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
q = torch.zeros(4, 8, 8, device="cuda"); t = cuda.Stream()
s.wait_stream(cuda.current_stream()); t.wait_stream(cuda.current_stream())
with cuda.stream(s):
    q[:, :4, :4].add_(1)
with cuda.stream(t):
    q[:, :4, 4:].add_(1)
cuda.current_stream().wait_stream(s); cuda.current_stream().wait_stream(t)
r = q.sum()
""",
    ),
    case(
        "interleaved_last_dim",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
q = torch.zeros(4, 8, 8, device="cuda"); t = cuda.Stream()
s.wait_stream(cuda.current_stream()); t.wait_stream(cuda.current_stream())
with cuda.stream(s):
    q[..., ::2].add_(1)
with cuda.stream(t):
    q[..., 1::2].add_(1)
cuda.current_stream().wait_stream(s); cuda.current_stream().wait_stream(t)
r = q.sum()
""",
    ),
    case(
        "item_in_thread",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
import threading
x = torch.ones(64, device="cuda"); res = []
s.wait_stream(cuda.current_stream())  #needed
def work():
    with cuda.stream(s):
        y = x * 2
        res.append(y.sum().item())
th = threading.Thread(target=work); th.start(); th.join()
x.zero_()
""",
    ),
    case(
        "executor_workers",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
from concurrent.futures import ThreadPoolExecutor
x = torch.ones(64, device="cuda"); cuda.synchronize()
def work(i):
    st = cuda.Stream()
    with cuda.stream(st):
        return x * i
with ThreadPoolExecutor(2) as ex:
    outs = list(ex.map(work, range(2)))
y = outs[0] + outs[1]
""",
    ),
    case(
        "wait_stream_reversed",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
s.wait_stream(cuda.current_stream())
z = y + 1
""",
    ),
    case(
        "event_reused_in_loop",
        "CUDA programming guide: events",
        (),
        """
e = cuda.Event(); x = torch.ones(64, device="cuda")
for i in range(3):
    x.add_(1)
    e.record()  #needed
    s.wait_event(e)  #needed
    with cuda.stream(s):
        y = x * 2
        e2 = s.record_event()
    cuda.current_stream().wait_event(e2)  #needed
""",
    ),
    case(
        "event_reused_in_loop_bug",
        "CUDA programming guide: events",
        WAR,
        """
e = cuda.Event(); x = torch.ones(64, device="cuda")
for i in range(3):
    x.add_(1)
    e.record()
    s.wait_event(e)
    with cuda.stream(s):
        y = x * 2
""",
    ),
    case(
        "scalar_from_side_used_as_python",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    k = (x * 2).sum()
f = float(k) if False else None
s.synchronize()  #needed
y = x * float(k)
""",
    ),
    case(
        "scalar_item_of_side_tensor_on_main",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    k = (x * 2).sum()
v = k.item()
""",
    ),
    case(
        "cpu_of_side_tensor_on_main",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    k = x * 2
v = k.cpu()
""",
    ),
    case(
        "tolist_of_side_tensor_on_main",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    k = x * 2
v = k.tolist()
""",
    ),
    case(
        "tensor_used_as_index_bool",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    k = (x * 2).sum()
if k > 3:
    pass
""",
    ),
    case(
        "set_stream_restored",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda")
old = cuda.current_stream()
s.wait_stream(old)  #needed
cuda.set_stream(s)
y = x * 2
cuda.set_stream(old)
old.wait_stream(s)  #needed
z = y + 1
""",
    ),
    case(
        "stream_context",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda")
ctx = cuda.StreamContext(s)
s.wait_stream(cuda.current_stream())  #needed
with ctx:
    y = x * 2
cuda.current_stream().wait_stream(s)  #needed
z = y + 1
""",
    ),
    case(
        "pool_alias_streams",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda")
ss = [cuda.Stream() for _ in range(33)]
ss[0].wait_stream(cuda.current_stream())  #needed
with cuda.stream(ss[0]):
    y = x * 2
with cuda.stream(ss[32]):
    z = y + 1
cuda.synchronize()
""",
    ),
    case(
        "resize_zero_fsdp",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
full = torch.empty(4096, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    full.fill_(1)
cuda.current_stream().wait_stream(s)  #needed
out = full * 2
with cuda.stream(s):
    full.untyped_storage().resize_(0)
    other = torch.zeros(4096, device="cuda")
""",
    ),
    case(
        "clone_before_free",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(4096, device="cuda")
y = x.clone()
del x
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    z = y * 2
cuda.current_stream().wait_stream(s)
del y
w = torch.zeros(4096, device="cuda")
""",
    ),
)
