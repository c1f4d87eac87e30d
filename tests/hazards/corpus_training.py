"""Training: the backward pass, optimizers, statistics, CUDA graphs."""

from __future__ import annotations

from hazard_case import RAW, WAR, Case, case

_BACK = "PyTorch notes, CUDA semantics: stream semantics of backward passes"
_GRAPH = "PyTorch notes, CUDA semantics: CUDA graphs"
_SCHEMA = "PyTorch docs, CUDA sanitizer: operators and schemas"
_FUSED = "PyTorch notes, CUDA semantics: CUDA streams; one kernel for many operators"

CASES: tuple[Case, ...] = (
    case(
        "backward_on_side_stream",
        _BACK,
        ("write-after-write",),
        """
w = torch.ones(64, device="cuda", requires_grad=True)
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    loss = (w * 2).sum()
    loss.backward()
w.grad.add_(1)
""",
    ),
    case(
        "backward_on_side_stream_joined",
        _BACK,
        (),
        """
w = torch.ones(64, device="cuda", requires_grad=True)
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    loss = (w * 2).sum()
    loss.backward()
cuda.current_stream().wait_stream(s)  #needed
w.grad.add_(1)
""",
    ),
    case(
        "forward_here_backward_there",
        _BACK,
        ("write-after-write",),
        """
w = torch.ones(64, device="cuda", requires_grad=True)
loss = (w * 2).sum()
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    loss.backward()
w.grad.add_(1)
""",
    ),
    case(
        "batch_norm_statistics",
        _SCHEMA,
        RAW,
        """
bn = nn.BatchNorm1d(8).cuda()
x = torch.ones(4, 8, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    bn(x)
m = bn.running_mean + 1
""",
    ),
    case(
        "batch_norm_statistics_joined",
        _SCHEMA,
        (),
        """
bn = nn.BatchNorm1d(8).cuda()
x = torch.ones(4, 8, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = bn(x)
cuda.current_stream().wait_stream(s)  #needed
m = bn.running_mean + 1
""",
    ),
    case(
        "graph_input_written",
        _GRAPH,
        WAR,
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    g.replay()
x.fill_(3)
""",
    ),
    case(
        "graph_output_read",
        _GRAPH,
        RAW,
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    g.replay()
z = y + 1
""",
    ),
    case(
        "graph_ordered",
        _GRAPH,
        (),
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    g.replay()
cuda.current_stream().wait_stream(s)  #needed
x.fill_(3)
z = y + 1
""",
    ),
    case(
        "optimizer_on_side_stream",
        _BACK,
        (*RAW, *WAR),
        """
model = nn.Linear(8, 8).cuda()
sgd = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
model(torch.ones(2, 8, device="cuda")).sum().backward()
with cuda.stream(s):
    sgd.step()
""",
    ),
    case(
        "optimizer_on_side_stream_ordered",
        _BACK,
        (),
        """
model = nn.Linear(8, 8).cuda()
sgd = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
model(torch.ones(2, 8, device="cuda")).sum().backward()
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    sgd.step()
cuda.current_stream().wait_stream(s)
""",
    ),
    case(
        "recurrent_network_of_what_is_still_written",
        _FUSED,
        RAW,
        """
rnn = nn.LSTM(8, 8).cuda()
x = torch.ones(4, 2, 8, device="cuda")
with cuda.stream(s):
    y = rnn(x)[0]
""",
    ),
    case(
        "recurrent_network_on_a_side_stream",
        _FUSED,
        (),
        """
rnn = nn.LSTM(8, 8).cuda()
x = torch.ones(4, 2, 8, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = rnn(x)[0]
cuda.current_stream().wait_stream(s)  #needed
z = y + 1
""",
    ),
)
