"""Bugs of projects that move weights, activations and optimizer states between host and device."""

from __future__ import annotations

from hazard_case import HOST, RAW, UAF, WAR, WAW
from upstream_case import Bug, bug

BUGS: tuple[Bug, ...] = (
    bug(
        "diffusers_onload_not_awaited",
        "https://github.com/huggingface/diffusers/pull/13502",
        RAW,
        """
class Group:
    def __init__(self, module):
        self.module, self.stream = module, cuda.Stream()
        self.host = {p: p.data.pin_memory() for p in module.parameters()}

    def onload(self):
        main = cuda.current_stream()
        with cuda.stream(self.stream):
            for p, kept in self.host.items():
                p.data = kept.to("cuda", non_blocking=True)  #1
                p.data.record_stream(main)
        main.wait_stream(self.stream)  #fix

group = Group(nn.Linear(64, 64, bias=False))
group.onload()
out = group.module(torch.ones(4, 64, device="cuda"))  #2
""",
    ),
    bug(
        "diffusers_record_stream_on_the_transfer_stream",
        "https://github.com/huggingface/diffusers/pull/12721",
        UAF,
        """
transfer = cuda.Stream()
host = torch.ones(64, 64).pin_memory()

def onload():
    main = cuda.current_stream()  #fix
    with cuda.stream(transfer):
        main = cuda.current_stream()  #bug
        weight = host.to("cuda", non_blocking=True)  #2
        weight.record_stream(main)
    return weight

x = torch.ones(4, 64, device="cuda")
for _ in range(2):
    weight = onload()
    cuda.current_stream().wait_stream(transfer)
    x = x @ weight  #1
    del weight
""",
    ),
    bug(
        "diffusers_offload_to_disk_frees_weights_in_use",
        "https://github.com/huggingface/diffusers/pull/14657",
        UAF,
        """
transfer = cuda.Stream()
layers = [nn.Linear(64, 64, bias=False) for _ in range(2)]
files = {p: p.data.clone().pin_memory() for layer in layers for p in layer.parameters()}

def onload(layer):
    with cuda.stream(transfer):
        for p in layer.parameters():
            p.data = files[p].to("cuda", non_blocking=True)  #2
    cuda.current_stream().wait_stream(transfer)

def offload(layer):
    cuda.current_stream().synchronize()  #fix
    for p in layer.parameters():
        p.data = torch.empty_like(p.data, device="cpu")

with torch.no_grad():
    x = torch.ones(4, 64, device="cuda")
    for layer in layers:
        onload(layer)
        x = layer(x)  #1
        offload(layer)
""",
    ),
    bug(
        "trl_cached_compute_stream",
        "https://github.com/huggingface/trl/pull/7195",
        RAW,
        """
class Offload:
    def __init__(self):
        self.s0, self.s1 = cuda.default_stream(), cuda.Stream()

    def pack(self, activation):
        self.s1.wait_stream(self.s0)  #bug
        self.s1.wait_stream(cuda.current_stream())  #fix
        with cuda.stream(self.s1):
            kept = torch.empty(activation.shape, pin_memory=True)
            kept.copy_(activation, non_blocking=True)  #2
        return kept

offload, compute = Offload(), cuda.Stream()
with cuda.stream(compute):
    h = torch.ones(64, device="cuda").exp()  #1
    kept = offload.pack(h)
cuda.synchronize()
""",
    ),
    bug(
        "trl_clone_after_the_wait",
        "https://github.com/huggingface/trl/pull/7195#clone",
        RAW,
        """
s1 = cuda.Stream()

def pack(activation):
    activation = activation.clone()  #fix
    s1.wait_stream(cuda.current_stream())
    activation = activation.clone()  #bug #1
    with cuda.stream(s1):
        kept = torch.empty(activation.shape, pin_memory=True)
        kept.copy_(activation, non_blocking=True)  #2
    activation.record_stream(s1)
    return kept

labels = torch.arange(65, device="cuda", dtype=torch.float32)
kept = pack(labels[1:])
cuda.synchronize()
""",
    ),
    bug(
        "axolotl_stash_of_the_transfer_pool",
        "https://github.com/axolotl-ai-cloud/axolotl/pull/3833",
        UAF,
        """
s0, s1 = cuda.current_stream(), cuda.Stream()
labels = torch.arange(65, device="cuda", dtype=torch.float32)
restored_from = torch.ones(64).pin_memory()
s1.wait_stream(s0)
with cuda.stream(s1):  #bug
    stash = labels[1:].clone()  #bug
stash = labels[1:].clone()  #fix
s0.wait_stream(s1)
loss = stash.sum()  #1
stash = None
with cuda.stream(s1):
    restored = restored_from.to("cuda", non_blocking=True)  #2
cuda.synchronize()
""",
    ),
    bug(
        "torchtune_activation_deleted_while_offloaded",
        "https://github.com/meta-pytorch/torchtune/issues/1867",
        UAF,
        """
s1 = cuda.Stream()

def offload(activation):
    s1.wait_stream(cuda.current_stream())
    with cuda.stream(s1):
        kept = torch.empty(activation.shape, pin_memory=True)
        kept.copy_(activation, non_blocking=True)  #1
    activation.record_stream(s1)  #fix
    return kept

stash = []
x = torch.ones(64, device="cuda")
for _ in range(2):
    h = x * 2  #2
    stash.append(offload(h))
    del h
cuda.synchronize()
""",
    ),
    bug(
        "megatron_reload_races_its_own_offload",
        "https://github.com/NVIDIA/Megatron-LM/issues/7398",
        RAW,
        """
d2h = cuda.Stream()
staging = torch.empty(64, pin_memory=True)
saved = torch.ones(64, device="cuda")
d2h.wait_stream(cuda.current_stream())
with cuda.stream(d2h):
    staging.copy_(saved, non_blocking=True)  #1
    done = d2h.record_event()
cuda.current_stream().wait_event(done)  #fix
back = staging.to("cuda", non_blocking=True)  #2
cuda.synchronize()
""",
    ),
    bug(
        "megatron_wait_for_the_wrong_copy_stream",
        "https://github.com/NVIDIA/Megatron-LM/pull/1543",
        RAW,
        """
d2h, h2d = cuda.Stream(), cuda.Stream()
master = torch.ones(64).pin_memory()
weight = torch.zeros(64, device="cuda")

def copy_back():
    h2d.wait_stream(cuda.current_stream())
    with cuda.stream(h2d):
        weight.copy_(master, non_blocking=True)  #1

def forward_hook():
    cuda.current_stream().wait_stream(d2h)  #bug
    cuda.current_stream().wait_stream(h2d)  #fix

copy_back()
forward_hook()
y = weight * 2  #2
""",
    ),
    bug(
        "comfyui_weight_freed_on_the_offload_stream",
        "https://github.com/Comfy-Org/ComfyUI/pull/10501",
        UAF,
        """
offload = cuda.Stream()
host = [torch.full((64, 64), float(i)).pin_memory() for i in range(2)]

def cast_weight(i):
    with cuda.stream(offload):
        weight = host[i].to("cuda", non_blocking=True)  #2
    cuda.current_stream().wait_stream(offload)
    return weight

x = torch.ones(4, 64, device="cuda")
for i in range(2):
    weight = cast_weight(i)
    x = x @ weight  #1
    offload.wait_stream(cuda.current_stream())  #fix
    del weight
""",
    ),
    bug(
        "comfyui_cast_off_the_offload_stream",
        "https://github.com/Comfy-Org/ComfyUI/pull/10697",
        RAW,
        """
offload = cuda.Stream()
host = torch.ones(64, 64, dtype=torch.float16).pin_memory()

def cast_weight():
    with cuda.stream(offload):
        weight = host.to("cuda", non_blocking=True)  #1
        weight = weight.float()  #fix
    weight = weight.float()  #bug #2
    cuda.current_stream().wait_stream(offload)
    weight.record_stream(cuda.current_stream())
    return weight

y = torch.ones(4, 64, device="cuda") @ cast_weight()
""",
    ),
    bug(
        "rocm_consumer_reads_before_the_transfer",
        "https://github.com/ROCm/pytorch/issues/3194",
        RAW,
        """
default_stream, transfer_stream = cuda.current_stream(), cuda.Stream()
source = torch.ones(1024).pin_memory()
target = torch.zeros(1024, device="cuda")
transfer_stream.wait_stream(default_stream)
with cuda.stream(transfer_stream):
    target.copy_(source, non_blocking=True)  #1
default_stream.wait_stream(transfer_stream)  #fix
result = target * 2  #2
""",
    ),
    bug(
        "torchao_gradients_read_before_they_arrive",
        "https://github.com/pytorch/ao/pull/584",
        HOST,
        """
weight = torch.ones(64, device="cuda", requires_grad=True)
master = weight.detach().cpu()
optimizer = torch.optim.SGD([master], 0.1)
(weight * 2).sum().backward()
master.grad = weight.grad.to("cpu", non_blocking=True)  #1
cuda.synchronize()  #fix
optimizer.step()  #2
""",
    ),
    bug(
        "transformers_offloaded_cache_layer_in_flight",
        "https://github.com/huggingface/transformers/pull/31325",
        RAW,
        """
class OffloadedCache:
    def __init__(self, layers):
        self.stream = cuda.Stream()
        self.layers = [torch.ones(64).pin_memory() for _ in range(layers)]

    def prefetch(self, layer):
        with cuda.stream(self.stream):
            self.layers[layer] = self.layers[layer].to("cuda", non_blocking=True)  #1

    def get(self, layer):
        cuda.current_stream().wait_stream(self.stream)  #fix
        return self.layers[layer]

cache = OffloadedCache(2)
cache.prefetch(0)
scores = cache.get(0) * 2  #2
""",
    ),
    bug(
        "veomni_activation_resized_before_the_copy_ended",
        "https://github.com/ByteDance-Seed/VeOmni/pull/965",
        UAF,
        """
stream = cuda.Stream()
kept = torch.empty(64, pin_memory=True)
activation = torch.ones(64, device="cuda")
stream.wait_stream(cuda.current_stream())
with cuda.stream(stream):
    kept.copy_(activation, non_blocking=True)  #1
    copied = stream.record_event()
cuda.current_stream().wait_event(copied)  #fix
activation.untyped_storage().resize_(0)
following = torch.zeros(64, device="cuda")  #2
cuda.synchronize()
""",
    ),
    bug(
        "torchrec_resized_without_record_stream",
        "https://github.com/meta-pytorch/torchrec/pull/4231",
        UAF,
        """
copies = cuda.Stream()
on_host = torch.empty(64, pin_memory=True)
tensor = torch.ones(64, device="cuda")
copies.wait_stream(cuda.current_stream())
with cuda.stream(copies):
    on_host.copy_(tensor, non_blocking=True)  #1
tensor.record_stream(copies)  #fix
tensor.untyped_storage().resize_(0)
fresh = torch.full((64,), -1.0, device="cuda")  #2
copies.synchronize()
""",
    ),
    bug(
        "fsdp2_offloaded_gradient_outlives_its_block",
        "https://github.com/pytorch/pytorch/pull/180665",
        UAF,
        """
reduce_scatter, all_reduce = cuda.Stream(), cuda.Stream()
grads = [torch.ones(64, device="cuda") for _ in range(2)]
on_host, keep = [], []
reduce_scatter.wait_stream(cuda.current_stream())
for grad in grads:
    with cuda.stream(reduce_scatter):
        output = grad * 0.5  #2
    all_reduce.wait_stream(reduce_scatter)
    with cuda.stream(all_reduce):
        host = torch.empty(64, pin_memory=True)
        host.copy_(output, non_blocking=True)  #1
    on_host.append(host)
    keep.append(output)  #fix
    del output
cuda.synchronize()
""",
    ),
    bug(
        "dcp_staged_before_the_weights_are_updated",
        "https://github.com/vllm-project/vllm-ascend/pull/16124",
        RAW,
        """
def copy_to_staging(tensors):
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())  #fix
    staged = [torch.empty(t.shape, pin_memory=True) for t in tensors]
    with cuda.stream(stream):
        for destination, source in zip(staged, tensors):
            destination.copy_(source, non_blocking=True)  #2
    stream.synchronize()
    return staged

hidden = torch.ones(64, device="cuda").exp()  #1
staged = copy_to_staging([hidden])
""",
    ),
    bug(
        "lmcache_next_layer_stored_before_it_is_computed",
        "https://github.com/LMCache/LMCache/issues/1068",
        WAR,
        """
store = cuda.Stream()
cache = [torch.zeros(64, device="cuda") for _ in range(2)]
host = [torch.empty(64, pin_memory=True) for _ in range(2)]
ready = [cuda.Event() for _ in range(2)]

def save(layer):
    store.wait_event(ready[layer])
    with cuda.stream(store):
        host[layer].copy_(cache[layer], non_blocking=True)  #1

store.wait_stream(cuda.current_stream())
for layer in range(2):
    save(layer)  #bug
    cache[layer].fill_(layer)  #2
    ready[layer].record()
    save(layer)  #fix
cuda.synchronize()
""",
    ),
    bug(
        "lmcache_retrieve_ignores_its_event",
        "https://github.com/local-inference-lab/rtx6kpro/issues/47",
        WAR,
        """
load = cuda.Stream()
pages = torch.zeros(4, 64, device="cuda")
restored = torch.ones(64).pin_memory()
attended = pages.sum()  #1
event = cuda.current_stream().record_event()

def retrieve(event):
    load.wait_event(event)  #fix
    with cuda.stream(load):
        pages[1].copy_(restored, non_blocking=True)  #2

retrieve(event)
cuda.current_stream().wait_stream(load)
attended = pages.sum()
""",
    ),
    bug(
        "tensorrt_llm_reuse_copy_over_a_received_block",
        "https://github.com/NVIDIA/TensorRT-LLM/pull/19444",
        WAW,
        """
copies, receives = cuda.Stream(), cuda.Stream()
blocks = torch.zeros(4, 64, device="cuda")
cuda.synchronize()
with cuda.stream(copies):
    blocks[2].copy_(blocks[0])  #1
    prepared = copies.record_event()
receives.wait_event(prepared)  #fix
with cuda.stream(receives):
    blocks[2].fill_(7)  #2
cuda.synchronize()
""",
    ),
    bug(
        "tensorrt_llm_onboard_before_the_offload_is_done",
        "https://github.com/NVIDIA/TensorRT-LLM/pull/9056",
        WAR,
        """
offload, onboard = cuda.Stream(), cuda.Stream()
primary = torch.ones(4, 64, device="cuda")
secondary = torch.empty(4, 64, pin_memory=True)
cached = torch.ones(64).pin_memory()
cuda.synchronize()
with cuda.stream(offload):
    secondary[1].copy_(primary[1], non_blocking=True)  #1
    read = offload.record_event()
onboard.wait_event(read)  #fix
with cuda.stream(onboard):
    primary[1].copy_(cached, non_blocking=True)  #2
cuda.synchronize()
""",
    ),
    bug(
        "torchtune_gather_waits_for_a_pool_stream",
        "https://github.com/meta-pytorch/torchtune/issues/2683",
        RAW,
        """
comm, offload = cuda.Stream(), cuda.Stream()
shard = torch.ones(64, device="cuda")
comm.wait_stream(cuda.current_stream())
with cuda.stream(comm):
    gathered = torch.cat([shard, shard])  #1
    ready = comm.record_event()
offload.wait_stream(cuda.current_stream())
offload.wait_event(ready)  #fix
with cuda.stream(offload):
    kept = torch.empty(128, pin_memory=True)
    kept.copy_(gathered, non_blocking=True)  #2
cuda.synchronize()
""",
    ),
)
