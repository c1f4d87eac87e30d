"""Memory that is used again: views, frees, record_stream, resized storages."""

from __future__ import annotations

from hazard_case import UAF, Case, case

_REC = "PyTorch docs, Tensor.record_stream"
_SAN = "PyTorch docs, CUDA stream sanitizer"
_OWN = "c10/cuda/CUDACachingAllocator.cpp, recordStream: ignore uses on the allocation stream"

CASES: tuple[Case, ...] = (
    case(
        "disjoint_columns",
        _SAN,
        (),
        """
x = torch.zeros(16, 16, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
x[:, :8].add_(1)
with cuda.stream(s):
    x[:, 8:].add_(1)
""",
    ),
    case(
        "dropped_while_read",
        _REC,
        UAF,
        """
x = torch.ones(100000, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
del x
z = torch.zeros(100000, device="cuda")
""",
    ),
    case(
        "empty_tensor",
        "CUDA sanitizer: zero-element tensors",
        (),
        """
x = torch.ones(0, device="cuda")
with cuda.stream(s):
    y = x * 2
""",
    ),
    case(
        "record_stream_of_its_own_stream_is_ignored",
        _OWN,
        UAF,
        """
with cuda.stream(s):
    x = torch.ones(1024, device="cuda")
    y = x * 2
    x.record_stream(s)
    del x
    z = torch.empty(1024, device="cuda")
z.fill_(1)
""",
    ),
    case(
        "the_new_tensor_waits_for_its_own_stream",
        _OWN,
        (),
        """
with cuda.stream(s):
    x = torch.ones(1024, device="cuda")
    y = x * 2
    del x
    z = torch.empty(1024, device="cuda")
cuda.current_stream().wait_stream(s)  #needed
z.fill_(1)
""",
    ),
)
