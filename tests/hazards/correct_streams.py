"""Correct programs of several streams: torch's tests, loaders, graphs, offloading, caches."""

from __future__ import annotations

from hazard_case import Case, case

_TESTS = "PyTorch, test/test_cuda.py"


def _case(name: str, source: str, text: str, gpus: int = 1) -> Case:
    return case(name, source, (), text, gpus)


CASES: tuple[Case, ...] = (
    _case(
        "events_chain_streams",
        f"{_TESTS}: test_events_wait",
        """
a, b = cuda.current_stream(), cuda.Stream()
x = torch.ones(64, device="cuda")
with cuda.stream(b):
    y = torch.zeros(64, device="cuda")
e0 = a.record_event()
b.wait_event(e0)
with cuda.stream(b):
    y.add_(x)
e1 = b.record_event()
e1.synchronize()
z = y + x
""",
    ),
    _case(
        "stream_context_entered_twice",
        f"{_TESTS}: test_stream_context",
        """
t = cuda.Stream()
with s:
    x = torch.ones(64, device="cuda")
    with t:
        t.wait_stream(s)
        y = x * 2
    s.wait_stream(t)
    z = y + x
cuda.synchronize()
""",
    ),
    _case(
        "record_stream_keeps_the_block",
        f"{_TESTS}: test_record_stream",
        """
t = torch.tensor([1.0, 2, 3, 4]).pin_memory()
result = torch.zeros(4, device="cuda")
stream = cuda.Stream()
stream.wait_stream(cuda.current_stream())
def copy():
    with cuda.stream(stream):
        tmp = t.cuda(non_blocking=True)
    cuda.current_stream().wait_stream(stream)
    tmp.record_stream(cuda.current_stream())
    result.copy_(tmp)
copy()
with cuda.stream(stream):
    tmp2 = torch.zeros(4, device="cuda")
cuda.current_stream().synchronize()
r = result.tolist()
""",
    ),
    _case(
        "pinned_source_freed_while_copied",
        f"{_TESTS}: test_caching_pinned_memory",
        """
for step in range(3):
    x = torch.full((64,), float(step)).pin_memory().cuda(non_blocking=True)
    y = x + 1
""",
    ),
    _case(
        "copies_between_devices",
        f"{_TESTS}: test_copy_streams",
        """
d0, d1 = torch.device("cuda:0"), torch.device("cuda:1")
x0 = torch.zeros(5, 5, device=d0)
s0 = cuda.current_stream(d0)
s2 = cuda.current_stream(d1)
with cuda.stream(s0):
    x1 = x0.to(d1)
with cuda.stream(s2):
    y = x1 + 1
""",
        2,
    ),
    _case(
        "query_until_it_is_done",
        f"{_TESTS}: test_stream_event_repr, test_streams",
        """
with cuda.stream(s):
    x = torch.ones(64, device="cuda")
    done = s.record_event()
while not done.query():
    pass
y = x + 1
""",
    ),
    _case(
        "fork_and_join_many",
        f"{_TESTS}: test_streams",
        """
main = cuda.current_stream()
streams = [cuda.Stream() for _ in range(4)]
x = torch.ones(4, 64, device="cuda")
parts = []
for stream, row in zip(streams, x):
    stream.wait_stream(main)
    with cuda.stream(stream):
        parts.append(row * 2)
for stream in streams:
    main.wait_stream(stream)
y = torch.stack(parts)
""",
    ),
    _case(
        "thread_with_a_stream_of_its_own",
        f"{_TESTS}: test_cuda_device_memory_allocated, streams are per thread",
        """
import threading
out = {}
ready = cuda.current_stream().record_event()
def work(stream):
    with cuda.stream(stream):
        stream.wait_event(ready)
        out["x"] = torch.ones(64, device="cuda") * 2
        out["done"] = stream.record_event()
thread = threading.Thread(target=work, args=(s,))
thread.start()
thread.join()
cuda.current_stream().wait_event(out["done"])
y = out["x"] + 1
""",
    ),
    _case(
        "prefetcher_of_apex_recording_the_stream",
        "NVIDIA apex: examples/imagenet/main_amp.py",
        """
class Prefetcher:
    def __init__(self, loader):
        self.loader, self.stream = iter(loader), cuda.Stream()
        self.preload()
    def preload(self):
        self.following = next(self.loader, None)
        if self.following is None:
            return
        with cuda.stream(self.stream):
            self.following = self.following.cuda(non_blocking=True)
    def next(self):
        cuda.current_stream().wait_stream(self.stream)
        batch = self.following
        if batch is not None:
            batch.record_stream(cuda.current_stream())
        self.preload()
        return batch
prefetcher = Prefetcher([torch.ones(64).pin_memory() for _ in range(4)])
total = torch.zeros(64, device="cuda")
while (batch := prefetcher.next()) is not None:
    total += batch
""",
    ),
    _case(
        "prefetcher_of_timm_waiting_for_the_consumer",
        "https://github.com/huggingface/pytorch-image-models/pull/2784",
        """
def loader(batches, stream):
    first, images = True, None
    for batch in batches:
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            following = batch.to("cuda", non_blocking=True).float().sub_(0.5)
        if not first:
            yield images
        else:
            first = False
        cuda.current_stream().wait_stream(stream)
        images = following
    yield images
total = torch.zeros(64, device="cuda")
for images in loader([torch.ones(64).pin_memory() for _ in range(4)], s):
    total += images
""",
    ),
    _case(
        "batches_in_flight_with_an_event_per_slot",
        "spdl, vLLM: staging buffers",
        """
slots = [torch.empty(64, pin_memory=True) for _ in range(2)]
events = [cuda.Event() for _ in range(2)]
total = torch.zeros(64, device="cuda")
for step in range(5):
    at = step % 2
    events[at].synchronize()
    slots[at].fill_(step)
    with cuda.stream(s):
        batch = slots[at].to("cuda", non_blocking=True)
        events[at].record()
    cuda.current_stream().wait_event(events[at])
    batch.record_stream(cuda.current_stream())
    total += batch
""",
    ),
    _case(
        "async_output_read_after_its_event",
        "https://github.com/vllm-project/vllm/issues/36942",
        """
copies = cuda.Stream()
def launch(x):
    copies.wait_stream(cuda.current_stream())
    with cuda.stream(copies):
        host = x.to("cpu", non_blocking=True)
        done = copies.record_event()
    x.record_stream(copies)
    return host, done
pending = [launch(torch.full((8,), float(i), device="cuda")) for i in range(3)]
for host, done in pending:
    done.synchronize()
    host.tolist()
""",
    ),
    _case(
        "numpy_view_after_its_event",
        "vLLM, SGLang: host views of outputs",
        """
host = torch.empty(8, pin_memory=True)
array = host.numpy()
for step in range(3):
    host.copy_(torch.full((8,), float(step), device="cuda"), non_blocking=True)
    cuda.current_stream().record_event().synchronize()
    assert array.sum() == 8 * step
    array[:] = 0
""",
    ),
    _case(
        "overlapped_scheduler_waiting_both_ways",
        "https://github.com/sgl-project/sglang/pull/26380",
        """
schedule, forward = cuda.current_stream(), cuda.Stream()
rows = torch.zeros(8, 32, dtype=torch.int64, device="cuda")
results = []
for step in range(3):
    schedule.wait_stream(forward)
    rows[step].fill_(step)
    forward.wait_stream(schedule)
    with cuda.stream(forward):
        out = rows.sum(1)
        copied = out.to("cpu", non_blocking=True)
        done = forward.record_event()
    results.append((copied, done))
for copied, done in results:
    done.synchronize()
    copied.tolist()
""",
    ),
    _case(
        "paged_cache_of_disjoint_slots",
        "vLLM, SGLang: reshape_and_cache on slots of their own",
        """
kv = torch.zeros(16, 4, 8, device="cuda")
mine = torch.tensor([1, 5, 9], device="cuda")
yours = torch.tensor([2, 6, 10], device="cuda")
new = torch.ones(3, 4, 8, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    kv[yours] = new
kv[mine] = new * 2
cuda.current_stream().wait_stream(s)
total = kv.sum()
""",
    ),
    _case(
        "paged_cache_read_by_block_table",
        "vLLM: paged attention of one request while another is stored",
        """
cache = torch.zeros(8, 16, 4, device="cuda")
table = torch.tensor([0, 3, 5], device="cuda")
block = torch.tensor([6], device="cuda")
offset = torch.tensor([2], device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    cache[block, offset] = torch.ones(1, 4, device="cuda")
attended = cache[table].sum()
cuda.current_stream().wait_stream(s)
""",
    ),
    _case(
        "rows_copied_in_and_selected",
        "SGLang: req_to_token pool",
        """
pool = torch.zeros(8, 32, device="cuda")
a, b = torch.tensor([1, 2], device="cuda"), torch.tensor([4, 7], device="cuda")
fresh = torch.ones(2, 32, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    pool.index_copy_(0, a, fresh)
    mine = pool.index_select(0, a)
others = pool.index_select(0, b)
pool.index_copy_(0, b, others + 1)
cuda.current_stream().wait_stream(s)
""",
    ),
    _case(
        "swap_of_blocks_ordered_by_events",
        "https://github.com/NVIDIA/TensorRT-LLM/pull/9056",
        """
offload, onboard = cuda.Stream(), cuda.Stream()
gpu, host = torch.ones(4, 64, device="cuda"), torch.empty(4, 64, pin_memory=True)
offload.wait_stream(cuda.current_stream())
with cuda.stream(offload):
    host[1].copy_(gpu[1], non_blocking=True)
    read = offload.record_event()
onboard.wait_event(read)
with cuda.stream(onboard):
    gpu[1].copy_(host[1], non_blocking=True)
cuda.current_stream().wait_stream(onboard)
total = gpu.sum()
""",
    ),
    _case(
        "strided_pinned_rows_copied_to_the_device",
        "PyTorch, aten/src/ATen/native/cuda/Copy.cu: copy_requires_temporaries",
        """
page = torch.ones(64, 64, pin_memory=True)
out = torch.empty(64, 8, device="cuda")
for step in range(3):
    page.fill_(step)
    out.copy_(page[:, :8], non_blocking=True)
    page[:, :8].fill_(7)
""",
    ),
    _case(
        "expanded_pinned_row_copied_to_the_device",
        "PyTorch, aten/src/ATen/native/cuda/Copy.cu: copy_requires_temporaries",
        """
row = torch.ones(1, 8, pin_memory=True)
out = torch.empty(64, 8, device="cuda")
out.copy_(row.expand(64, 8), non_blocking=True)
row.fill_(3)
""",
    ),
    _case(
        "strided_pinned_target_of_a_copy",
        "PyTorch, aten/src/ATen/native/cuda/Copy.cu: copy_requires_temporaries",
        """
page = torch.zeros(64, 64, pin_memory=True)
page[:, :8].copy_(torch.ones(64, 8, device="cuda"), non_blocking=True)
assert page.sum() == 512
""",
    ),
    _case(
        "offloaded_weights_of_diffusers",
        "https://github.com/huggingface/diffusers/pull/13502",
        """
stream = cuda.Stream()
layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
host = {p: p.data.pin_memory() for layer in layers for p in layer.parameters()}
x = torch.ones(2, 8, device="cuda")
with torch.no_grad():
    for layer in layers:
        main = cuda.current_stream()
        with cuda.stream(stream):
            for p in layer.parameters():
                p.data = host[p].to("cuda", non_blocking=True)
                p.data.record_stream(main)
        main.wait_stream(stream)
        x = layer(x)
        for p in layer.parameters():
            p.data = host[p]
""",
    ),
    _case(
        "offloaded_optimizer_with_streams",
        "torchao: CPUOffloadOptimizer",
        """
p = torch.ones(64, device="cuda", requires_grad=True)
master = p.detach().cpu().pin_memory()
opt = torch.optim.SGD([master], 0.1)
stream = cuda.Stream()
for _ in range(2):
    (p * 2).sum().backward()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        grad = torch.empty(64, pin_memory=True)
        grad.copy_(p.grad, non_blocking=True)
        done = stream.record_event()
    p.grad.record_stream(stream)
    p.grad = None
    done.synchronize()
    master.grad = grad
    opt.step()
    with torch.no_grad(), cuda.stream(stream):
        p.copy_(master, non_blocking=True)
    cuda.current_stream().wait_stream(stream)
    stream.synchronize()
""",
    ),
    _case(
        "moving_average_kept_on_a_side_stream",
        "users: EMA beside training",
        """
p, ema = torch.ones(64, device="cuda"), torch.ones(64, device="cuda")
for _ in range(3):
    s.wait_stream(cuda.current_stream())
    with cuda.stream(s):
        ema.lerp_(p, 0.1)
    cuda.current_stream().wait_stream(s)
    p.mul_(0.9)
""",
    ),
    _case(
        "graph_warmed_up_on_a_side_stream",
        "PyTorch notes, CUDA semantics: CUDA graphs",
        """
m = nn.Linear(8, 8).cuda()
static = torch.ones(4, 8, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s), torch.no_grad():
    for _ in range(3):
        m(static)
cuda.current_stream().wait_stream(s)
g = cuda.CUDAGraph()
with torch.no_grad(), cuda.graph(g):
    out = m(static)
for step in range(3):
    static.fill_(step)
    g.replay()
    y = out + 1
""",
    ),
    _case(
        "whole_training_step_captured",
        "PyTorch notes, CUDA semantics: whole-network capture",
        """
m = nn.Linear(8, 4).cuda()
opt = torch.optim.SGD(m.parameters(), 0.1)
x = torch.ones(4, 8, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    for _ in range(2):
        opt.zero_grad(set_to_none=True)
        m(x).sum().backward()
        opt.step()
cuda.current_stream().wait_stream(s)
g = cuda.CUDAGraph()
opt.zero_grad(set_to_none=True)
with cuda.graph(g):
    loss = m(x).sum()
    loss.backward()
    opt.step()
for step in range(2):
    x.fill_(step)
    g.replay()
""",
    ),
    _case(
        "graph_replayed_on_a_side_stream_and_joined",
        "PyTorch notes, CUDA semantics: CUDA graphs",
        """
static = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    out = static * 2
for step in range(3):
    static.fill_(step)
    s.wait_stream(cuda.current_stream())
    with cuda.stream(s):
        g.replay()
    cuda.current_stream().wait_stream(s)
    y = out + 1
""",
    ),
    _case(
        "branches_forked_and_joined_in_a_capture",
        "PyTorch notes, CUDA semantics: usage with multiple streams",
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    main = cuda.current_stream()
    s.wait_stream(main)
    with cuda.stream(s):
        a = x * 2
    b = x * 3
    main.wait_stream(s)
    c = a + b
g.replay()
d = c + 1
""",
    ),
    _case(
        "shared_expert_beside_the_routed_ones",
        "https://github.com/NVIDIA/TensorRT-LLM/pull/13220",
        """
main, aux = cuda.current_stream(), cuda.Stream()
for _ in range(2):
    x = torch.ones(8, 64, device="cuda")
    x.record_stream(aux)
    aux.wait_stream(main)
    with cuda.stream(aux):
        shared = x * 2
    routed = x * 3
    main.wait_stream(aux)
    shared.record_stream(main)
    out = routed + shared
    del x, shared
""",
    ),
    _case(
        "chunks_on_two_streams_by_turns",
        "PyTorch forums: overlapping copies and kernels",
        """
main, streams = cuda.current_stream(), [cuda.Stream(), cuda.Stream()]
source = torch.ones(4, 64).pin_memory()
out = torch.zeros(4, 64, device="cuda")
for stream in streams:
    stream.wait_stream(main)
for at in range(4):
    with cuda.stream(streams[at % 2]):
        chunk = source[at].to("cuda", non_blocking=True)
        out[at].copy_(chunk * 2)
for stream in streams:
    main.wait_stream(stream)
total = out.sum()
""",
    ),
    _case(
        "checkpoint_staged_before_the_next_step",
        "PyTorch, torch.distributed.checkpoint: asynchronous staging",
        """
p = torch.ones(64, device="cuda")
host = torch.empty(64, pin_memory=True)
staging = cuda.Stream()
for step in range(2):
    staging.wait_stream(cuda.current_stream())
    with cuda.stream(staging):
        host.copy_(p, non_blocking=True)
        staged = staging.record_event()
    y = p * 2
    cuda.current_stream().wait_event(staged)
    p.add_(1)
    staged.synchronize()
    saved = host.clone()
""",
    ),
    _case(
        "waited_for_before_the_block_is_taken_again",
        "https://github.com/meta-pytorch/torchrec/issues/4034",
        """
main = cuda.current_stream()
a = torch.rand(1024, device="cuda")
s.wait_stream(main)
with cuda.stream(s):
    kept = a.sum()
del a
main.wait_stream(s)
b = torch.rand(1024, device="cuda")
c = kept + b
""",
    ),
    _case(
        "reference_kept_until_the_other_stream_is_done",
        "https://github.com/pytorch/pytorch/pull/180665",
        """
main, comm = cuda.current_stream(), cuda.Stream()
keep = None
total = torch.zeros(64, device="cuda")
comm.wait_stream(main)
for step in range(4):
    grad = torch.full((64,), float(step), device="cuda")
    comm.wait_stream(main)
    with cuda.stream(comm):
        total.add_(grad)
        done = comm.record_event()
    if keep is not None:
        main.wait_event(keep[1])
    keep = (grad, done)
main.wait_stream(comm)
out = total + 1
""",
    ),
    _case(
        "embedding_lookups_on_two_streams",
        "torchrec: TrainPipelineSparseDist",
        """
main, lookup = cuda.current_stream(), cuda.Stream()
table = torch.ones(64, 8, device="cuda")
total = torch.zeros(8, 8, device="cuda")
lookup.wait_stream(main)
for step in range(3):
    with cuda.stream(lookup):
        ids = torch.arange(8, device="cuda")
        rows = F.embedding(ids, table)
    main.wait_stream(lookup)
    rows.record_stream(main)
    total += rows
""",
    ),
)
