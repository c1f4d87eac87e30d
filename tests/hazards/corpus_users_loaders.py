"""Variations on the documentation's examples, as users write them: buffers and loaders."""

from __future__ import annotations

from hazard_case import HOST, RAW, UAF, WAR, Case, case

__all__ = ["CASES"]

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
        "two_devices_copy_from_side_stream",
        "PyTorch notes, CUDA semantics: multi-GPU",
        RAW,
        """
x = torch.ones(64, device="cuda:0")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
z = y.to("cuda:1", non_blocking=True)
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
        "swap_out_unwaited",
        "PyTorch docs, saved tensors: save_on_cpu",
        UAF,
        """
x = torch.ones(4096, device="cuda")
h = torch.empty(4096, pin_memory=True)
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    h.copy_(x, non_blocking=True)
del x
y = torch.zeros(4096, device="cuda")
""",
    ),
    case(
        "swap_out_recorded",
        "PyTorch docs, saved tensors: save_on_cpu",
        (),
        """
x = torch.ones(4096, device="cuda")
h = torch.empty(4096, pin_memory=True)
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    h.copy_(x, non_blocking=True)
x.record_stream(s)  #needed
del x
y = torch.zeros(4096, device="cuda")
""",
    ),
    case(
        "swap_in_before_out_done",
        "PyTorch docs, saved tensors: save_on_cpu",
        RAW,
        """
x = torch.ones(4096, device="cuda"); t = cuda.Stream()
h = torch.empty(4096, pin_memory=True)
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    h.copy_(x, non_blocking=True)
with cuda.stream(t):
    y = h.cuda(non_blocking=True)
""",
    ),
    case(
        "loss_logged_async",
        "PyTorch notes, CUDA semantics: CUDA streams",
        HOST,
        """
x = torch.ones(64, device="cuda")
logs = torch.zeros(3, pin_memory=True)
for i in range(3):
    logs[i].copy_((x * i).sum(), non_blocking=True)
total = logs.sum()
""",
    ),
    case(
        "loss_logged_async_synced",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda")
logs = torch.zeros(3, pin_memory=True)
for i in range(3):
    logs[i].copy_((x * i).sum(), non_blocking=True)
cuda.current_stream().synchronize()  #needed
total = logs.sum()
""",
    ),
    case(
        "lazy_host_tensor_to_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
h = torch.ones(64).pin_memory()
with cuda.stream(s):
    x = h.to("cuda", non_blocking=True)
y = x + 1
""",
    ),
    case(
        "pageable_nonblocking_h2d_on_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
h = torch.ones(64)
with cuda.stream(s):
    x = h.to("cuda", non_blocking=True)
y = x + 1
""",
    ),
    case(
        "dataloader_pinned",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
from torch.utils.data import DataLoader, TensorDataset
dl = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=8, pin_memory=True)
m = nn.Linear(8, 8).cuda(); opt = torch.optim.Adam(m.parameters())
for (x,) in dl:
    x = x.cuda(non_blocking=True)
    opt.zero_grad(); m(x).sum().backward(); opt.step()
""",
    ),
    case(
        "double_buffer_events",
        "PyTorch tutorial, pin_memory and non_blocking",
        (),
        """
bufs = [torch.empty(64).pin_memory() for _ in range(2)]
evs = [cuda.Event() for _ in range(2)]
dst = [torch.empty(64, device="cuda") for _ in range(2)]
for i in range(6):
    k = i % 2
    if i >= 2:
        evs[k].synchronize()  #needed
    bufs[k].fill_(i)
    dst[k].copy_(bufs[k], non_blocking=True)
    evs[k].record()  #needed
""",
    ),
    case(
        "double_buffer_wrong_event",
        "PyTorch tutorial, pin_memory and non_blocking",
        HOST,
        """
bufs = [torch.empty(64).pin_memory() for _ in range(2)]
evs = [cuda.Event() for _ in range(2)]
dst = [torch.empty(64, device="cuda") for _ in range(2)]
for i in range(6):
    k = i % 2
    if i >= 2:
        evs[k].synchronize()
    bufs[k].fill_(i)
    evs[k].record()
    dst[k].copy_(bufs[k], non_blocking=True)
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
        "double_buffer_device_side_bug",
        "PyTorch tutorial, pin_memory and non_blocking",
        WAR,
        """
host = [torch.ones(64).pin_memory() for _ in range(6)]
dst = [torch.empty(64, device="cuda") for _ in range(2)]
for i, h in enumerate(host):
    k = i % 2
    with cuda.stream(s):
        dst[k].copy_(h, non_blocking=True)
        ready = s.record_event()
    cuda.current_stream().wait_event(ready)
    y = dst[k] * 2
""",
    ),
    case(
        "copy_same_device_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.randn(64, device="cuda"); y = torch.empty(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y.copy_(x, non_blocking=True)
z = y + 1
""",
    ),
    case(
        "h2d_in_thread_event",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
import threading
h = torch.ones(64).pin_memory(); box = {}
def work():
    with cuda.stream(s):
        box["x"] = h.cuda(non_blocking=True)
        box["e"] = s.record_event()
th = threading.Thread(target=work); th.start(); th.join()
cuda.current_stream().wait_event(box["e"])  #needed
y = box["x"] + 1
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
    case(
        "pin_memory_each_time",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
for i in range(3):
    h = torch.full((64,), float(i)).pin_memory()
    y = h.cuda(non_blocking=True)
    z = y + 1
""",
    ),
    case(
        "host_tensor_inplace_after_blocking_copy",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
h = torch.ones(64).pin_memory()
for i in range(3):
    y = h.to("cuda")
    h.add_(1)
""",
    ),
    case(
        "save_on_cpu_manual",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(4096, device="cuda")
h = torch.empty(4096, pin_memory=True)
with cuda.stream(s):
    h.copy_(x, non_blocking=True)
""",
    ),
)
