"""Variants of graphs, external streams, recorded streams, offloaded weights and prefetchers."""

from __future__ import annotations

from hazard_case import HOST, RAW, UAF, WAR, WAW, Case, case
from upstream_case import Bug, bug

_GRAPHS = "https://github.com/pytorch/pytorch/blob/main/docs/source/notes/cuda.rst"
_EXTERNAL = "https://github.com/pytorch/pytorch/blob/main/torch/cuda/streams.py"
_RECORD = "https://github.com/pytorch/pytorch/blob/main/test/test_cuda.py"
_COMFY = "https://github.com/Comfy-Org/ComfyUI/pull/10501"
_PINNED = "https://github.com/Comfy-Org/ComfyUI/blob/master/comfy/model_management.py"
_APEX = "https://github.com/NVIDIA/apex/blob/master/examples/imagenet/main_amp.py"

# -- graphs

_GRAPH = """
x = torch.ones(64, device="cuda")
graph = cuda.CUDAGraph()
cuda.synchronize()
with cuda.graph(graph):
    h = x * 2
    y = h + 1
"""

BUGS: tuple[Bug, ...] = (
    bug(
        "graph_input_refilled_beside_its_replay",
        _GRAPHS,
        WAR,
        _GRAPH
        + """
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    graph.replay()  #1
cuda.current_stream().wait_stream(s)  #fix
x.fill_(2)  #2
cuda.synchronize()
""",
    ),
    bug(
        "graph_result_read_beside_its_replay",
        _GRAPHS,
        RAW,
        _GRAPH
        + """
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    graph.replay()  #1
cuda.current_stream().wait_stream(s)  #fix
z = y * 2  #2
cuda.synchronize()
del graph, h, y
""",
    ),
    bug(
        "graph_input_freed_while_it_is_replayed_aside",
        _GRAPHS,
        UAF,
        _GRAPH
        + """
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    graph.replay()  #1
cuda.current_stream().wait_stream(s)  #fix
del x
z = torch.zeros(64, device="cuda")  #2
cuda.synchronize()
""",
    ),
    bug(
        "graph_replayed_after_its_input_was_freed",
        _GRAPHS,
        UAF,
        _GRAPH
        + """
graph.replay()
del x  #1 #bug
graph.replay()  #2
cuda.synchronize()
""",
    ),
    bug(
        "graph_replayed_on_two_streams",
        _GRAPHS,
        WAW,
        _GRAPH
        + """
s.wait_stream(cuda.current_stream())
graph.replay()  #1
s.wait_stream(cuda.current_stream())  #fix
with cuda.stream(s):
    graph.replay()  #2
cuda.synchronize()
""",
    ),
)

CASES: tuple[Case, ...] = (
    case(
        "graph_and_its_tensors_freed_where_it_was_replayed",
        _GRAPHS,
        (),
        _GRAPH + "graph.replay()\nz = y * 2\ndel graph, h, y, x\n",
    ),
    case(
        "graph_replayed_and_freed_on_a_side_stream",
        _GRAPHS,
        (),
        """
with cuda.stream(s):
    x = torch.ones(64, device="cuda")
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        y = x * 2
    for _ in range(3):
        x.add_(1)
        graph.replay()
        z = y + 1
    graph.reset()
    del graph, y, x
    w = torch.zeros(64, device="cuda")
""",
    ),
    case(
        "graphs_of_a_function_that_returns",
        _GRAPHS,
        (),
        """
def run(value):
    graph, x = cuda.CUDAGraph(), torch.full((64,), value, device="cuda")
    with cuda.graph(graph):
        y = x.sin()
        z = y * 2
    graph.replay()
    return z.clone()

results = [run(float(at)) for at in range(4)]
total = torch.stack(results).sum()
""",
    ),
    case(
        "graph_intermediates_freed_within_the_capture",
        _GRAPHS,
        (),
        """
x = torch.ones(64, device="cuda")
graph = cuda.CUDAGraph()
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    with cuda.graph(graph, stream=s):
        h = x * 2
        y = h + 1
        del h
        k = y * 3
        del y
    graph.replay()
    z = k + 1
    graph.replay()
    del k
    del graph
cuda.current_stream().wait_stream(s)
""",
    ),
    case(
        "two_graphs_of_one_pool_replayed_and_freed",
        _GRAPHS,
        (),
        """
x = torch.ones(64, device="cuda")
pool = cuda.graph_pool_handle()
first, second = cuda.CUDAGraph(), cuda.CUDAGraph()
with cuda.graph(first, pool=pool):
    y = x * 2
with cuda.graph(second, pool=pool):
    z = y * 3
for _ in range(2):
    first.replay()
    second.replay()
    result = z + 1
del first, y
del second, z
again = torch.zeros(64, device="cuda")
""",
    ),
)

# -- streams that other libraries made

_BLOCKING = """
import ctypes

def blocking():
    handle = ctypes.c_ulonglong(0)
    cuda.check_error(cuda.cudart().cudaStreamCreate(ctypes.addressof(handle)))
    return cuda.ExternalStream(handle.value)
"""

BUGS += (
    bug(
        "blocking_stream_beside_a_stream_of_torch",
        _EXTERNAL,
        RAW,
        _BLOCKING
        + """
external = blocking()
with cuda.stream(external):
    x = torch.ones(64, device="cuda")  #1
s.wait_stream(external)  #fix
with cuda.stream(s):
    y = x * 2  #2
cuda.synchronize()
""",
    ),
    bug(
        "two_blocking_streams_with_nothing_between",
        _EXTERNAL,
        RAW,
        _BLOCKING
        + """
one, two = blocking(), blocking()
z = torch.ones(64, device="cuda")
with cuda.stream(one):
    x = torch.ones(64, device="cuda")  #1
z.add_(1)  #fix
with cuda.stream(two):
    y = x * 2  #2
cuda.synchronize()
""",
    ),
    bug(
        "host_reads_what_a_blocking_stream_copies",
        _EXTERNAL,
        HOST,
        _BLOCKING
        + """
external = blocking()
x = torch.ones(64, device="cuda")
with cuda.stream(external):
    host = x.to("cpu", non_blocking=True)  #1
cuda.current_stream().synchronize()  #fix
total = host.sum()  #2
""".replace("cuda.current_stream().synchronize()", "external.synchronize()"),
    ),
    bug(
        "block_of_a_torch_stream_reused_under_a_blocking_one",
        _EXTERNAL,
        UAF,
        _BLOCKING
        + """
external = blocking()
with cuda.stream(s):
    x = torch.ones(64, device="cuda")
external.wait_stream(s)
with cuda.stream(external):
    y = x * 2  #1
s.wait_stream(external)  #fix
del x
with cuda.stream(s):
    z = torch.zeros(64, device="cuda")  #2
cuda.synchronize()
""",
    ),
    bug(
        "side_stream_between_two_blocking_ones",
        _EXTERNAL,
        WAR,
        _BLOCKING
        + """
external = blocking()
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2  #1
external.wait_stream(s)  #fix
with cuda.stream(external):
    x.add_(1)  #2
cuda.synchronize()
""",
    ),
)

CASES += (
    case(
        "legacy_default_stream_and_a_blocking_one_by_turns",
        _EXTERNAL,
        (),
        _BLOCKING
        + """
external = blocking()
x = torch.ones(64, device="cuda")
for _ in range(3):
    with cuda.stream(external):
        x.mul_(2)
    x.add_(1)
""",
    ),
    case(
        "blocking_streams_ordered_by_the_default_one",
        _EXTERNAL,
        (),
        _BLOCKING
        + """
one, two = blocking(), blocking()
a = torch.ones(64, device="cuda")
with cuda.stream(one):
    x = a * 2
a.add_(1)
with cuda.stream(two):
    y = x + a
z = y * 2
""",
    ),
    case(
        "block_of_the_default_stream_used_by_a_blocking_one",
        _EXTERNAL,
        (),
        _BLOCKING
        + """
external = blocking()
for at in range(3):
    x = torch.full((64,), float(at), device="cuda")
    with cuda.stream(external):
        y = x * 2
    del x
z = y + 1
""",
    ),
    case(
        "event_of_the_default_stream_covers_a_blocking_one",
        _EXTERNAL,
        (),
        _BLOCKING
        + """
external = blocking()
with cuda.stream(external):
    x = torch.ones(64, device="cuda")
s.wait_stream(cuda.default_stream())
with cuda.stream(s):
    y = x * 2
cuda.synchronize()
""",
    ),
    case(
        "host_waits_for_the_default_stream_after_a_blocking_one",
        _EXTERNAL,
        (),
        _BLOCKING
        + """
external = blocking()
x = torch.ones(64, device="cuda")
with cuda.stream(external):
    host = torch.empty(64, pin_memory=True)
    host.copy_(x, non_blocking=True)
x.add_(1)
cuda.default_stream().synchronize()
total = host.sum()
""",
    ),
)

# -- record_stream

_RECORDED = """
main = cuda.current_stream()
t = torch.tensor([1.0, 2, 3, 4]).pin_memory()
result = torch.empty(4, device="cuda")
"""

CASES += (
    case(
        "recorded_for_a_stream_that_is_idle_then",
        f"{_RECORD}: test_record_stream",
        (),
        _RECORDED
        + """
def copy():
    with cuda.stream(s):
        block = t.cuda(non_blocking=True)
    main.wait_stream(s)
    block.record_stream(main)
    cuda._sleep(1000)
    result.copy_(block)

copy()
with cuda.stream(s):
    again = torch.empty(4, device="cuda")
    again.zero_()
assert result.tolist() == [1, 2, 3, 4]
main.synchronize()
with cuda.stream(s):
    third = torch.empty(4, device="cuda")
    third.zero_()
""",
    ),
    case(
        "recorded_for_two_streams",
        f"{_RECORD}: test_record_stream",
        (),
        _RECORDED
        + """
other = cuda.Stream()
block = torch.ones(4, device="cuda")
for stream in (s, other):
    block.record_stream(stream)
    stream.wait_stream(main)
    with cuda.stream(stream):
        y = block * 2
del block
again = torch.zeros(4, device="cuda")
s.synchronize()
other.synchronize()
third = torch.zeros(4, device="cuda")
""",
    ),
    case(
        "recorded_for_a_stream_that_never_works",
        f"{_RECORD}: test_record_stream",
        (),
        """
for _ in range(3):
    block = torch.ones(4, device="cuda")
    block.record_stream(s)
    y = block * 2
    del block
cuda.synchronize()
""",
    ),
    case(
        "recorded_again_after_the_host_has_waited",
        f"{_RECORD}: test_record_stream",
        (),
        """
with cuda.stream(s):
    block = torch.ones(4, device="cuda")
main = cuda.current_stream()
main.wait_stream(s)
block.record_stream(main)
y = block * 2
main.synchronize()
z = block * 3
del block
with cuda.stream(s):
    again = torch.zeros(4, device="cuda")
""",
    ),
    case(
        "recorded_for_the_stream_of_the_allocation",
        f"{_RECORD}: test_record_stream",
        (),
        """
with cuda.stream(s):
    block = torch.ones(4, device="cuda")
    block.record_stream(s)
    address = block.data_ptr()
    y = block * 2
    del block
    again = torch.zeros(4, device="cuda")
assert again.data_ptr() == address
""",
    ),
)

BUGS += (
    bug(
        "recorded_for_a_stream_that_does_not_read_it",
        _RECORD,
        UAF,
        """
main, other = cuda.current_stream(), cuda.Stream()
with cuda.stream(s):
    block = torch.ones(4, device="cuda")
main.wait_stream(s)
block.record_stream(other)  #bug
block.record_stream(main)  #fix
y = block * 2  #1
del block
with cuda.stream(s):
    again = torch.zeros(4, device="cuda")  #2
cuda.synchronize()
""",
    ),
    bug(
        "copy_of_a_view_recorded_instead",
        _RECORD,
        UAF,
        """
main = cuda.current_stream()
with cuda.stream(s):
    block = torch.ones(8, device="cuda")
main.wait_stream(s)
part = block[:4].clone()  #1
part.record_stream(s)  #bug
block[:4].record_stream(main)  #fix
y = part * 2
del block
with cuda.stream(s):
    again = torch.zeros(8, device="cuda")  #2
cuda.synchronize()
""",
    ),
    bug(
        "recorded_only_in_the_first_step",
        _RECORD,
        UAF,
        """
main = cuda.current_stream()
for step in range(3):
    with cuda.stream(s):
        block = torch.full((4,), float(step), device="cuda")  #2
    main.wait_stream(s)
    if step == 0:  #bug
        block.record_stream(main)  #bug
    block.record_stream(main)  #fix
    y = block * 2  #1
    del block
cuda.synchronize()
""",
    ),
)

# -- weights that live on the host

_CAST = """
offload = cuda.Stream()
host = [torch.ones(SIZE).pin_memory() for at in range(3)]

def cast(weight):
    with cuda.stream(offload):
        moved = torch.empty_like(weight, device="cuda")
        moved.copy_(weight, non_blocking=True)  #2
        USED
    cuda.current_stream().wait_stream(offload)
    return moved

def forward(x, weight):
    moved = cast(weight)
    result = x @ moved  #1
    offload.wait_stream(cuda.current_stream())  #fix
    return result

x = torch.ones(4, 64, device="cuda")
results = [forward(x, weight) for weight in host]
cuda.synchronize()
"""

BUGS += (
    bug(
        "cast_weight_freed_while_it_is_used",
        _COMFY,
        UAF,
        _CAST.replace("SIZE", "64, 64").replace("        USED\n", ""),
    ),
    bug(
        "cast_weight_freed_while_it_is_used_and_the_next_is_smaller",
        _COMFY,
        UAF,
        _CAST.replace("SIZE", "64, 64 - 8 * at").replace("        USED\n", ""),
    ),
    bug(
        "cast_weight_of_another_type_freed_while_it_is_used",
        _COMFY,
        UAF,
        """
offload = cuda.Stream()
host = [torch.ones(64, 64, dtype=torch.bfloat16).pin_memory() for _ in range(3)]
x = torch.ones(4, 64, device="cuda")
for weight in host:
    with cuda.stream(offload):
        moved = weight.to("cuda", non_blocking=True).float()  #2
    cuda.current_stream().wait_stream(offload)
    x = x @ moved  #1
    offload.wait_stream(cuda.current_stream())  #fix
    del moved
cuda.synchronize()
""",
    ),
    bug(
        "registered_weights_unregistered_while_they_are_copied",
        _PINNED,
        HOST,
        """
offload, runtime = cuda.Stream(), cuda.cudart()
weight = torch.ones(64, 64)
runtime.cudaHostRegister(weight.data_ptr(), weight.nbytes, 1)
with cuda.stream(offload):
    moved = weight.to("cuda", non_blocking=True)  #1
offload.synchronize()  #fix
runtime.cudaHostUnregister(weight.data_ptr())  #2
del weight
cuda.current_stream().wait_stream(offload)
y = moved * 2
cuda.synchronize()
""",
    ),
    bug(
        "registered_results_unregistered_before_they_arrived",
        _PINNED,
        HOST,
        """
runtime = cuda.cudart()
result = torch.empty(64, 64)
runtime.cudaHostRegister(result.data_ptr(), result.nbytes, 1)
x = torch.ones(64, 64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    result.copy_(x, non_blocking=True)  #1
    done = s.record_event()
done.synchronize()  #fix
runtime.cudaHostUnregister(result.data_ptr())  #2
cuda.synchronize()
""",
    ),
    bug(
        "device_weight_dropped_while_it_is_offloaded",
        _COMFY,
        UAF,
        """
offload = cuda.Stream()
kept = []
for at in range(3):
    weight = torch.full((64, 64), float(at), device="cuda")  #2
    offload.wait_stream(cuda.current_stream())
    with cuda.stream(offload):
        host = torch.empty(64, 64, pin_memory=True)
        host.copy_(weight, non_blocking=True)  #1
    weight.record_stream(offload)  #fix
    kept.append(host)
    del weight
cuda.synchronize()
""",
    ),
)

CASES += (
    case(
        "registered_weights_unregistered_at_the_end",
        _PINNED,
        (),
        """
runtime = cuda.cudart()
weights = [torch.ones(64, 64) for _ in range(3)]
for weight in weights:
    runtime.cudaHostRegister(weight.data_ptr(), weight.nbytes, 1)
x = torch.ones(4, 64, device="cuda")
for weight in weights:
    with cuda.stream(s):
        moved = weight.to("cuda", non_blocking=True)
    cuda.current_stream().wait_stream(s)
    x = x @ moved
    s.wait_stream(cuda.current_stream())
cuda.synchronize()
while weights:
    weight = weights.pop()
    runtime.cudaHostUnregister(weight.data_ptr())
""",
    ),
    case(
        "weights_of_the_pinned_allocator_dropped_while_copied",
        _PINNED,
        (),
        """
for at in range(3):
    weight = torch.full((64, 64), float(at)).pin_memory()
    with cuda.stream(s):
        moved = weight.to("cuda", non_blocking=True)
    del weight
    cuda.current_stream().wait_stream(s)
    y = moved * 2
    s.wait_stream(cuda.current_stream())
cuda.synchronize()
""",
    ),
)

# -- batches that differ in size

_PREFETCH = """
class Prefetcher:
    def __init__(self, loader):
        self.loader, self.stream = iter(loader), cuda.Stream()
        self.preload()

    def preload(self):
        self.batch = next(self.loader, None)
        if self.batch is None:
            return
        WAIT
        with cuda.stream(self.stream):
            self.batch = self.batch.cuda(non_blocking=True)

    def next(self):
        cuda.current_stream().wait_stream(self.stream)
        batch = self.batch
        if batch is not None:
            batch.record_stream(cuda.current_stream())  #fix
            pass
        self.preload()
        return batch

weight = torch.ones(1, device="cuda")
total = torch.zeros(1, device="cuda")
prefetcher = Prefetcher([torch.ones(size).pin_memory() for size in SIZES])
batch = prefetcher.next()
while batch is not None:
    product = batch * weight  #1
    total += product.sum()
    batch = prefetcher.next()  #2
END
"""


def _prefetch(name: str, sizes: str, end: str = "", text: str = _PREFETCH) -> Bug:
    text = text.replace("SIZES", sizes).replace("END\n", end).replace("        WAIT\n", "")
    return bug(name, _APEX, UAF, text)


BUGS += (
    _prefetch("prefetched_batches_grow", "(64, 256, 1024, 4096)"),
    _prefetch(
        "prefetched_batches_grow_and_are_awaited", "(64, 256, 1024, 4096)", "cuda.synchronize()\n"
    ),
    _prefetch("prefetched_batches_grow_in_large_pools", "(1000000, 2000000, 3000000, 4000000)"),
    _prefetch(
        "prefetched_batches_grow_in_large_pools_and_the_total_is_read",
        "(1000000, 2000000, 3000000, 4000000)",
        "total.item()\n",
    ),
    _prefetch("prefetched_batches_shrink_slowly", "(4000000, 3000000, 2000000)"),
)

CASES += (
    case(
        "growing_batches_behind_a_wait_for_the_consumer",
        _APEX,
        (),
        _PREFETCH.replace("batch.record_stream(cuda.current_stream())  #fix", "pass")
        .replace("WAIT", "self.stream.wait_stream(cuda.current_stream())")
        .replace("SIZES", "(64, 256, 1024, 4096)")
        .replace("  #1", "")
        .replace("  #2", "")
        .replace("while batch is not None:\n", "while batch is not None:\n    del_me = None\n")
        .replace("END\n", ""),
    ),
    case(
        "growing_batches_with_a_loss_read_in_each_step",
        _APEX,
        (),
        _PREFETCH.replace("batch.record_stream(cuda.current_stream())  #fix", "pass")
        .replace("        WAIT\n", "")
        .replace("SIZES", "(64, 256, 1024, 4096)")
        .replace("  #1", "")
        .replace(
            "    batch = prefetcher.next()  #2", "    total.item()\n    batch = prefetcher.next()"
        )
        .replace("END\n", ""),
    ),
    case(
        "growing_batches_kept_until_the_end",
        _APEX,
        (),
        """
batches = []
for size in (64, 256, 1024, 4096):
    host = torch.ones(size).pin_memory()
    with cuda.stream(s):
        batch = host.cuda(non_blocking=True)
    cuda.current_stream().wait_stream(s)
    total = batch.sum()
    batches.append(batch)
cuda.synchronize()
batches.clear()
""",
    ),
)
