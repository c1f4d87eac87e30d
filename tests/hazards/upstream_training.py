"""Bugs of training libraries: gradients, collectives, pipelines, loaders."""

from __future__ import annotations

from hazard_case import HOST, RAW, UAF, WAR, WAW
from upstream_case import Bug, bug

_DIST = """
import torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
"""

BUGS: tuple[Bug, ...] = (
    bug(
        "deepspeed_waits_for_the_default_stream",
        "https://github.com/deepspeedai/DeepSpeed/pull/7898",
        RAW,
        """
compute, reduce = cuda.Stream(), cuda.Stream()
weight = torch.ones(64, device="cuda", requires_grad=True)
bucket = torch.zeros(64, device="cuda")
reduce.wait_stream(cuda.current_stream())
compute.wait_stream(cuda.current_stream())

def partition(param):
    reduce.wait_stream(cuda.default_stream())  #bug
    reduce.wait_stream(cuda.current_stream())  #fix
    with cuda.stream(reduce):
        bucket.copy_(param.grad)  #2
    param.grad.record_stream(reduce)

weight.register_post_accumulate_grad_hook(partition)
with cuda.stream(compute):
    loss = (weight * 2).sum()
    loss.backward()  #1
cuda.synchronize()
""",
    ),
    bug(
        "deepspeed_bucket_written_on_several_streams",
        "https://github.com/deepspeedai/DeepSpeed/issues/8061",
        WAW,
        """
a, b, reduction = cuda.Stream(), cuda.Stream(), cuda.Stream()
main = cuda.current_stream()
w1 = torch.ones(64, device="cuda", requires_grad=True)
w2 = torch.ones(64, device="cuda", requires_grad=True)
bucket = torch.zeros(128, device="cuda")
for stream in (a, b, reduction):
    stream.wait_stream(main)
places = {w1: bucket[:64], w2: bucket[64:]}
copy_streams = []

def fill(param):
    places[param].copy_(param.grad)  #1
    copy_streams.append(cuda.current_stream())
    if len(copy_streams) == 2:
        reduction.wait_stream(cuda.current_stream())  #bug
        for stream in copy_streams:  #fix
            reduction.wait_stream(stream)  #fix
        with cuda.stream(reduction):
            bucket.div_(2)  #2

for w in (w1, w2):
    w.register_post_accumulate_grad_hook(fill)
with cuda.stream(a):
    y1 = (w1 * 2).sum()
with cuda.stream(b):
    y2 = (w2 * 3).sum()
main.wait_stream(a)
main.wait_stream(b)
(y1 + y2).backward()
cuda.synchronize()
""",
    ),
    bug(
        "deepspeed_ipg_buffer_rewritten_while_it_is_reduced",
        "https://github.com/deepspeedai/DeepSpeed/pull/5606",
        WAR,
        """
reduction = cuda.Stream()
buffer = torch.zeros(64, device="cuda")
total = torch.zeros(64, device="cuda")
reduction.wait_stream(cuda.current_stream())
for step in range(2):
    buffer.fill_(step)  #2
    reduction.wait_stream(cuda.current_stream())
    with cuda.stream(reduction):
        total.add_(buffer)  #1
    cuda.current_stream().wait_stream(reduction)  #fix
cuda.synchronize()
""",
    ),
    bug(
        "deepspeed_ping_pong_index_reset",
        "https://github.com/deepspeedai/DeepSpeed/pull/7805",
        WAR,
        """
reduction = cuda.Stream()
buffers = [torch.zeros(64, device="cuda") for _ in range(2)]
done = [cuda.Event() for _ in range(2)]
total = torch.zeros(64, device="cuda")
reduction.wait_stream(cuda.current_stream())
index = 0
for step in range(3):
    cuda.current_stream().wait_event(done[1 - index])  #bug
    cuda.current_stream().wait_event(done[index])  #fix
    buffers[index].fill_(step)  #2
    reduction.wait_stream(cuda.current_stream())
    with cuda.stream(reduction):
        total.add_(buffers[index])  #1
        done[index].record()
    index = 1 - index
    index = 0  #bug
cuda.synchronize()
""",
    ),
    bug(
        "deepspeed_double_buffer_without_events",
        "https://github.com/deepspeedai/DeepSpeed/issues/5545",
        WAR,
        """
reduction = cuda.Stream()
buffers = [torch.zeros(64, device="cuda") for _ in range(2)]
events = [None, None]
total = torch.zeros(64, device="cuda")
reduction.wait_stream(cuda.current_stream())
for step in range(3):
    if events[step % 2] is not None:  #fix
        events[step % 2].wait()  #fix
    buffers[step % 2].fill_(step)  #2
    reduction.wait_stream(cuda.current_stream())
    with cuda.stream(reduction):
        total.add_(buffers[step % 2])  #1
        events[step % 2] = reduction.record_event()
cuda.synchronize()
""",
    ),
    bug(
        "megatron_hook_keeps_the_stream_of_construction",
        "https://github.com/NVIDIA/Megatron-LM/issues/3670",
        WAW,
        """
side, comm = cuda.Stream(), cuda.Stream()
main = cuda.current_stream()
weight = torch.ones(64, device="cuda", requires_grad=True)
main_grad = torch.zeros(64, device="cuda")
cuda.synchronize()
with cuda.stream(side):  #bug
    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]  #bug
accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]  #fix

def start_reduce():
    comm.wait_stream(main)
    with cuda.stream(comm):
        main_grad.mul_(0.5)  #2

def hook(*unused):
    main_grad.add_(weight.grad)  #1
    start_reduce()

accumulator.register_hook(hook)
loss = (weight * 2).sum()
loss.backward()
cuda.synchronize()
""",
    ),
    bug(
        "megatron_main_grad_of_the_default_pool",
        "https://github.com/NVIDIA/Megatron-LM/pull/6187",
        UAF,
        """
reduce_scatter = cuda.Stream()
with cuda.stream(reduce_scatter):  #fix
    main_grad = torch.zeros(64, device="cuda")  #fix
main_grad = torch.zeros(64, device="cuda")  #bug
reduce_scatter.wait_stream(cuda.current_stream())
with cuda.stream(reduce_scatter):
    main_grad.add_(1)  #1
    main_grad = main_grad.double()
activation = torch.ones(64, device="cuda")  #2
cuda.synchronize()
""",
    ),
    bug(
        "megatron_fsdp_bucket_resized_to_zero",
        "https://github.com/NVIDIA/Megatron-LM/issues/5788",
        UAF,
        """
gather = cuda.Stream()
shard = torch.ones(64, device="cuda")
gather.wait_stream(cuda.current_stream())
with cuda.stream(gather):
    bucket = torch.cat([shard, shard])
cuda.current_stream().wait_stream(gather)
out = bucket * 2  #1
bucket.record_stream(cuda.current_stream())  #fix
bucket.untyped_storage().resize_(0)
with cuda.stream(gather):
    following = torch.cat([shard, shard])  #2
cuda.synchronize()
""",
    ),
    bug(
        "fsdp_shard_consumed_without_record_stream",
        "https://github.com/pytorch/pytorch/pull/91096",
        UAF,
        """
pre_unshard = cuda.Stream()
full = torch.ones(64, device="cuda")
pre_unshard.wait_stream(cuda.current_stream())
for _ in range(2):
    with cuda.stream(pre_unshard):
        shard = full.half()  #2
    cuda.current_stream().wait_stream(pre_unshard)
    y = shard * 2  #1
    shard.record_stream(cuda.current_stream())  #fix
    del shard
cuda.synchronize()
""",
    ),
    bug(
        "fsdp_post_backward_waits_for_the_wrong_stream",
        "https://github.com/pytorch/pytorch/issues/86910",
        RAW,
        """
computation = cuda.current_stream()
unshard, post_backward = cuda.Stream(), cuda.Stream()
weight = torch.ones(64, device="cuda", requires_grad=True)
unshard.wait_stream(computation)
with cuda.stream(unshard):
    y = weight * 2

def reduce(param):
    post_backward.wait_stream(computation)  #bug
    post_backward.wait_stream(cuda.current_stream())  #fix
    with cuda.stream(post_backward):
        shard = param.grad.half()  #2
    param.grad.record_stream(post_backward)

weight.register_post_accumulate_grad_hook(reduce)
computation.wait_stream(unshard)
y.sum().backward()  #1
cuda.synchronize()
""",
    ),
    bug(
        "fsdp_test_gathers_unordered_clones",
        "https://github.com/pytorch/pytorch/pull/197827",
        RAW,
        """
copy_in, gather = cuda.Stream(), cuda.Stream()
params = [torch.ones(64, device="cuda") for _ in range(2)]
clones = [p.clone() for p in params]  #1
copy_in.wait_stream(cuda.current_stream())  #fix
with cuda.stream(copy_in):
    flat = torch.cat(clones)  #2
gather.wait_stream(copy_in)
with cuda.stream(gather):
    out = flat * 1
cuda.synchronize()
""",
    ),
    bug(
        "functional_collective_without_wait_tensor",
        "https://github.com/pytorch/pytorch/pull/162749",
        RAW,
        _DIST
        + """
group = dist.group.WORLD.group_name
x = torch.ones(64, device="cuda")
total = torch.ops._c10d_functional.all_reduce(x, "sum", group)  #1
total = torch.ops._c10d_functional.wait_tensor(total)  #fix
y = total + 1  #2
cuda.synchronize()
""",
    ),
    bug(
        "collective_inside_a_custom_operator_not_awaited",
        "https://github.com/pytorch/pytorch/issues/152534",
        RAW,
        _DIST
        + """
group = dist.group.WORLD.group_name

def custom_forward(value):
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(value, 1, group)  #1
    gathered = torch.ops._c10d_functional.wait_tensor(gathered)  #fix
    return gathered.double()  #2

y = custom_forward(torch.ones(64, device="cuda"))
cuda.synchronize()
""",
    ),
    bug(
        "opennmt_division_while_the_reduction_runs",
        "https://github.com/OpenNMT/OpenNMT-py/issues/2295",
        WAW,
        _DIST
        + """
buffer = torch.ones(64, device="cuda")
work = dist.all_reduce(buffer, async_op=True)  #1
work.wait()  #fix
buffer.div_(2)  #2
""",
    ),
    bug(
        "anima_transposed_before_the_gather_is_done",
        "https://github.com/gazingstars123/Anima-Standalone-Trainer/pull/39",
        RAW,
        _DIST
        + """
class Pending:
    def __init__(self, tensor, work, finalize=None):
        self.tensor, self.work, self.finalize = tensor, work, finalize
    def wait(self):
        self.work.wait()
        return self.finalize(self.tensor) if self.finalize else self.tensor

def transposed(tensor):
    return tensor.t().contiguous()  #2

x = torch.ones(8, 8, device="cuda")
output = torch.empty(8, 8, device="cuda")
work = dist.all_gather_into_tensor(output, x, async_op=True)  #1
pending = Pending(transposed(output), work)  #bug
pending = Pending(output, work, transposed)  #fix
y = pending.wait() + 1
""",
    ),
    bug(
        "internlm_broadcast_on_a_side_stream",
        "https://github.com/InternLM/InternLM/pull/294",
        WAW,
        _DIST
        + """
broadcast = cuda.Stream()
params = [torch.ones(64, device="cuda") for _ in range(2)]
cuda.synchronize()
for p in params:
    p.mul_(0.9)  #1
broadcast.wait_stream(cuda.current_stream())  #fix
with cuda.stream(broadcast):
    for p in params:
        dist.broadcast(p, 0)  #2
cuda.synchronize()
""",
    ),
    bug(
        "collective_on_a_third_stream_outlives_its_tensor",
        "https://github.com/pytorch/pytorch/issues/188655",
        UAF,
        _DIST
        + """
s0, s1 = cuda.current_stream(), cuda.Stream()
t0 = torch.zeros(64, device="cuda")
a = t0 + 1
s1.wait_stream(s0)
with cuda.stream(s1):
    work = dist.all_reduce(a, async_op=True)  #1
    work.wait()
    work = None
s0.wait_stream(s1)  #fix
a = None
t1 = t0 + 1  #2
cuda.synchronize()
""",
    ),
    bug(
        "timm_prefetcher_overwrites_what_is_read",
        "https://github.com/huggingface/pytorch-image-models/pull/2784",
        UAF,
        """
class PrefetchLoader:
    def __init__(self, batches):
        self.batches, self.stream = batches, cuda.Stream()

    def __iter__(self):
        for batch in self.batches:
            self.stream.wait_stream(cuda.current_stream())  #fix
            with cuda.stream(self.stream):
                images = batch.to("cuda", non_blocking=True)  #2
            cuda.current_stream().wait_stream(self.stream)
            yield images
            del images

total = torch.zeros(64, device="cuda")
for images in PrefetchLoader([torch.ones(64).pin_memory() for _ in range(3)]):
    total += images  #1
    del images
cuda.synchronize()
""",
    ),
    bug(
        "apex_prefetcher_does_not_record_the_stream",
        "https://github.com/NVIDIA/apex/issues/304",
        UAF,
        """
class Prefetcher:
    def __init__(self, loader):
        self.loader, self.stream = iter(loader), cuda.Stream()
        self.preload()

    def preload(self):
        self.following = next(self.loader, None)
        if self.following is not None:
            with cuda.stream(self.stream):
                self.following = self.following.cuda(non_blocking=True)  #2
                self.following = self.following.float()

    def next(self):
        cuda.current_stream().wait_stream(self.stream)
        batch = self.following
        if batch is not None:  #fix
            batch.record_stream(cuda.current_stream())  #fix
        self.preload()
        return batch

prefetcher = Prefetcher([torch.ones(64).pin_memory() for _ in range(4)])
total = torch.zeros(64, device="cuda")
while (batch := prefetcher.next()) is not None:
    total += batch  #1
    del batch
cuda.synchronize()
""",
    ),
    bug(
        "torchrec_input_dist_beside_the_prefetch",
        "https://github.com/meta-pytorch/torchrec/pull/4191",
        WAW,
        """
prefetch, data_dist = cuda.Stream(), cuda.Stream()
cache = torch.zeros(16, 8, device="cuda")
rows = torch.ones(16, 8, device="cuda")
cuda.synchronize()
with cuda.stream(prefetch):
    cache.copy_(rows)  #1
data_dist.wait_stream(prefetch)  #fix
with cuda.stream(data_dist):
    cache.add_(1)  #2
cuda.synchronize()
""",
    ),
    bug(
        "torchrec_semi_sync_embeddings_not_recorded",
        "https://github.com/meta-pytorch/torchrec/pull/2598",
        UAF,
        """
lookup = cuda.Stream()
table = torch.ones(64, 8, device="cuda")
ids = torch.arange(8, device="cuda")
lookup.wait_stream(cuda.current_stream())
for _ in range(2):
    with cuda.stream(lookup):
        embeddings = table.index_select(0, ids)  #2
        ready = lookup.record_event()
    cuda.current_stream().wait_event(ready)
    out = embeddings * 2  #1
    embeddings.record_stream(cuda.current_stream())  #fix
    del embeddings
cuda.synchronize()
""",
    ),
    bug(
        "prime_rl_event_of_an_earlier_chunk_overwritten",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/3411",
        RAW,
        """
streams = [cuda.Stream(), cuda.Stream()]
chunks = list(torch.ones(2, 64, device="cuda").unbind())
cuda.synchronize()
outputs, events = [], []
for stream, chunk in zip(streams, chunks):
    with cuda.stream(stream):
        outputs.append(chunk * 2)  #1
        pending = stream.record_event()
        events.append(pending)
cuda.current_stream().wait_event(pending)  #bug
for event in events:  #fix
    cuda.current_stream().wait_event(event)  #fix
output = torch.cat(outputs)  #2
cuda.synchronize()
""",
    ),
    bug(
        "torchtitan_layout_read_on_the_communication_stream",
        "https://github.com/pytorch/torchtitan/issues/3413",
        RAW,
        """
comm = cuda.Stream()
experts = torch.zeros(64, dtype=torch.int64, device="cuda")
scores = torch.rand(64, device="cuda")
cuda.synchronize()
experts.masked_fill_(scores == 0, -1)  #1
comm.wait_stream(cuda.current_stream())  #fix
with cuda.stream(comm):
    per_expert = experts.clamp_min(0)  #2
cuda.synchronize()
""",
    ),
    bug(
        "deepep_fill_of_a_deterministic_empty",
        "https://github.com/deepseek-ai/DeepEP/issues/589",
        WAW,
        """
comm = cuda.Stream()
tokens = torch.ones(64, device="cuda")
before = torch.are_deterministic_algorithms_enabled()
torch.use_deterministic_algorithms(True)
comm.wait_stream(cuda.current_stream())
received = torch.empty(64, device="cuda")  #1
torch.use_deterministic_algorithms(before)
comm.wait_stream(cuda.current_stream())  #fix
with cuda.stream(comm):
    received.copy_(tokens)  #2
cuda.synchronize()
""",
    ),
    bug(
        "dgl_kernel_on_the_default_stream",
        "https://github.com/dmlc/dgl/issues/4436",
        RAW,
        """
side = cuda.Stream()
library = cuda.current_stream()
features = torch.ones(64, 8, device="cuda")
rows = torch.arange(64, device="cuda")
side.wait_stream(library)
with cuda.stream(side):
    selected = features.index_select(0, rows)  #1
    library.wait_stream(side)  #fix
    with cuda.stream(library):
        out = selected.sum(1)  #2
cuda.synchronize()
""",
    ),
    bug(
        "lightning_non_blocking_copy_to_the_host",
        "https://github.com/Lightning-AI/pytorch-lightning/pull/11288",
        HOST,
        """
def move_to_host(batch):
    return {k: v.to("cpu", non_blocking=True) for k, v in batch.items()}  #bug #1
    return {k: v.to("cpu") for k, v in batch.items()}  #fix

outputs = move_to_host({"loss": torch.ones(64, device="cuda")})
mean = outputs["loss"].mean()  #2
""",
    ),
    bug(
        "spdl_pinned_batch_refilled_in_flight",
        "https://github.com/facebookresearch/spdl/pull/1082",
        HOST,
        """
stream = cuda.Stream()
page = torch.empty(64, pin_memory=True)
batches = []
for step in range(2):
    page.fill_(step)  #2
    with cuda.stream(stream):
        batches.append(page.to("cuda", non_blocking=True))  #1
        copied = stream.record_event()
    copied.synchronize()  #fix
cuda.synchronize()
""",
    ),
)
