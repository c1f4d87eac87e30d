"""Variations on the documentation's examples, as users write them: views, graphs and devices."""

from __future__ import annotations

from hazard_case import RAW, UAF, WAR, WAW, Case, case

__all__ = ["CASES"]

CASES: tuple[Case, ...] = (
    case(
        "priority_stream",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
p = cuda.Stream(priority=-1)
with cuda.stream(p):
    y = x * 2
""",
    ),
    case(
        "default_stream_explicit",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda")
with cuda.stream(cuda.default_stream()):
    y = x * 2
z = y + 1
""",
    ),
    case(
        "graph_warmup_recipe",
        "PyTorch notes, CUDA semantics: CUDA graphs",
        (),
        """
m = nn.Linear(8, 8).cuda(); x = torch.ones(4, 8, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    for _ in range(3):
        y = m(x)
cuda.current_stream().wait_stream(s)
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = m(x)
x.fill_(2)
g.replay()
z = y + 1
""",
    ),
    case(
        "graph_warmup_no_wait_before",
        "PyTorch notes, CUDA semantics: CUDA graphs",
        RAW,
        """
m = nn.Linear(8, 8).cuda(); x = torch.ones(4, 8, device="cuda")
with cuda.stream(s):
    for _ in range(3):
        y = m(x)
cuda.current_stream().wait_stream(s)
""",
    ),
    case(
        "graph_replay_on_side_input_on_main",
        "PyTorch notes, CUDA semantics: CUDA graphs",
        RAW,
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
cuda.synchronize()
x.fill_(3)
with cuda.stream(s):
    g.replay()
""",
    ),
    case(
        "dlpack_alias",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
a = torch.from_dlpack(x)
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    a.add_(1)
y = x * 2
""",
    ),
    case(
        "detach_alias",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
a = x.detach()
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    a.add_(1)
y = x * 2
""",
    ),
    case(
        "transposed_alias",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(8, 8, device="cuda")
a = x.t()
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    a[0].add_(1)
y = x * 2
""",
    ),
    case(
        "halves_of_transposed",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(8, 8, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    x[:4].add_(1)
y = x[4:] * 2
""",
    ),
    case(
        "chunks_on_streams",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(8, 8, device="cuda"); t = cuda.Stream()
a, b = x.chunk(2)
s.wait_stream(cuda.current_stream()); t.wait_stream(cuda.current_stream())
with cuda.stream(s):
    a.mul_(2)
with cuda.stream(t):
    b.mul_(3)
cuda.current_stream().wait_stream(s); cuda.current_stream().wait_stream(t)
y = x.sum()
""",
    ),
    case(
        "one_chunk_not_joined",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(8, 8, device="cuda"); t = cuda.Stream()
a, b = x.chunk(2)
s.wait_stream(cuda.current_stream()); t.wait_stream(cuda.current_stream())
with cuda.stream(s):
    a.mul_(2)
with cuda.stream(t):
    b.mul_(3)
cuda.current_stream().wait_stream(s)
y = x.sum()
""",
    ),
    case(
        "data_parallel",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
m = nn.DataParallel(nn.Linear(8, 8).cuda(), device_ids=[0, 1])
for _ in range(2):
    m(torch.ones(4, 8, device="cuda")).sum().backward()
""",
        2,
    ),
    case(
        "model_parallel",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
a = nn.Linear(8, 8).to("cuda:0"); b = nn.Linear(8, 8).to("cuda:1")
opt = torch.optim.Adam([*a.parameters(), *b.parameters()])
for _ in range(2):
    opt.zero_grad()
    b(a(torch.ones(4, 8, device="cuda:0")).to("cuda:1")).sum().backward()
    opt.step()
""",
        2,
    ),
    case(
        "ema_on_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW + WAW,
        """
m = nn.Linear(8, 8).cuda(); ema = [p.detach().clone() for p in m.parameters()]
opt = torch.optim.SGD(m.parameters(), lr=0.1)
m(torch.ones(4, 8, device="cuda")).sum().backward()
opt.step()
with cuda.stream(s):
    for e, p in zip(ema, m.parameters()):
        e.lerp_(p.detach(), 0.1)
""",
    ),
    case(
        "ema_on_side_next_step",
        "PyTorch notes, CUDA semantics: CUDA streams",
        WAR,
        """
m = nn.Linear(8, 8).cuda(); ema = [p.detach().clone() for p in m.parameters()]
opt = torch.optim.SGD(m.parameters(), lr=0.1)
for _ in range(2):
    m(torch.ones(4, 8, device="cuda")).sum().backward()
    opt.step()
    s.wait_stream(cuda.current_stream())
    with cuda.stream(s):
        for e, p in zip(ema, m.parameters()):
            e.lerp_(p.detach(), 0.1)
""",
    ),
    case(
        "ema_on_side_joined",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
m = nn.Linear(8, 8).cuda(); ema = [p.detach().clone() for p in m.parameters()]
opt = torch.optim.SGD(m.parameters(), lr=0.1)
for _ in range(2):
    m(torch.ones(4, 8, device="cuda")).sum().backward()
    cuda.current_stream().wait_stream(s)  #needed
    opt.step()
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        for e, p in zip(ema, m.parameters()):
            e.lerp_(p.detach(), 0.1)
""",
    ),
    case(
        "dropout_two_streams",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = F.dropout(x)
z = F.dropout(x)
""",
    ),
    case(
        "resize_grows",
        "PyTorch notes, CUDA semantics: CUDA streams",
        UAF,
        """
x = torch.ones(4096, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
x.resize_(100000)
z = torch.zeros(4096, device="cuda")
""",
    ),
    case(
        "exception_leaves_stream",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda")
try:
    with cuda.stream(s):
        raise ValueError
except ValueError:
    pass
y = x * 2
""",
    ),
    case(
        "uninitialised_graph_pool_reads",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
g = cuda.CUDAGraph(); x = torch.zeros(64, device="cuda")
with cuda.graph(g):
    a = x + 1
    b = a * 2
for _ in range(3):
    g.replay()
v = b.sum().item()
""",
    ),
    case(
        "embedding_grad_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
e = nn.Embedding(10, 8).cuda()
e(torch.arange(4, device="cuda")).sum().backward()
with cuda.stream(s):
    n = e.weight.grad.norm()
""",
    ),
    case(
        "scaler_on_side_not_waited",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
p = torch.ones(8, device="cuda", requires_grad=True)
sc = torch.amp.GradScaler("cuda")
opt = torch.optim.SGD([p], lr=.1)
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    sc.scale((p * 2).sum()).backward()
g = p.grad * 1
""",
    ),
    case(
        "blocking_h2d_on_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
h = torch.ones(64)
with cuda.stream(s):
    x = h.to("cuda")
y = x + 1
""",
    ),
)
