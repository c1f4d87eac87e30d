"""Memory that is used again: views, frees, record_stream, resized storages."""

from __future__ import annotations

from hazard_case import RAW, UAF, WAW, Case, case

__all__ = ["CASES"]

_REC = "PyTorch docs, Tensor.record_stream"
_SAN = "PyTorch docs, CUDA stream sanitizer"
_ALLOC = "github.com/pytorch/pytorch/issues/179863"
_OWN = "c10/cuda/CUDACachingAllocator.cpp, recordStream: ignore uses on the allocation stream"

CASES: tuple[Case, ...] = (
    case(
        "offset_view",
        _SAN,
        RAW,
        """
x = torch.zeros(128, device="cuda")
tail = x[64:]
s.wait_stream(cuda.current_stream())
tail.fill_(1)
with cuda.stream(s):
    y = x.sum()
""",
    ),
    case(
        "disjoint_halves",
        _SAN,
        (),
        """
x = torch.zeros(128, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
x[:64].fill_(1)
with cuda.stream(s):
    x[64:].fill_(2)
""",
    ),
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
        "overlapping_columns",
        _SAN,
        WAW,
        """
x = torch.zeros(16, 16, device="cuda")
s.wait_stream(cuda.current_stream())
x[:, :9].add_(1)
with cuda.stream(s):
    x[:, 8:].add_(1)
""",
    ),
    case(
        "set_aliases",
        _SAN,
        RAW,
        """
x = torch.zeros(64, device="cuda")
alias = torch.empty(0, device="cuda").set_(x)
s.wait_stream(cuda.current_stream())
alias.fill_(1)
with cuda.stream(s):
    y = x.sum()
""",
    ),
    case(
        "like_factory",
        _SAN,
        RAW,
        """
x = torch.ones(64, device="cuda")
y = torch.zeros_like(x)
with cuda.stream(s):
    z = y + 1
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
        "dropped_after_record_stream",
        _REC,
        (),
        """
x = torch.ones(100000, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
x.record_stream(s)  #needed
del x
z = torch.zeros(100000, device="cuda")
""",
    ),
    case(
        "dropped_after_wait",
        _REC,
        (),
        """
x = torch.ones(100000, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
cuda.current_stream().wait_stream(s)  #needed
del x
z = torch.zeros(100000, device="cuda")
""",
    ),
    case(
        "dropped_but_another_size",
        _ALLOC,
        (),
        """
x = torch.ones(100000, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
kept = x
del x
z = torch.zeros(100000, device="cuda")
""",
    ),
    case(
        "side_owned_dropped",
        _REC,
        UAF,
        """
with cuda.stream(s):
    y = torch.ones(100000, device="cuda")
cuda.current_stream().wait_stream(s)
z = y * 2
del y
with cuda.stream(s):
    again = torch.zeros(100000, device="cuda")
""",
    ),
    case(
        "side_owned_recorded",
        _REC,
        (),
        """
with cuda.stream(s):
    y = torch.ones(100000, device="cuda")
cuda.current_stream().wait_stream(s)  #needed
z = y * 2
y.record_stream(cuda.current_stream())  #needed
del y
with cuda.stream(s):
    again = torch.zeros(100000, device="cuda")
""",
    ),
    case(
        "three_streams",
        _ALLOC,
        UAF,
        """
third = cuda.Stream()
x = torch.ones(100000, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
third.wait_stream(s)
with cuda.stream(third):
    z = x * 3
cuda.current_stream().wait_stream(s)
del x
w = torch.zeros(100000, device="cuda")
""",
    ),
    case(
        "storage_resized_away",
        "PyTorch FSDP: _free_storage",
        UAF,
        """
x = torch.ones(100000, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
x.untyped_storage().resize_(0)
z = torch.zeros(100000, device="cuda")
""",
    ),
    case(
        "storage_resized_after_wait",
        "PyTorch FSDP: _free_storage",
        (),
        """
x = torch.ones(100000, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
cuda.current_stream().wait_stream(s)  #needed
x.untyped_storage().resize_(0)
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
        "new_zeros_on_side",
        "CUDA sanitizer: false alarm on new_zeros",
        (),
        """
x = torch.ones(64, device="cuda")
with cuda.stream(s):
    y = x.new_zeros(64)
    y.add_(1)
    z = torch.zeros_like(x) + torch.rand_like(x) + x.new_full((64,), 2.0)
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
