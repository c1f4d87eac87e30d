"""The host and pinned memory: copies that are not awaited, NumPy arrays, loaders."""

from __future__ import annotations

from hazard_case import HOST, RAW, UAF, Case, case

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
