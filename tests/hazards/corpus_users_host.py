"""Variations on the documentation's examples, as users write them: pinned memory and the host."""

from __future__ import annotations

from hazard_case import HOST, Case, case

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
)
