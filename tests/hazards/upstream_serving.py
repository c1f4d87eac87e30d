"""Bugs of inference servers: schedulers that run ahead, host buffers that are filled again."""

from __future__ import annotations

from hazard_case import HOST, RAW, UAF, WAR
from upstream_case import Bug, bug

BUGS: tuple[Bug, ...] = (
    bug(
        "vllm_input_buffers_refilled_in_flight",
        "https://github.com/vllm-project/vllm/pull/25279",
        HOST,
        """
class Runner:
    def __init__(self):
        self.cpu = torch.zeros(64, dtype=torch.int64, pin_memory=True)
        self.gpu = torch.zeros(64, dtype=torch.int64, device="cuda")
        self.prepared = cuda.Event()

    def prepare(self, step):
        self.prepared.synchronize()  #fix
        self.cpu.fill_(step)  #2
        self.gpu.copy_(self.cpu, non_blocking=True)  #1
        self.prepared.record()

runner = Runner()
for step in range(2):
    runner.prepare(step)
""",
    ),
    bug(
        "vllm_eagle_draft_buffer_reused",
        "https://github.com/vllm-project/vllm/pull/29288",
        HOST,
        """
backup = torch.zeros(8, dtype=torch.int64, pin_memory=True)
backup_array = backup.numpy()
copied = None
for step in range(2):
    if copied is not None:  #fix
        copied.synchronize()  #fix
    backup_array[:] = step  #2
    on_gpu = backup.to("cuda", non_blocking=True)  #1
    copied = cuda.current_stream().record_event()
""",
    ),
    bug(
        "vllm_pooler_output_before_its_event",
        "https://github.com/vllm-project/vllm/issues/36942",
        HOST,
        """
class AsyncOutput:
    def __init__(self, output, copies):
        copies.wait_stream(cuda.current_stream())
        with cuda.stream(copies):
            self.on_host = output.to("cpu", non_blocking=True)  #1
            self.copied = copies.record_event()
        output.record_stream(copies)

    def get(self):
        self.copied.synchronize()  #fix
        values = self.on_host.tolist()  #2
        self.copied.synchronize()
        return values

values = AsyncOutput(torch.ones(4, 8, device="cuda"), cuda.Stream()).get()
""",
    ),
    bug(
        "vllm_multimodal_mask_without_double_buffer",
        "https://github.com/vllm-project/vllm/pull/31841",
        HOST,
        """
masks = [torch.zeros(16, dtype=torch.bool, pin_memory=True) for _ in range(2)]
events = [cuda.Event(), cuda.Event()]
on_gpu = torch.zeros(16, dtype=torch.bool, device="cuda")
for step in range(4):
    mask = masks[0]  #bug
    mask = masks[step % 2]  #fix
    events[step % 2].synchronize()
    mask.fill_(step % 3 == 0)  #2
    on_gpu.copy_(mask, non_blocking=True)  #1
    events[step % 2].record()
""",
    ),
    bug(
        "vllm_pooling_output_on_the_compute_stream",
        "https://github.com/vllm-project/vllm/pull/31584",
        HOST,
        """
def pooled(hidden):
    raw = hidden.mean(0)
    on_host = raw.to("cpu", non_blocking=True)  #1
    event = cuda.current_stream().record_event()
    return on_host, event

on_host, event = pooled(torch.ones(4, 8, device="cuda"))
event.synchronize()  #fix
norm = float(on_host.norm())  #2
""",
    ),
    bug(
        "vllm_reused_flashinfer_buffer_is_pinned",
        "https://github.com/vllm-project/vllm/pull/32799",
        HOST,
        """
indptr = torch.zeros(9, dtype=torch.int32, pin_memory=True)  #bug
indptr = torch.zeros(9, dtype=torch.int32)  #fix
for step in range(2):
    indptr[1:] = step  #2
    on_gpu = indptr.to("cuda", non_blocking=True)  #1
""",
    ),
    bug(
        "vllm_ascend_query_start_not_snapshotted",
        "https://github.com/vllm-project/vllm-ascend/pull/12071",
        HOST,
        """
query_start = torch.zeros(9, dtype=torch.int32, pin_memory=True)

def copy_to_gpu():
    return query_start.to("cuda", non_blocking=True)  #bug #1
    return query_start.clone().pin_memory().to("cuda", non_blocking=True)  #fix

locations = []
for step in range(2):
    query_start[1:].copy_(torch.arange(8) + step)  #2
    locations.append(copy_to_gpu())
""",
    ),
    bug(
        "vllm_zeroer_reuses_its_pinned_ids",
        "https://github.com/1CatAI/1Cat-vLLM/pull/406",
        HOST,
        """
class Zeroer:
    def __init__(self, cache):
        self.cache = cache
        self.ids_pinned = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        self.ids = torch.zeros(2, dtype=torch.int64, device="cuda")

    def zero(self, blocks):
        self.ids_pinned = torch.zeros(2, dtype=torch.int64, pin_memory=True)  #fix
        self.ids_pinned.numpy()[:] = blocks  #2
        self.ids.copy_(self.ids_pinned, non_blocking=True)  #1
        self.cache.index_fill_(0, self.ids, 0)

zeroer = Zeroer(torch.ones(8, 4, device="cuda"))
zeroer.zero([0, 1])
zeroer.zero([2, 3])
""",
    ),
    bug(
        "sglang_host_copy_without_synchronization",
        "https://github.com/sgl-project/sglang/pull/16493",
        HOST,
        """
def seq_lens_on_host(seq_lens):
    return seq_lens.to("cpu", non_blocking=True)  #bug #1
    return seq_lens.to("cpu")  #fix

lens = seq_lens_on_host(torch.arange(8, device="cuda"))
longest = lens.max().item()  #2
""",
    ),
    bug(
        "sglang_row_recycled_while_it_is_read",
        "https://github.com/sgl-project/sglang/pull/18746",
        WAR,
        """
default, forward = cuda.current_stream(), cuda.Stream()
req_to_token = torch.zeros(8, 32, dtype=torch.int64, device="cuda")
forward.wait_stream(default)
with cuda.stream(forward):
    tokens = req_to_token[3].clone()  #1
    done = forward.record_event()
default.wait_event(done)  #fix
req_to_token[3, :4] = torch.arange(4, device="cuda")  #2
cuda.synchronize()
""",
    ),
    bug(
        "sglang_running_indices_not_recorded",
        "https://github.com/sgl-project/sglang/pull/34076",
        UAF,
        """
forward = cuda.Stream()
relay = torch.ones(64, device="cuda")
indices = torch.arange(8, device="cuda")
forward.wait_stream(cuda.current_stream())
with cuda.stream(forward):
    gathered = relay[indices]  #1
indices.record_stream(forward)  #fix
del indices
following = torch.arange(8, device="cuda") + 1  #2
cuda.synchronize()
""",
    ),
    bug(
        "sglang_window_mapping_written_by_the_scheduler",
        "https://github.com/sgl-project/sglang/pull/26380",
        WAR,
        """
schedule, forward = cuda.current_stream(), cuda.Stream()
mapping = torch.zeros(64, dtype=torch.int64, device="cuda")
for step in range(2):
    schedule.wait_stream(forward)  #fix
    mapping.fill_(step)  #2
    forward.wait_stream(schedule)
    with cuda.stream(forward):
        rows = mapping + 1  #1
cuda.synchronize()
""",
    ),
    bug(
        "sglang_lengths_without_the_reverse_wait",
        "https://github.com/sgl-project/sglang/pull/26376",
        WAR,
        """
class Batch:
    def __init__(self):
        self.lens = torch.ones(8, dtype=torch.int64, device="cuda")

schedule, forward, batch = cuda.current_stream(), cuda.Stream(), Batch()

def run(batch):
    forward.wait_stream(schedule)
    with cuda.stream(forward):
        return batch.lens.sum()  #1

totals = []
for _ in range(2):
    totals.append(run(batch))
    schedule.wait_stream(forward)  #fix
    batch.lens.add_(1)  #2
cuda.synchronize()
""",
    ),
    bug(
        "sglang_future_indices_collected",
        "https://github.com/sgl-project/sglang/pull/18958",
        UAF,
        """
forward = cuda.Stream()
futures = torch.zeros(64, dtype=torch.int64, device="cuda")

class Batch:
    pass

def launch(start):
    batch = Batch()
    batch.indices = torch.arange(start, start + 8, device="cuda")  #2
    forward.wait_stream(cuda.current_stream())
    with cuda.stream(forward):
        resolved = futures[batch.indices]  #1
    batch.indices.record_stream(forward)  #fix

launch(0)
launch(8)
cuda.synchronize()
""",
    ),
    bug(
        "tensorrt_llm_handed_over_without_record_stream",
        "https://github.com/NVIDIA/TensorRT-LLM/pull/15265",
        UAF,
        """
main, aux = cuda.current_stream(), cuda.Stream()
hidden = torch.ones(8, 64, device="cuda")
event = main.record_event()
for _ in range(2):
    with cuda.stream(aux):
        aux.wait_event(event)
        weights = hidden * 2  #2
        ready = aux.record_event()
    main.wait_event(ready)
    out = weights.sum(1)  #1
    weights.record_stream(main)  #fix
    del weights
cuda.synchronize()
""",
    ),
    bug(
        "tensorrt_llm_input_of_the_aux_stream_freed",
        "https://github.com/NVIDIA/TensorRT-LLM/pull/13220",
        UAF,
        """
aux = cuda.Stream()

def begin_aux(x):
    x.record_stream(aux)  #fix
    aux.wait_stream(cuda.current_stream())
    with cuda.stream(aux):
        return x * 2  #1

x = torch.ones(64, device="cuda")
shared = begin_aux(x)
del x
routed = torch.zeros(64, device="cuda")  #2
cuda.current_stream().wait_stream(aux)
out = routed + shared
""",
    ),
    bug(
        "tokenspeed_sampling_buffer_raced",
        "https://github.com/lightseekorg/tokenspeed/pull/376",
        HOST,
        """
host = torch.empty(8, pin_memory=True)
device = torch.empty(8, device="cuda")
for step in range(2):
    host = torch.empty(8, pin_memory=True)  #fix
    host.copy_(torch.rand(8))  #2
    device.copy_(host, non_blocking=True)  #1
    probabilities = device.softmax(0)
""",
    ),
    bug(
        "stable_audio_engine_on_a_private_stream",
        "https://github.com/Stability-AI/stable-audio-3/pull/80",
        RAW,
        """
class Engine:
    def __init__(self):
        self.stream = cuda.Stream()

    def run(self, latent):
        self.stream.wait_stream(cuda.current_stream())  #fix
        with cuda.stream(self.stream):
            decoded = latent.tanh()  #2
        self.stream.synchronize()
        return decoded

latent = torch.ones(2, 64, device="cuda").half()  #1
audio = Engine().run(latent)
""",
    ),
    bug(
        "invokeai_non_blocking_model_manager",
        "https://github.com/invoke-ai/InvokeAI/pull/6624",
        HOST,
        """
module = nn.Linear(8, 8).cuda()
state = {k: v.to("cpu", non_blocking=True) for k, v in module.state_dict().items()}  #1
cuda.current_stream().synchronize()  #fix
total = sum(float(v.abs().sum()) for v in state.values())  #2
""",
    ),
    bug(
        "pytorch_host_read_after_asynchronous_copy",
        "https://github.com/pytorch/pytorch/issues/127612",
        HOST,
        """
a = torch.arange(10, device="cuda")
b = a.to("cpu", non_blocking=True)  #1
cuda.synchronize()  #fix
assert b.sum() == 45  #2
""",
    ),
    bug(
        "pytorch_to_cpu_works_weird",
        "https://github.com/pytorch/pytorch/issues/86264",
        HOST,
        """
x = torch.ones(64, device="cuda")
y = x.to("cpu", non_blocking=True)  #1
cuda.current_stream().synchronize()  #fix
z = y.clone()  #2
""",
    ),
    bug(
        "inductor_asynchronous_copy_then_item",
        "https://github.com/pytorch/pytorch/pull/185252",
        HOST,
        """
def compiled(x):
    scale = (x * 2).amax().to("cpu", non_blocking=True)  #1
    event = cuda.Event()  #fix
    event.record()  #fix
    event.synchronize()  #fix
    return scale.item()  #2

value = compiled(torch.ones(64, device="cuda"))
""",
    ),
    bug(
        "pytorch_tensor_reused_under_a_side_stream",
        "https://github.com/pytorch/pytorch/issues/23729",
        UAF,
        """
side = cuda.Stream()
a = torch.ones(64, device="cuda")
side.wait_stream(cuda.current_stream())
with cuda.stream(side):
    b = a.clone()  #1
a.record_stream(side)  #fix
del a
c = torch.zeros(64, device="cuda")  #2
cuda.synchronize()
""",
    ),
    bug(
        "transformers_continuous_batching_without_events",
        "https://github.com/huggingface/blog/pull/3372",
        RAW,
        """
h2d, compute, d2h = cuda.Stream(), cuda.Stream(), cuda.Stream()
host = torch.ones(64).pin_memory()
inputs = torch.zeros(64, device="cuda")
cuda.synchronize()
with cuda.stream(h2d):
    inputs.copy_(host, non_blocking=True)  #1
    arrived = h2d.record_event()
compute.wait_event(arrived)  #fix
with cuda.stream(compute):
    logits = inputs * 2  #2
    computed = compute.record_event()
d2h.wait_event(computed)
with cuda.stream(d2h):
    tokens = logits.to("cpu", non_blocking=True)
cuda.synchronize()
""",
    ),
    bug(
        "transformer_engine_gradient_buffer_of_a_graph_reused",
        "https://github.com/NVIDIA/TransformerEngine/pull/2018",
        WAR,
        """
send = cuda.Stream()
static = torch.ones(64, device="cuda")
graph = cuda.CUDAGraph()
with cuda.graph(graph):
    grad_input = static * 2
graph.replay()
send.wait_stream(cuda.current_stream())
with cuda.stream(send):
    sent = grad_input.clone()  #1
cuda.current_stream().wait_stream(send)  #fix
graph.replay()  #2
cuda.synchronize()
""",
    ),
)
