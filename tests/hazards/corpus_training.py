"""Training: the backward pass, optimizers, statistics, CUDA graphs."""

from __future__ import annotations

from hazard_case import RAW, WAR, Case, case

__all__ = ["CASES"]

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
        "forward_on_side_backward_here",
        _BACK,
        (),
        """
w = torch.ones(64, device="cuda", requires_grad=True)
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    loss = (w * 2).sum()
cuda.current_stream().wait_stream(s)
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
        "graph_same_stream",
        _GRAPH,
        (),
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
for value in (1.0, 2.0):
    x.fill_(value)
    g.replay()
    z = y + 1
""",
    ),
    case(
        "capture_is_no_execution",
        _GRAPH,
        (),
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x + 1
cuda.current_stream().wait_stream(s)
x.fill_(2)
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
        "dropout_of_what_is_still_written",
        _FUSED,
        RAW,
        """
x = torch.ones(4, 8, device="cuda")
with cuda.stream(s):
    y = F.dropout(x)
""",
    ),
    case(
        "dropout_not_awaited",
        _FUSED,
        RAW,
        """
x = torch.ones(4, 8, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = F.dropout(x)
z = y + 1
""",
    ),
    case(
        "dropout_on_a_side_stream",
        _FUSED,
        (),
        """
x = torch.ones(4, 8, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = F.dropout(x)
cuda.current_stream().wait_stream(s)  #needed
z = y + 1
""",
    ),
    case(
        "attention_of_what_is_still_written",
        _FUSED,
        RAW,
        """
x = torch.ones(2, 2, 8, 16, device="cuda", dtype=torch.float16)
with cuda.stream(s):
    y = F.scaled_dot_product_attention(x, x, x)
""",
    ),
    case(
        "attention_not_awaited",
        _FUSED,
        RAW,
        """
x = torch.ones(2, 2, 8, 16, device="cuda", dtype=torch.float16)
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = F.scaled_dot_product_attention(x, x, x)
z = y + 1
""",
    ),
    case(
        "attention_on_a_side_stream",
        _FUSED,
        (),
        """
x = torch.ones(2, 2, 8, 16, device="cuda", dtype=torch.float16)
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = F.scaled_dot_product_attention(x, x, x)
cuda.current_stream().wait_stream(s)  #needed
z = y + 1
""",
    ),
    case(
        "attention_whose_backward_is_not_awaited",
        _BACK,
        WAR,
        """
x = torch.ones(2, 2, 8, 16, device="cuda", dtype=torch.float16)
x.requires_grad_()
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = F.scaled_dot_product_attention(x, x, x) * 2
    grad = torch.ones_like(y)
    y.backward(grad)
with torch.no_grad():
    x.zero_()
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
        "recurrent_network_not_awaited",
        _FUSED,
        RAW,
        """
rnn = nn.LSTM(8, 8).cuda()
x = torch.ones(4, 2, 8, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = rnn(x)[0]
z = y + 1
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
    case(
        "recurrent_network_whose_backward_is_not_awaited",
        _BACK,
        WAR,
        """
rnn = nn.LSTM(8, 8).cuda()
x = torch.ones(4, 2, 8, device="cuda")
x.requires_grad_()
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = rnn(x)[0] * 2
    grad = torch.ones_like(y)
    y.backward(grad)
with torch.no_grad():
    rnn.weight_hh_l0.zero_()
""",
    ),
)
