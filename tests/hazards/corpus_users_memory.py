"""Variations on the documentation's examples, as users write them: hooks, memory and views."""

from __future__ import annotations

from hazard_case import RAW, UAF, Case, case

__all__ = ["CASES"]

CASES: tuple[Case, ...] = (
    case(
        "custom_function_not_joined",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        s.wait_stream(cuda.current_stream())
        with cuda.stream(s):
            y = x * 2
        return y
    @staticmethod
    def backward(ctx, g):
        return g * 2
x = torch.ones(64, device="cuda", requires_grad=True)
y = Fn.apply(x)
z = y.sum()
""",
    ),
    case(
        "custom_function_joined",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        s.wait_stream(cuda.current_stream())  #needed
        with cuda.stream(s):
            y = x * 2
        cuda.current_stream().wait_stream(s)  #needed
        return y
    @staticmethod
    def backward(ctx, g):
        return g * 2
x = torch.ones(64, device="cuda", requires_grad=True)
y = Fn.apply(x)
z = y.sum()
z.backward()
""",
    ),
    case(
        "grad_hook_comm_unwaited",
        "PyTorch notes, CUDA semantics: stream semantics of backward passes",
        RAW,
        """
comm = cuda.Stream()
p = torch.ones(64, device="cuda", requires_grad=True)
out = []
def hook(q):
    with cuda.stream(comm):
        out.append(q.grad * 0.5)
p.register_post_accumulate_grad_hook(hook)
(p * 2).sum().backward()
""",
    ),
    case(
        "grad_hook_comm_waits",
        "PyTorch notes, CUDA semantics: stream semantics of backward passes",
        (),
        """
comm = cuda.Stream()
p = torch.ones(64, device="cuda", requires_grad=True)
def hook(q):
    comm.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(comm):
        q.grad.mul_(0.5)
p.register_post_accumulate_grad_hook(hook)
(p * 2).sum().backward()
cuda.current_stream().wait_stream(comm)  #needed
with torch.no_grad():
    p.sub_(p.grad)
""",
    ),
    case(
        "step_before_comm_done",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
comm = cuda.Stream()
p = torch.ones(64, device="cuda", requires_grad=True)
def hook(q):
    comm.wait_stream(cuda.current_stream())
    with cuda.stream(comm):
        q.grad.mul_(0.5)
p.register_post_accumulate_grad_hook(hook)
opt = torch.optim.SGD([p], lr=0.1)
(p * 2).sum().backward()
opt.step()
""",
    ),
    case(
        "zero_grad_frees_what_comm_reads",
        "PyTorch notes, CUDA semantics: CUDA streams",
        UAF,
        """
comm = cuda.Stream()
p = torch.ones(4096, device="cuda", requires_grad=True)
(p * 2).sum().backward()
comm.wait_stream(cuda.current_stream())
with cuda.stream(comm):
    norm = p.grad.norm()
p.grad = None
(p * 3).sum().backward()
""",
    ),
    case(
        "data_swapped",
        "PyTorch notes, CUDA semantics: CUDA streams",
        UAF,
        """
x = torch.ones(4096, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
x.data = torch.zeros(8192, device="cuda")
z = torch.zeros(4096, device="cuda")
""",
    ),
    case(
        "empty_cache_in_between",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(1 << 22, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
del x
cuda.empty_cache()
z = torch.zeros(1 << 22, device="cuda")
""",
    ),
    case(
        "reused_part_was_not_read",
        "PyTorch docs, Tensor.record_stream",
        (),
        """
x = torch.ones(1 << 18, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x[1 << 17:] * 2
del x
z = torch.zeros(1 << 10, device="cuda")
""",
    ),
    case(
        "reused_part_was_read",
        "PyTorch docs, Tensor.record_stream",
        UAF,
        """
x = torch.ones(1 << 18, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x[: 1 << 10] * 2
del x
z = torch.zeros(1 << 18, device="cuda")
""",
    ),
    case(
        "dropped_not_reused",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(4096, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
del x
""",
    ),
    case(
        "reused_but_never_touched",
        "PyTorch docs, Tensor.record_stream",
        (),
        """
x = torch.ones(4096, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
del x
z = torch.empty(4096, device="cuda")
""",
    ),
    case(
        "reused_and_touched_after_wait",
        "PyTorch docs, Tensor.record_stream",
        (),
        """
x = torch.ones(4096, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
del x
z = torch.empty(4096, device="cuda")
cuda.current_stream().wait_stream(s)  #needed
z.zero_()
""",
    ),
    case(
        "record_stream_on_view",
        "PyTorch docs, Tensor.record_stream",
        (),
        """
x = torch.ones(4096, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
v = x[:16]
with cuda.stream(s):
    y = v * 2
v.record_stream(s)  #needed
del x, v
z = torch.zeros(4096, device="cuda")
""",
    ),
    case(
        "record_stream_for_another_stream",
        "PyTorch docs, Tensor.record_stream",
        UAF,
        """
x = torch.ones(4096, device="cuda")
t = cuda.Stream()
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
x.record_stream(t)
del x
z = torch.zeros(4096, device="cuda")
""",
    ),
    case(
        "stream_none",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda")
with cuda.stream(None):
    y = x * 2
z = y + 1
""",
    ),
    case(
        "nested_streams",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda"); t = cuda.Stream()
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
    with cuda.stream(t):
        z = y + 1
""",
    ),
    case(
        "nested_streams_waiting",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda"); t = cuda.Stream()
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
    t.wait_stream(s)  #needed
    with cuda.stream(t):
        z = y + 1
    s.wait_stream(t)  #needed
    w = z + y
""",
    ),
    case(
        "record_event_helpers",
        "PyTorch docs, Tensor.record_stream",
        (),
        """
x = torch.ones(64, device="cuda")
e = cuda.current_stream().record_event()
s.wait_event(e)  #needed
with cuda.stream(s):
    y = x * 2
    f = s.record_event()
f.wait()  #needed
z = y + 1
""",
    ),
    case(
        "event_wait_on_wrong_stream",
        "CUDA programming guide: events",
        RAW,
        """
x = torch.ones(64, device="cuda"); t = cuda.Stream()
e = cuda.current_stream().record_event()
e.wait(t)
with cuda.stream(s):
    y = x * 2
""",
    ),
    case(
        "torch_stream_api",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda")
g = torch.Stream(device="cuda"); e = torch.Event(device="cuda")
e.record(torch.cuda.current_stream())  #needed
g.wait_event(e)  #needed
like = {"device_index": g.device_index, "device_type": g.device_type}
with cuda.stream(cuda.Stream(stream_id=g.stream_id, **like)):
    y = x * 2
cuda.current_stream().wait_stream(g)  #needed
z = y + 1
""",
    ),
    case(
        "torch_stream_api_missing",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
g = torch.Stream(device="cuda")
with g:
    y = x * 2
""",
    ),
)
