"""CUDA graphs: what is ordered at capture, what at replay, and what must be kept alive."""

from __future__ import annotations

from hazard_case import RAW, UAF, WAW, Case, case

_GRAPH = "PyTorch notes, CUDA semantics: CUDA graphs"
_STATIC = "PyTorch docs, torch.cuda.graph: static inputs"
_FORK = "CUDA programming guide: cross-stream dependencies and events in stream capture"
_NORM = "PyTorch docs, BatchNorm1d: running estimates in training and evaluation"
_MULTI = "PyTorch notes, CUDA semantics: usage with multiple streams"

CASES: tuple[Case, ...] = (
    case(
        "graph_input_dropped_after_capture",
        _STATIC,
        UAF,
        """
x = torch.ones(100000, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
del x
g.replay()
""",
    ),
    case(
        "graph_input_replaced",
        _STATIC,
        UAF,
        """
x = torch.ones(100000, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
x = torch.full((100000,), 3.0, device="cuda")
g.replay()
""",
    ),
    case(
        "graph_pinned_input_dropped",
        _STATIC,
        UAF,
        """
h = torch.ones(64).pin_memory()
x = torch.empty(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    x.copy_(h, non_blocking=True)
del h
g.replay()
""",
    ),
    case(
        "graph_intermediates_are_its_own",
        _GRAPH,
        (),
        """
x = torch.ones(100000, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
    z = y + 1
    del y
z2 = torch.zeros(100000, device="cuda")
for _ in range(2):
    g.replay()
out = z + z2
""",
    ),
    case(
        "graph_gradients_set_to_none",
        _GRAPH,
        (),
        """
model = nn.Linear(8, 8).cuda()
sgd = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
x = torch.ones(2, 8, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    for _ in range(2):
        sgd.zero_grad(set_to_none=True)
        model(x).sum().backward()
        sgd.step()
cuda.current_stream().wait_stream(s)
g = cuda.CUDAGraph()
sgd.zero_grad(set_to_none=True)
with cuda.graph(g):
    loss = model(x).sum()
    loss.backward()
    sgd.step()
for step in range(2):
    x.fill_(step)
    g.replay()
total = loss + 1
""",
    ),
    case(
        "forked_in_capture_and_joined",
        _FORK,
        (),
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    a = x * 2
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        b = a + 1
    cuda.current_stream().wait_stream(s)  #needed
    c = b + a
g.replay()
d = c + 1
""",
    ),
    case(
        "two_graphs_on_two_streams",
        _MULTI,
        RAW,
        """
x = torch.ones(64, device="cuda")
g, following = cuda.CUDAGraph(), cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
with cuda.graph(following):
    z = y * 2
g.replay()
with cuda.stream(s):
    following.replay()
""",
    ),
    case(
        "capture_forks_too_early",
        _FORK,
        RAW,
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    a = x * 2
    s.wait_stream(cuda.current_stream())
    a.add_(1)
    with cuda.stream(s):
        b = a + 1
    cuda.current_stream().wait_stream(s)
""",
    ),
    case(
        "running_statistics_are_read_in_evaluation",
        _NORM,
        (),
        """
bn = nn.BatchNorm1d(8).cuda().eval()
x = torch.ones(4, 8, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with torch.no_grad():
    with cuda.stream(s):
        y = bn(x)
    z = bn(x)
""",
    ),
    case(
        "running_statistics_are_written_in_training",
        _NORM,
        WAW,
        """
bn = nn.BatchNorm1d(8, affine=False).cuda()
x = torch.ones(4, 8, device="cuda")
bn.num_batches_tracked = None
s.wait_stream(cuda.current_stream())
with torch.no_grad():
    with cuda.stream(s):
        y = bn(x)
    z = bn(x)
""",
    ),
)
