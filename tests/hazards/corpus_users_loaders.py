"""Variations on the documentation's examples, as users write them: buffers and loaders."""

from __future__ import annotations

from hazard_case import HOST, RAW, Case, case

CASES: tuple[Case, ...] = (
    case(
        "two_devices_side_reads",
        "PyTorch notes, CUDA semantics: multi-GPU",
        RAW,
        """
x = torch.ones(64, device="cuda:0").normal_()
y = x.to("cuda:1", non_blocking=True)
t = cuda.Stream(device="cuda:1")
with cuda.stream(t):
    z = y * 2
""",
        2,
    ),
    case(
        "two_devices_event",
        "PyTorch notes, CUDA semantics: multi-GPU",
        (),
        """
x = torch.ones(64, device="cuda:0")
with cuda.stream(s):
    s.wait_stream(cuda.default_stream(0))  #needed
    y = x * 2
    e = s.record_event()
cuda.current_stream(0).wait_event(e)  #needed
z = y.to("cuda:1", non_blocking=True)
w = z + 1
""",
        2,
    ),
    case(
        "checkpointing_offload",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
from torch.utils.checkpoint import checkpoint
m = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
x = torch.ones(4, 8, device="cuda", requires_grad=True)
with torch.autograd.graph.save_on_cpu(pin_memory=True):
    y = m(x)
(y.sum() + checkpoint(m, x, use_reentrant=False).sum()).backward()
""",
    ),
    case(
        "double_buffer_device_side",
        "PyTorch tutorial, pin_memory and non_blocking",
        (),
        """
host = [torch.ones(64).pin_memory() for _ in range(6)]
dst = [torch.empty(64, device="cuda") for _ in range(2)]
done = [cuda.Event() for _ in range(2)]
for i, h in enumerate(host):
    k = i % 2
    with cuda.stream(s):
        if i >= 2:
            s.wait_event(done[k])  #needed
        dst[k].copy_(h, non_blocking=True)
        ready = s.record_event()
    cuda.current_stream().wait_event(ready)  #needed
    y = dst[k] * 2
    done[k].record()  #needed
cuda.synchronize()
""",
    ),
    case(
        "numpy_view_slice_other_half",
        "PyTorch docs, Tensor.numpy",
        (),
        """
h = torch.ones(128).pin_memory()
a = h.numpy()
y = torch.empty(64, device="cuda")
y.copy_(h[:64], non_blocking=True)
a[64:] += 1
""",
    ),
    case(
        "numpy_view_slice_same_half",
        "PyTorch docs, Tensor.numpy",
        HOST,
        """
h = torch.ones(128).pin_memory()
a = h.numpy()[:64]
y = torch.empty(64, device="cuda")
y.copy_(h[:64], non_blocking=True)
a += 1
""",
    ),
    case(
        "np_copyto_pinned",
        "PyTorch notes, CUDA semantics: CUDA streams",
        HOST,
        """
import numpy as np
h = torch.ones(64).pin_memory(); a = h.numpy()
y = h.cuda(non_blocking=True)
np.copyto(a, np.zeros(64, dtype=np.float32))
""",
    ),
)
