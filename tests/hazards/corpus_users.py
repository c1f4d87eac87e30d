"""Variations on the documentation's examples, as users write them: the order of streams, pinned
memory, hooks, memory and views, training and devices, graphs, buffers and loaders.
"""

from __future__ import annotations

from hazard_case import HOST, RAW, UAF, WAR, WAW, Case, case

_READS = {
    "tolist": "h.tolist()",
    "print": "repr(h)",
    "index": "h[0].item()",
    "float": "float(h[3])",
    "asarray": '__import__("numpy").asarray(h).sum()',
    "array": '__import__("numpy").array(h)',
    "numpy": "h.numpy().sum()",
    "save": 'torch.save(h, __import__("io").BytesIO())',
    "clone": "h.clone()",
    "iteration": "[float(v) for v in h]",
    "equal": "torch.equal(h, h)",
    "add": "torch.add(h, 1)",
    "bool": "bool(h[0] > 0)",
    "view": "h[:8].max()",
    "deepcopy": '__import__("copy").deepcopy(h)',
}
_PIN = "PyTorch tutorial, pin_memory and non_blocking"
_COPIED = """
x = torch.ones(64, device="cuda").normal_()
h = x.to("cpu", non_blocking=True)
"""
_AWAITED = _COPIED + "cuda.current_stream().synchronize()  #needed\n"

CASES: tuple[Case, ...] = (
    case(
        "print_then_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda").normal_()
repr(x)
with cuda.stream(s):
    y = x * 2
""",
    ),
    case(
        "nonzero_then_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda").normal_()
n = (x > 0).nonzero()
with cuda.stream(s):
    y = x * 2
    k = n + 1
""",
    ),
    case(
        "mask_then_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda").normal_()
n = x[x > 0]
with cuda.stream(s):
    y = x * 2
""",
    ),
    case(
        "mask_result_read_on_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda").normal_()
n = x[x > 0]
with cuda.stream(s):
    y = n * 2
""",
    ),
    case(
        "out_argument",
        "PyTorch notes, CUDA semantics: CUDA streams",
        WAR,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
torch.add(x, 1, out=x)
""",
    ),
    case(
        "out_on_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda"); z = torch.empty(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    torch.mul(x, 2, out=z)
w = z + 1
""",
    ),
    case(
        "index_from_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    i = torch.argsort(x)
y = x[i]
""",
    ),
    case(
        "thread_uses_default_stream",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
import threading
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
out = []
with cuda.stream(s):
    x.mul_(2)
    th = threading.Thread(target=lambda: out.append(x + 1))
    th.start(); th.join()
""",
    ),
    *(
        case(f"copied_back_read_by_{how}", _PIN, HOST, _COPIED + f"v = {text}")
        for how, text in _READS.items()
    ),
    *(
        case(f"copied_back_awaited_read_by_{how}", _PIN, (), _AWAITED + f"v = {text}")
        for how, text in _READS.items()
    ),
    case(
        "pageable_copy_back_nonblocking",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda").normal_()
h = torch.empty(64)
h.copy_(x, non_blocking=True)
v = h.sum().item()
""",
    ),
    case(
        "pinned_copy_back_then_gpu_wait_only",
        "PyTorch tutorial, pin_memory and non_blocking",
        HOST,
        """
x = torch.ones(64, device="cuda").normal_()
h = torch.empty(64, pin_memory=True)
with cuda.stream(s):
    s.wait_stream(cuda.default_stream())
    h.copy_(x, non_blocking=True)
cuda.current_stream().wait_stream(s)
v = h.sum()
""",
    ),
    case(
        "pageable_source_refilled",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
h = torch.ones(64)
y = h.to("cuda", non_blocking=True)
h.fill_(2)
z = y + 1
""",
    ),
    case(
        "pinned_source_inplace_numpy",
        "PyTorch tutorial, pin_memory and non_blocking",
        HOST,
        """
h = torch.ones(64).pin_memory()
a = h.numpy()
y = h.cuda(non_blocking=True)
a += 1
""",
    ),
    case(
        "from_numpy_alias_of_pinned",
        "PyTorch notes, CUDA semantics: CUDA streams",
        HOST,
        """
h = torch.ones(64).pin_memory()
t = torch.from_numpy(h.numpy())
y = h.cuda(non_blocking=True)
t.add_(1)
""",
    ),
    case(
        "prefetch_side_waits",
        "NVIDIA apex, examples/imagenet: data_prefetcher",
        (),
        """
hosts = [torch.ones(4096).pin_memory() for _ in range(4)]
def prefetch(h):
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        return h.cuda(non_blocking=True)
nxt = prefetch(hosts[0])
for h in hosts[1:]:
    cuda.current_stream().wait_stream(s)  #needed
    cur = nxt
    y = cur * 2
    del cur, nxt
    nxt = prefetch(h)
""",
    ),
    case(
        "graph_pinned_input_refilled",
        "PyTorch notes, CUDA semantics: CUDA graphs",
        HOST,
        """
h = torch.ones(64).pin_memory(); x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
for i in range(2):
    h.fill_(i)
    x.copy_(h, non_blocking=True)
    g.replay()
""",
    ),
    case(
        "two_devices_copy",
        "PyTorch notes, CUDA semantics: multi-GPU",
        (),
        """
x = torch.ones(64, device="cuda:0").normal_()
y = x.to("cuda:1", non_blocking=True)
z = y * 2
""",
        2,
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
    case(
        "graphed_callable",
        "PyTorch notes, CUDA semantics: CUDA graphs",
        (),
        """
m = nn.Linear(8, 8).cuda()
f = cuda.make_graphed_callables(m, (torch.ones(4, 8, device="cuda"),))
for _ in range(2):
    f(torch.ones(4, 8, device="cuda")).sum().backward()
""",
    ),
    case(
        "graph_capture_with_side_stream",
        "PyTorch notes, CUDA semantics: CUDA graphs",
        (),
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    s.wait_stream(cuda.current_stream())
    with cuda.stream(s):
        a = x * 2
    b = x * 3
    cuda.current_stream().wait_stream(s)  #needed
    c = a + b
g.replay()
d = c + 1
""",
    ),
    case(
        "generator_yield_inside",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW + WAW,
        """
def loader(n):
    for i in range(n):
        with cuda.stream(s):
            x = torch.full((64,), float(i), device="cuda")
            yield x
tot = torch.zeros(64, device="cuda")
for x in loader(3):
    tot += x
end = tot + 1
del tot
""",
    ),
    case(
        "pipeline_microbatches",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
t = cuda.Stream()
a = nn.Linear(8, 8).cuda(); b = nn.Linear(8, 8).cuda()
cuda.synchronize()
evs = []
outs = []
for i in range(4):
    with cuda.stream(s):
        h = a(torch.ones(4, 8, device="cuda"))
        h.record_stream(t)
        e = s.record_event()
    t.wait_event(e)  #needed
    with cuda.stream(t):
        outs.append(b(h))
cuda.current_stream().wait_stream(t)  #needed
r = torch.stack(outs).sum()
""",
    ),
    case(
        "lstm_bn_conv_amp",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
m = m.append(nn.LazyLinear(8)).cuda()
l = nn.LSTM(8, 8).cuda(); sc = torch.amp.GradScaler("cuda")
x = torch.randn(2, 3, 8, 8, device="cuda")
with torch.autocast("cuda", dtype=torch.float16):
    h = m(x)
opt = torch.optim.SGD([*m.parameters(), *l.parameters()], lr=0.1)
for _ in range(2):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        o, _ = l(m(x).unsqueeze(0))
        loss = o.float().pow(2).mean()
    sc.scale(loss).backward()
    sc.unscale_(opt)
    nn.utils.clip_grad_norm_(l.parameters(), 1.0)
    sc.step(opt); sc.update()
""",
    ),
    case(
        "autograd_grad_side",
        "PyTorch notes, CUDA semantics: stream semantics of backward passes",
        RAW,
        """
x = torch.ones(64, device="cuda", requires_grad=True)
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = (x * 2).sum()
    (g,) = torch.autograd.grad(y, x)
h = g + 1
""",
    ),
    case(
        "autograd_grad_main_forward_side",
        "PyTorch notes, CUDA semantics: stream semantics of backward passes",
        (),
        """
x = torch.ones(64, device="cuda", requires_grad=True)
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = (x * 2).sum()
cuda.current_stream().wait_stream(s)
(g,) = torch.autograd.grad(y, x)
h = g + 1
""",
    ),
    case(
        "checkpoint_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
from torch.utils.checkpoint import checkpoint
m = nn.Linear(8, 8).cuda(); x = torch.ones(4, 8, device="cuda", requires_grad=True)
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = checkpoint(m, x, use_reentrant=False).sum()
cuda.current_stream().wait_stream(s)
y.backward()
g = x.grad + 1
""",
    ),
    case(
        "compiled_fn",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
f = torch.compile(lambda t: t * 2 + 1, backend="eager")
x = torch.ones(64, device="cuda")
y = f(x)
""",
    ),
    case(
        "inner_slices_3d",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
q = torch.zeros(4, 8, 8, device="cuda"); t = cuda.Stream()
s.wait_stream(cuda.current_stream()); t.wait_stream(cuda.current_stream())
with cuda.stream(s):
    q[:, :4, :4].add_(1)
with cuda.stream(t):
    q[:, :4, 4:].add_(1)
cuda.current_stream().wait_stream(s); cuda.current_stream().wait_stream(t)
r = q.sum()
""",
    ),
    case(
        "interleaved_last_dim",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
q = torch.zeros(4, 8, 8, device="cuda"); t = cuda.Stream()
s.wait_stream(cuda.current_stream()); t.wait_stream(cuda.current_stream())
with cuda.stream(s):
    q[..., ::2].add_(1)
with cuda.stream(t):
    q[..., 1::2].add_(1)
cuda.current_stream().wait_stream(s); cuda.current_stream().wait_stream(t)
r = q.sum()
""",
    ),
    case(
        "wait_stream_reversed",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
s.wait_stream(cuda.current_stream())
z = y + 1
""",
    ),
    case(
        "tolist_of_side_tensor_on_main",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    k = x * 2
v = k.tolist()
""",
    ),
    case(
        "pool_alias_streams",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda")
ss = [cuda.Stream() for _ in range(33)]
ss[0].wait_stream(cuda.current_stream())  #needed
with cuda.stream(ss[0]):
    y = x * 2
with cuda.stream(ss[32]):
    z = y + 1
cuda.synchronize()
""",
    ),
    case(
        "graph_warmup_recipe",
        "PyTorch notes, CUDA semantics: CUDA graphs",
        (),
        """
m = nn.Linear(8, 8).cuda(); x = torch.ones(4, 8, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    for _ in range(3):
        y = m(x)
cuda.current_stream().wait_stream(s)
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = m(x)
x.fill_(2)
g.replay()
z = y + 1
""",
    ),
    case(
        "transposed_alias",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(8, 8, device="cuda")
a = x.t()
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    a[0].add_(1)
y = x * 2
""",
    ),
    case(
        "data_parallel",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
m = nn.DataParallel(nn.Linear(8, 8).cuda(), device_ids=[0, 1])
for _ in range(2):
    m(torch.ones(4, 8, device="cuda")).sum().backward()
""",
        2,
    ),
    case(
        "model_parallel",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
a = nn.Linear(8, 8).to("cuda:0"); b = nn.Linear(8, 8).to("cuda:1")
opt = torch.optim.Adam([*a.parameters(), *b.parameters()])
for _ in range(2):
    opt.zero_grad()
    b(a(torch.ones(4, 8, device="cuda:0")).to("cuda:1")).sum().backward()
    opt.step()
""",
        2,
    ),
    case(
        "resize_grows",
        "PyTorch notes, CUDA semantics: CUDA streams",
        UAF,
        """
x = torch.ones(4096, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
x.resize_(100000)
z = torch.zeros(4096, device="cuda")
""",
    ),
    case(
        "embedding_grad_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
e = nn.Embedding(10, 8).cuda()
e(torch.arange(4, device="cuda")).sum().backward()
with cuda.stream(s):
    n = e.weight.grad.norm()
""",
    ),
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
