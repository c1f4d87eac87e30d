"""Variations on the documentation's examples, as users write them: training and devices."""

from __future__ import annotations

from hazard_case import RAW, WAW, Case, case

CASES: tuple[Case, ...] = (
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
)
