"""Variants of backward passes over several streams, streams that other libraries made, registered
weights and prefetchers.
"""

from __future__ import annotations

from hazard_case import HOST, RAW, UAF, WAR, Case, case
from upstream_case import Bug, bug

_TESTS = "PyTorch, test/test_cuda.py: test_streaming_backwards_multiple_streams"
_EXTERNAL = "https://github.com/pytorch/pytorch/blob/main/torch/cuda/streams.py"
_PINNED = "https://github.com/Comfy-Org/ComfyUI/blob/master/comfy/model_management.py"
_APEX = "https://github.com/NVIDIA/apex/blob/master/examples/imagenet/main_amp.py"

# -- a backward pass over several streams

_BRANCHES = """
class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor, ctx.stream = factor, cuda.current_stream()
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        assert cuda.current_stream() == ctx.stream
        return grad * ctx.factor, None

one, two, done, ambient = cuda.Stream(), cuda.Stream(), cuda.Event(), cuda.Stream()

def model(x):
    if AMBIENT:
        x0 = x.clone()
    one.wait_stream(cuda.current_stream())
    two.wait_stream(cuda.current_stream())
    with cuda.stream(one):
        if not AMBIENT:
            x0 = x.clone()
        y0 = Times.apply(x0, 2)
        done.record(cuda.current_stream())
    with cuda.stream(two):
        y1 = Times.apply(x, 3)
        two.wait_event(done)
        y = y0 + y1
    for tensor in (x0, y0):
        tensor.record_stream(one)
        tensor.record_stream(two)
    cuda.current_stream().wait_stream(two)
    y.record_stream(cuda.current_stream())
    return y

seen = []
with cuda.stream(ambient):
    x = torch.ones(5, 5, device="cuda", requires_grad=True)
    x.register_hook(lambda grad: seen.append(cuda.current_stream()))
    for _ in range(ITERATIONS):
        loss = model(x).sum()
        if APART:
            gradient = torch.autograd.grad((loss,), (x,))[0]
        else:
            loss.backward()
cuda.current_stream().wait_stream(ambient)
assert seen[0] == (ambient if AMBIENT else one)
result = (gradient if APART else x.grad) * 2
"""


def _branches() -> tuple[Case, ...]:
    found = []
    for ambient in (True, False):
        for apart, iterations in ((True, 1), (False, 1), (False, 5)):
            text = _BRANCHES.replace("AMBIENT", str(ambient)).replace("APART", str(apart))
            name = "ambient" if ambient else "branch"
            how = "apart" if apart else f"accumulated_{iterations}_times"
            text = text.replace("ITERATIONS", str(iterations))
            found.append(case(f"branches_{how}_first_used_on_the_{name}", _TESTS, (), text))
    return tuple(found)


# -- streams that other libraries made

_BLOCKING = """
import ctypes

def blocking():
    handle = ctypes.c_ulonglong(0)
    cuda.check_error(cuda.cudart().cudaStreamCreate(ctypes.addressof(handle)))
    return cuda.ExternalStream(handle.value)
"""

BUGS: tuple[Bug, ...] = (
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

CASES: tuple[Case, ...] = (
    *_branches(),
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

# -- weights that live on the host

BUGS += (
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
