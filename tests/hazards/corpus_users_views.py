"""Variations on the documentation's examples, as users write them: views, graphs and devices."""

from __future__ import annotations

from hazard_case import RAW, UAF, Case, case

CASES: tuple[Case, ...] = (
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
)
