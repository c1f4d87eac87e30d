"""Bugs and correct programs that were written and committed before any of them was run: what is
found of them was not tuned on them.
"""

from __future__ import annotations

from hazard_case import HOST, RAW, UAF, WAR, WAW, Case, case
from upstream_case import Bug, bug

_DIST = """
import torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
"""

BUGS: tuple[Bug, ...] = (
    bug(
        "vllm_store_does_not_wait_for_compute",
        "https://github.com/vllm-project/vllm/issues/45704",
        RAW,
        """
class Connector:
    def __init__(self, kv, pool):
        self.kv, self.pool = kv, pool
        self.store_stream = cuda.Stream()

    def store(self, blocks):
        self.store_stream.wait_stream(cuda.current_stream())  #fix
        with cuda.stream(self.store_stream):
            for block in blocks:
                self.pool[block].copy_(self.kv[block], non_blocking=True)  #2

kv = torch.zeros(8, 64, device="cuda")
pool = torch.zeros(8, 64, pin_memory=True)
written = torch.ones(64, device="cuda")
cuda.synchronize()
connector = Connector(kv, pool)
for step in range(2):
    kv[step].copy_(written)  #1
    connector.store([step])
cuda.synchronize()
""",
    ),
    bug(
        "vllm_load_wiped_by_pending_zeroing",
        "https://github.com/vllm-project/vllm/pull/50696",
        WAW,
        """
cache = torch.zeros(8, 64, device="cuda")
saved = torch.ones(8, 64, pin_memory=True)
loads = cuda.Stream()
cuda.synchronize()

def allocate(blocks):
    for block in blocks:
        cache[block].zero_()  #1

def load(blocks):
    loads.wait_stream(cuda.current_stream())  #fix
    with cuda.stream(loads):
        for block in blocks:
            cache[block].copy_(saved[block], non_blocking=True)  #2
    return loads.record_event()

allocate([2, 3])
loaded = load([2, 3])
cuda.current_stream().wait_event(loaded)
hidden = cache[2:4].sum()
""",
    ),
    bug(
        "vllm_load_overwrites_a_block_that_is_read",
        "https://github.com/vllm-project/vllm/pull/47324",
        WAR,
        """
class Worker:
    def __init__(self):
        self.cache = torch.ones(4, 64, device="cuda")
        self.host = torch.zeros(4, 64, pin_memory=True)
        self.load_stream = cuda.Stream()
        self.store_stream = cuda.Stream()
        self.compute_done = cuda.Event()

    def step(self, read, stored, loaded):
        out = self.cache[read].exp()  #1
        self.compute_done.record()
        with cuda.stream(self.store_stream):
            self.store_stream.wait_event(self.compute_done)
            self.host[stored].copy_(self.cache[stored], non_blocking=True)
        with cuda.stream(self.load_stream):
            self.load_stream.wait_event(self.compute_done)  #fix
            self.cache[loaded].copy_(self.host[loaded], non_blocking=True)  #2
        return out

worker = Worker()
cuda.synchronize()
out = worker.step(read=1, stored=2, loaded=1)
cuda.synchronize()
""",
    ),
    bug(
        "steptron_state_rebuilt_before_it_arrived",
        "https://github.com/stepfun-ai/SteptronOss/pull/38",
        HOST,
        """
def tensor_to_dict(buffer, shapes, target):
    found = {}
    offset = 0
    for name, shape in shapes.items():
        count = shape.numel() * 4
        part = buffer[offset : offset + count].to(target, non_blocking=True)  #1
        cuda.current_stream().synchronize()  #fix
        found[name] = torch.empty(shape)
        found[name].view(-1).copy_(part.view(torch.float32))  #2
        offset += count
    return found

buffer = torch.arange(8.0, device="cuda").view(torch.uint8)
state = tensor_to_dict(buffer, {"weight": torch.Size([4]), "bias": torch.Size([4])}, "cpu")
""",
    ),
    bug(
        "mrpro_image_moved_without_waiting",
        "https://github.com/PTB-MR/mrpro/issues/984",
        HOST,
        """
class Data:
    def __init__(self, **fields):
        self.__dict__.update(fields)

    def _to(self, device, non_blocking):
        fields = self.__dict__.items()
        return Data(**{k: v.to(device, non_blocking=non_blocking) for k, v in fields})  #1

    def cpu(self):
        return self._to("cpu", non_blocking=True)  #bug
        return self._to("cpu", non_blocking=False)  #fix

image = Data(coils=torch.ones(4, 8, device="cuda"), mask=torch.ones(8, device="cuda")).cpu()
peak = image.coils.abs().max()  #2
""",
    ),
    bug(
        "torchtitan_pool_overwritten_while_reloaded",
        "https://github.com/pytorch/torchtitan/pull/2581",
        WAR,
        """
class Offloader:
    def __init__(self):
        self.d2h, self.h2d = cuda.Stream(), cuda.Stream()
        self.slab = torch.empty(64, pin_memory=True)

    def pack(self, tensor):
        compute = cuda.current_stream()
        with cuda.stream(self.d2h):
            self.d2h.wait_stream(cuda.current_stream())  #bug
            self.d2h.wait_stream(compute)  #fix
            self.slab.copy_(tensor, non_blocking=True)  #2
        tensor.record_stream(self.d2h)

    def unpack(self):
        self.h2d.wait_stream(self.d2h)
        with cuda.stream(self.h2d):
            tensor = self.slab.to("cuda", non_blocking=True)  #1
        cuda.current_stream().wait_stream(self.h2d)
        tensor.record_stream(cuda.current_stream())
        return tensor

offloader = Offloader()
for step in range(2):
    activation = torch.ones(64, device="cuda")
    offloader.pack(activation)
    del activation
    gradient = offloader.unpack() * 2
cuda.synchronize()
""",
    ),
    bug(
        "deepspeed_overflow_read_in_the_statement_that_copies",
        "https://github.com/deepspeedai/DeepSpeed/pull/501",
        HOST,
        """
def has_inf_or_nan(x, buffer):
    total = float(buffer.copy_(x.float().sum(), non_blocking=True))  #bug #1 #2
    buffer.copy_(x.float().sum(), non_blocking=True)  #fix
    cuda.current_stream().synchronize()  #fix
    total = float(buffer)  #fix
    return total == float("inf") or total != total

buffer = torch.zeros((), pin_memory=True)
overflow = has_inf_or_nan(torch.ones(64, device="cuda").half(), buffer)
""",
    ),
    bug(
        "prime_rl_state_dropped_while_it_is_written_back",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/3109",
        UAF,
        """
class Chunked:
    def __init__(self, count):
        self.d2h = cuda.Stream()
        self.states = [torch.ones(64, pin_memory=True) for _ in range(count)]

    def step(self):
        for pinned in self.states:
            state = pinned.to("cuda", non_blocking=True)  #2
            state.mul_(0.9)
            self.d2h.wait_stream(cuda.current_stream())
            with cuda.stream(self.d2h):
                state.record_stream(self.d2h)  #fix
                pinned.copy_(state, non_blocking=True)  #1
            del state

Chunked(3).step()
cuda.synchronize()
""",
    ),
    bug(
        "keys_values_event_recorded_before_the_concatenation",
        "https://github.com/awslabs/keys_values/pull/138",
        RAW,
        """
d2h = cuda.Stream()
checkpoint = torch.empty(2, 64, pin_memory=True)
ready = cuda.Event()
cells = [torch.ones(32, device="cuda") for _ in range(2)]
for layer in range(2):
    ready.record()  #bug
    joined = torch.cat(cells)  #1
    ready.record()  #fix
    d2h.wait_event(ready)
    with cuda.stream(d2h):
        checkpoint[layer].copy_(joined, non_blocking=True)  #2
    joined.record_stream(d2h)
cuda.synchronize()
""",
    ),
    bug(
        "fsdp_scaler_copies_found_inf_before_it_is_reduced",
        "https://github.com/pytorch/pytorch/pull/115710",
        RAW,
        _DIST
        + """
found_infs = [torch.zeros((), device="cuda") for _ in range(2)]
reduced = [found_inf.clone() for found_inf in found_infs]
futures = []
for found_inf, on_device in zip(found_infs, reduced):
    futures.append(dist.all_reduce(on_device, async_op=True))  #1
    found_inf.copy_(on_device)  #bug #2
for future in futures:
    future.wait()
for found_inf, on_device in zip(found_infs, reduced):  #fix
    found_inf.copy_(on_device)  #fix
""",
    ),
    bug(
        "torchrec_random_stream_taken_for_the_default_one",
        "https://github.com/meta-pytorch/torchrec/pull/3306",
        RAW,
        """
class Pipeline:
    def __init__(self, table):
        self.default_stream = cuda.Stream()  #bug
        self.default_stream = cuda.current_stream()  #fix
        self.prefetch_stream = cuda.Stream()
        self.table = table
        self.cache = torch.zeros_like(table)

    def prefetch(self, ids):
        self.prefetch_stream.wait_stream(self.default_stream)
        with cuda.stream(self.prefetch_stream):
            self.cache.index_copy_(0, ids, self.table.index_select(0, ids))  #1

    def forward(self, ids):
        self.default_stream.wait_stream(self.prefetch_stream)
        return self.cache.index_select(0, ids).sum(0)  #2

pipeline = Pipeline(torch.ones(8, 16, device="cuda"))
ids = torch.tensor([1, 3], device="cuda")
cuda.synchronize()
pipeline.prefetch(ids)
pooled = pipeline.forward(ids)
cuda.synchronize()
""",
    ),
    bug(
        "dgl_features_of_a_transfer_stream_not_recorded",
        "https://github.com/dmlc/dgl/pull/4250",
        UAF,
        """
class Transferer:
    def __init__(self):
        self.stream = cuda.Stream()

    def start(self, batch):
        with cuda.stream(self.stream):
            moved = batch.to("cuda", non_blocking=True)  #2
        return moved, self.stream.record_event()

    def wait(self, moved, event):
        cuda.current_stream().wait_event(event)
        moved.record_stream(cuda.current_stream())  #fix
        return moved

transferer = Transferer()
for step in range(2):
    features = transferer.wait(*transferer.start(torch.ones(64).pin_memory()))
    loss = features.square().sum()  #1
    del features
cuda.synchronize()
""",
    ),
    bug(
        "openmm_graph_replayed_on_a_stream_of_its_own",
        "https://github.com/openmm/openmm-torch/pull/122",
        RAW,
        """
context = cuda.Stream()
positions = torch.zeros(64, device="cuda")
graph = cuda.CUDAGraph()
with cuda.graph(graph):
    forces = positions * 2
cuda.synchronize()
with cuda.stream(context):
    positions.add_(1)  #1
torch_stream = cuda.Stream()  #bug
torch_stream = context  #fix
with cuda.stream(torch_stream):
    graph.replay()  #2
cuda.synchronize()
""",
    ),
    bug(
        "xpu_graph_waits_for_the_stream_of_the_capture",
        "https://github.com/XPU-Forces/xpu_graph/pull/491",
        HOST,
        """
class Runner:
    def __init__(self):
        self.stream = cuda.Stream()
        self.x = torch.zeros(8, device="cuda")
        self.out = torch.zeros(8, pin_memory=True)
        self.graph = cuda.CUDAGraph()
        cuda.synchronize()
        with cuda.graph(self.graph, stream=self.stream):
            self.out.copy_(self.x * 2, non_blocking=True)

    def forward(self, value):
        self.x.copy_(value)
        self.graph.replay()  #bug #1
        self.stream.wait_stream(cuda.current_stream())  #fix
        with cuda.stream(self.stream):  #fix
            self.graph.replay()  #fix
        self.stream.synchronize()
        return self.out.tolist()  #2

values = Runner().forward(torch.ones(8, device="cuda"))
""",
    ),
    bug(
        "pytorch_batches_of_a_loading_thread_seen_twice",
        "https://github.com/pytorch/pytorch/issues/21589",
        UAF,
        """
import queue
import threading
batches = queue.Queue()

def load():
    with cuda.stream(cuda.Stream()):
        for step in range(2):
            host = torch.full((64,), float(step)).pin_memory()
            image = host.to("cuda", non_blocking=True)  #2
            cuda.current_stream().synchronize()
            batches.put(image)
            del image
            batches.join()

thread = threading.Thread(target=load)
thread.start()
for step in range(2):
    image = batches.get()
    image.record_stream(cuda.current_stream())  #fix
    output = image.square().sum()  #1
    del image
    batches.task_done()
thread.join()
cuda.synchronize()
""",
    ),
    bug(
        "caffe_prefetched_batch_overwritten_while_it_is_copied",
        "https://github.com/BVLC/caffe/pull/2998",
        WAR,
        """
stream = cuda.Stream()
batches = [torch.full((64,), float(step)).pin_memory() for step in range(3)]
prefetched = torch.empty(64, device="cuda")
for batch in batches:
    with cuda.stream(stream):
        prefetched.copy_(batch, non_blocking=True)  #2
    stream.synchronize()
    top = prefetched.clone()  #1
    cuda.current_stream().synchronize()  #fix
""",
    ),
)


def _case(name: str, source: str, text: str) -> Case:
    return case(name, source, (), text)


CORRECT: tuple[Case, ...] = (
    _case(
        "sources_dropped_after_copies_on_their_own_stream",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/3312",
        """
weights = {f"layer{i}": torch.ones(64, device="cuda") * i for i in range(3)}
staged = {}
for name, value in weights.items():
    full = value.half()
    buffer = torch.empty(64, dtype=torch.float16, pin_memory=True)
    buffer.copy_(full, non_blocking=True)
    staged[name] = buffer
    del full
cuda.synchronize()
saved = {name: buffer.tolist() for name, buffer in staged.items()}
""",
    ),
    _case(
        "one_event_for_successive_steps_is_only_late",
        "https://github.com/vllm-project/vllm/pull/39115",
        """
done = cuda.Event()
outputs, values = [], []
for step in range(4):
    sampled = torch.full((8,), step, device="cuda")
    outputs.append(sampled.to("cpu", non_blocking=True))
    done.record()
    if step:
        done.synchronize()
        values.append(outputs[step - 1].tolist())
done.synchronize()
values.append(outputs[-1].tolist())
""",
    ),
    _case(
        "last_of_several_collectives_of_one_group_awaited",
        "https://github.com/vllm-project/vllm-ascend/pull/11961",
        _DIST
        + """
parts = [torch.ones(16, device="cuda") for _ in range(3)]
wholes = [torch.empty(16, device="cuda") for _ in range(3)]
for part, whole in zip(parts, wholes):
    handle = dist.all_gather_into_tensor(whole, part, async_op=True)
handle.wait()
joined = torch.cat(wholes)
""",
    ),
    _case(
        "loading_thread_hands_over_an_event",
        "https://github.com/official-stockfish/nnue-pytorch/pull/456",
        """
import queue
import threading
batches = queue.Queue(maxsize=1)

def prefetch(stream):
    for step in range(3):
        host = torch.full((64,), float(step)).pin_memory()
        with cuda.stream(stream):
            batch = host.to("cuda", non_blocking=True)
            ready = stream.record_event()
        batches.put((batch, ready))
        del batch
    batches.put(None)

thread = threading.Thread(target=prefetch, args=(cuda.Stream(),))
thread.start()
while (found := batches.get()) is not None:
    batch, ready = found
    cuda.current_stream().wait_event(ready)
    batch.record_stream(cuda.current_stream())
    loss = batch.square().mean()
    del batch, found
thread.join()
""",
    ),
    _case(
        "wrapped_loader_moves_the_next_batch",
        "https://github.com/ray-project/ray/pull/22716",
        """
class Wrapped:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.copies = cuda.Stream()

    def fetch(self):
        item = next(self.loader, None)
        if item is None:
            return None
        with cuda.stream(self.copies):
            return tuple(part.to("cuda", non_blocking=True) for part in item)

    def __iter__(self):
        upcoming = self.fetch()
        while upcoming is not None:
            current = upcoming
            cuda.current_stream().wait_stream(self.copies)
            for part in current:
                part.record_stream(cuda.current_stream())
            upcoming = self.fetch()
            yield current

data = [(torch.ones(8, 4).pin_memory(), torch.zeros(8).pin_memory()) for _ in range(3)]
model = nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in Wrapped(data):
    optimizer.zero_grad()
    F.mse_loss(model(x).squeeze(1), y).backward()
    optimizer.step()
""",
    ),
    _case(
        "chunks_gathered_from_a_prefetch_stream",
        "https://github.com/hpcaitech/ColossalAI/pull/5781",
        _DIST
        + """
prefetch = cuda.Stream()
shards = [torch.ones(16).pin_memory() for _ in range(3)]
chunks = [torch.empty(16, device="cuda") for _ in range(3)]
prefetch.wait_stream(cuda.current_stream())

def start(i):
    with cuda.stream(prefetch):
        shard = shards[i].to("cuda", non_blocking=True)
        return dist.all_gather_into_tensor(chunks[i], shard, async_op=True), shard

work = start(0)
for i in range(3):
    upcoming = start(i + 1) if i < 2 else None
    handle, shard = work
    handle.wait()
    out = chunks[i].sum()
    work = upcoming
cuda.synchronize()
""",
    ),
    _case(
        "gathered_buffers_taken_in_turns",
        "https://github.com/pytorch/pytorch/pull/108234",
        """
unshard = cuda.Stream()
buffers = [torch.empty(64, device="cuda") for _ in range(2)]
freed = [None, None]
shards = [torch.full((64,), float(i), device="cuda") for i in range(5)]
unshard.wait_stream(cuda.current_stream())
outs = []
for i, shard in enumerate(shards):
    turn = i % 2
    if freed[turn] is not None:
        unshard.wait_event(freed[turn])
    with cuda.stream(unshard):
        buffers[turn].copy_(shard)
        gathered = unshard.record_event()
    cuda.current_stream().wait_event(gathered)
    outs.append(buffers[turn].exp())
    freed[turn] = cuda.current_stream().record_event()
cuda.synchronize()
""",
    ),
)
