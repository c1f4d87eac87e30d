"""The host and pinned memory: copies that are not awaited, NumPy arrays, loaders."""

from __future__ import annotations

from hazard_case import HOST, RAW, UAF, Case, case

__all__ = ["CASES"]

_PIN = "PyTorch tutorial, pin_memory and non_blocking"
_LOADER = "NVIDIA apex, examples/imagenet: data_prefetcher"

CASES: tuple[Case, ...] = (
    case(
        "copy_back_not_awaited",
        _PIN,
        HOST,
        """
x = torch.ones(64, device="cuda")
h = x.to("cpu", non_blocking=True)
total = h.sum()
""",
    ),
    case(
        "copy_back_awaited",
        _PIN,
        (),
        """
x = torch.ones(64, device="cuda")
h = x.to("cpu", non_blocking=True)
cuda.current_stream().synchronize()  #needed
total = h.sum()
""",
    ),
    case(
        "copy_back_into_pinned",
        _PIN,
        HOST,
        """
x = torch.ones(64, device="cuda")
h = torch.empty(64, pin_memory=True)
h.copy_(x, non_blocking=True)
values = h.tolist()
""",
    ),
    case(
        "copy_back_event",
        _PIN,
        (),
        """
x = torch.ones(64, device="cuda")
h = torch.empty(64, pin_memory=True)
h.copy_(x, non_blocking=True)
e = cuda.Event()
e.record()  #needed
e.synchronize()  #needed
values = h.tolist()
""",
    ),
    case(
        "copy_back_event_too_early",
        _PIN,
        HOST,
        """
x = torch.ones(64, device="cuda")
h = torch.empty(64, pin_memory=True)
e = cuda.Event()
e.record()
h.copy_(x, non_blocking=True)
e.synchronize()
values = h.tolist()
""",
    ),
    case(
        "blocking_copy_back",
        _PIN,
        (),
        """
x = torch.ones(64, device="cuda")
h = x.to("cpu")
total = h.sum()
""",
    ),
    case(
        "refilled_too_early",
        _PIN,
        HOST,
        """
h = torch.ones(64).pin_memory()
x = h.to("cuda", non_blocking=True)
h.fill_(2)
""",
    ),
    case(
        "refilled_after_event",
        _PIN,
        (),
        """
h = torch.ones(64).pin_memory()
x = h.to("cuda", non_blocking=True)
e = cuda.Event()
e.record()  #needed
e.synchronize()  #needed
h.fill_(2)
""",
    ),
    case(
        "two_slots_without_events",
        _PIN,
        HOST,
        """
slots = [torch.empty(64, pin_memory=True) for _ in range(2)]
for step in range(4):
    slots[step % 2].fill_(step)
    x = slots[step % 2].to("cuda", non_blocking=True)
""",
    ),
    case(
        "two_slots_with_events",
        _PIN,
        (),
        """
slots = [torch.empty(64, pin_memory=True) for _ in range(2)]
events = [cuda.Event() for _ in range(2)]
for step in range(4):
    events[step % 2].synchronize()  #needed
    slots[step % 2].fill_(step)
    x = slots[step % 2].to("cuda", non_blocking=True)
    events[step % 2].record()  #needed
""",
    ),
    case(
        "numpy_alias_written",
        _PIN,
        HOST,
        """
h = torch.ones(64).pin_memory()
array = h.numpy()
x = h.to("cuda", non_blocking=True)
array[:] = 3
""",
    ),
    case(
        "numpy_alias_read",
        _PIN,
        HOST,
        """
x = torch.ones(64, device="cuda")
h = torch.empty(64, pin_memory=True)
array = h.numpy()
h.copy_(x, non_blocking=True)
total = array.sum()
""",
    ),
    case(
        "numpy_alias_awaited",
        _PIN,
        (),
        """
x = torch.ones(64, device="cuda")
h = torch.empty(64, pin_memory=True)
array = h.numpy()
h.copy_(x, non_blocking=True)
cuda.synchronize()  #needed
total = array.sum()
""",
    ),
    case(
        "prefetching_loader",
        _LOADER,
        (),
        """
source = [torch.ones(64).pin_memory() for _ in range(3)]
def prefetch(host):
    with cuda.stream(s):
        return host.to("cuda", non_blocking=True)
following = prefetch(source[0])
for host in [*source[1:], None]:
    cuda.current_stream().wait_stream(s)  #needed
    batch = following
    batch.record_stream(cuda.current_stream())
    if host is not None:
        following = prefetch(host)
    y = batch * 2
""",
    ),
    case(
        "prefetching_without_wait",
        _LOADER,
        (*RAW, *UAF),
        """
source = [torch.ones(64).pin_memory() for _ in range(3)]
for host in source:
    with cuda.stream(s):
        batch = host.to("cuda", non_blocking=True)
    y = batch * 2
""",
    ),
    case(
        "registered_host_memory_refilled_in_flight",
        "CUDA runtime API, cudaHostRegister",
        HOST,
        """
import numpy
memory = numpy.zeros(64, dtype=numpy.float32)
source = torch.from_numpy(memory)
assert int(cuda.cudart().cudaHostRegister(source.data_ptr(), source.nbytes, 0)) == 0
x = torch.zeros(64, device="cuda")
x.copy_(source, non_blocking=True)
torch.from_numpy(memory[32:]).zero_()
cuda.cudart().cudaHostUnregister(source.data_ptr())
""",
    ),
    case(
        "registered_host_memory_read_too_early",
        "CUDA runtime API, cudaHostRegister",
        HOST,
        """
target = torch.zeros(64)
assert int(cuda.cudart().cudaHostRegister(target.data_ptr(), target.nbytes, 0)) == 0
target.copy_(torch.ones(64, device="cuda"), non_blocking=True)
total = target.numpy()[:8].sum()
cuda.cudart().cudaHostUnregister(target.data_ptr())
""",
    ),
    case(
        "registered_host_memory_used_in_order",
        "CUDA runtime API, cudaHostRegister",
        (),
        """
import numpy
memory = numpy.zeros(64, dtype=numpy.float32)
halves = torch.from_numpy(memory[:32]), torch.from_numpy(memory[32:])
address = halves[0].data_ptr()
assert int(cuda.cudart().cudaHostRegister(address, memory.nbytes, 0)) == 0
x = torch.zeros(32, device="cuda")
x.copy_(halves[0], non_blocking=True)
halves[1].fill_(1)
cuda.current_stream().synchronize()  #needed
torch.from_numpy(memory).fill_(2)
assert int(cuda.cudart().cudaHostUnregister(address)) == 0
halves[1].copy_(x, non_blocking=True)
total = halves[1].sum()
""",
    ),
)
