"""Variations on the documentation's examples, as users write them: hooks, memory and views."""

from __future__ import annotations

from hazard_case import RAW, UAF, Case, case

CASES: tuple[Case, ...] = (
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
