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
)

# -- weights that live on the host

BUGS += ()

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

CASES += ()
