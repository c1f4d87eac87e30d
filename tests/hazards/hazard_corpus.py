"""Small programs that race, and look-alikes that do not; each with where it comes from.

Every text runs with ``torch``, ``cuda`` (``torch.cuda``), ``nn`` and ``F`` at hand, one virtual
GPU with a side stream ``s`` and the default stream current. ``kinds``: what has to be found;
empty for the safe ones, which must give no race at all. In a safe one, lines with a ``#needed``
mark are synchronisations without which it would race: the mutation test leaves out one at a time.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CASES", "Case"]


class Case(NamedTuple):
    name: str
    source: str
    kinds: tuple[str, ...]
    text: str


_RAW, _WAR, _WAW = ("read-after-write",), ("write-after-read",), ("write-after-write",)
_UAF, _HOST = ("use-after-free",), ("host-race",)
_NOTES = "PyTorch notes, CUDA semantics: CUDA streams"
_BACK = "PyTorch notes, CUDA semantics: stream semantics of backward passes"
_REC = "PyTorch docs, Tensor.record_stream"
_SAN = "PyTorch docs, CUDA stream sanitizer"
_PIN = "PyTorch tutorial, pin_memory and non_blocking"
_GRAPH = "PyTorch notes, CUDA semantics: CUDA graphs"
_SCHEMA = "PyTorch docs, CUDA sanitizer: operators and schemas"
_EVENT = "CUDA programming guide: events"
_ALLOC = "github.com/pytorch/pytorch/issues/179863"
_LOADER = "NVIDIA apex, examples/imagenet: data_prefetcher"


def _case(name: str, source: str, kinds: tuple[str, ...], text: str) -> Case:
    return Case(name, source, kinds, text.strip("\n") + "\n")


CASES: tuple[Case, ...] = (
    _case(
        "article",
        _NOTES,
        _RAW,
        """
A = torch.empty(100, 100, device="cuda").normal_(0.0, 1.0)
with cuda.stream(s):
    B = torch.sum(A)
""",
    ),
    _case(
        "article_repaired",
        _NOTES,
        (),
        """
A = torch.empty(100, 100, device="cuda").normal_(0.0, 1.0)
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    B = torch.sum(A)
A.record_stream(s)
""",
    ),
    _case(
        "missing_join",
        _NOTES,
        _RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
z = y + 1
""",
    ),
    _case(
        "joined",
        _NOTES,
        (),
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
cuda.current_stream().wait_stream(s)  #needed
z = y + 1
""",
    ),
    _case(
        "write_while_read",
        _SAN,
        _WAR,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
x.add_(1)
""",
    ),
    _case(
        "write_after_join",
        _SAN,
        (),
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
cuda.current_stream().wait_stream(s)  #needed
x.add_(1)
""",
    ),
    _case(
        "two_writers",
        _SAN,
        _WAW,
        """
x = torch.zeros(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    x.fill_(1)
x.fill_(2)
""",
    ),
    _case(
        "two_writers_ordered",
        _SAN,
        (),
        """
x = torch.zeros(64, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    x.fill_(1)
cuda.synchronize()  #needed
x.fill_(2)
""",
    ),
    _case(
        "event_recorded_too_early",
        _EVENT,
        _RAW,
        """
x = torch.empty(64, device="cuda")
e = cuda.Event()
e.record()
x.fill_(1)
s.wait_event(e)
with cuda.stream(s):
    y = x.sum()
""",
    ),
    _case(
        "event_recorded_after",
        _EVENT,
        (),
        """
x = torch.empty(64, device="cuda")
e = cuda.Event()
x.fill_(1)
e.record()  #needed
s.wait_event(e)  #needed
with cuda.stream(s):
    y = x.sum()
""",
    ),
    _case(
        "event_never_recorded",
        _EVENT,
        _RAW,
        """
x = torch.ones(64, device="cuda")
e = cuda.Event()
s.wait_event(e)
with cuda.stream(s):
    y = x.sum()
""",
    ),
    _case(
        "event_recorded_again_later",
        _EVENT,
        (),
        """
x = torch.ones(64, device="cuda")
e = cuda.Event()
e.record()
s.wait_event(e)
x2 = torch.ones(64, device="cuda")
e.record()
with cuda.stream(s):
    y = x.sum()
""",
    ),
    _case(
        "event_recorded_again_too_late",
        _EVENT,
        _RAW,
        """
x = torch.ones(64, device="cuda")
e = cuda.Event()
e.record()
s.wait_event(e)
x.add_(1)
e.record()
with cuda.stream(s):
    y = x.sum()
""",
    ),
    _case(
        "wait_in_the_wrong_direction",
        _EVENT,
        _RAW,
        """
x = torch.ones(64, device="cuda")
cuda.current_stream().wait_stream(s)
with cuda.stream(s):
    y = x.sum()
""",
    ),
    _case(
        "self_wait",
        _NOTES,
        _RAW,
        """
x = torch.ones(64, device="cuda")
with cuda.stream(s):
    s.wait_stream(cuda.current_stream())
    y = x.sum()
""",
    ),
    _case(
        "outer_stream_captured",
        _NOTES,
        (),
        """
x = torch.ones(64, device="cuda")
outer = cuda.current_stream()
with cuda.stream(s):
    s.wait_stream(outer)  #needed
    y = x.sum()
""",
    ),
    _case(
        "stream_left_set",
        _NOTES,
        _RAW,
        """
x = torch.ones(64, device="cuda")
cuda.set_stream(s)
y = x.sum()
""",
    ),
    _case(
        "stream_set_and_waiting",
        _NOTES,
        (),
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
cuda.set_stream(s)
y = x.sum()
cuda.set_stream(cuda.default_stream())
""",
    ),
    _case(
        "generator_leaks_its_stream",
        "github.com/pytorch/pytorch/issues/94403",
        _RAW,
        """
def batches():
    with cuda.stream(s):
        for _ in range(2):
            yield torch.ones(64, device="cuda")
total = torch.zeros(64, device="cuda")
for batch in batches():
    total = total + batch
""",
    ),
    _case(
        "generator_scoped",
        "github.com/pytorch/pytorch/issues/94403",
        (),
        """
def batches():
    for _ in range(2):
        with cuda.stream(s):
            batch = torch.ones(64, device="cuda")
        cuda.current_stream().wait_stream(s)  #needed
        batch.record_stream(cuda.current_stream())
        yield batch
total = torch.zeros(64, device="cuda")
for batch in batches():
    total = total + batch
""",
    ),
    _case(
        "backward_on_side_stream",
        _BACK,
        ("write-after-write",),
        """
w = torch.ones(64, device="cuda", requires_grad=True)
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    loss = (w * 2).sum()
    loss.backward()
w.grad.add_(1)
""",
    ),
    _case(
        "backward_on_side_stream_joined",
        _BACK,
        (),
        """
w = torch.ones(64, device="cuda", requires_grad=True)
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    loss = (w * 2).sum()
    loss.backward()
cuda.current_stream().wait_stream(s)  #needed
w.grad.add_(1)
""",
    ),
    _case(
        "forward_here_backward_there",
        _BACK,
        ("write-after-write",),
        """
w = torch.ones(64, device="cuda", requires_grad=True)
loss = (w * 2).sum()
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    loss.backward()
w.grad.add_(1)
""",
    ),
    _case(
        "forward_on_side_backward_here",
        _BACK,
        (),
        """
w = torch.ones(64, device="cuda", requires_grad=True)
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    loss = (w * 2).sum()
cuda.current_stream().wait_stream(s)
loss.backward()
w.grad.add_(1)
""",
    ),
    _case(
        "batch_norm_statistics",
        _SCHEMA,
        _RAW,
        """
bn = nn.BatchNorm1d(8).cuda()
x = torch.ones(4, 8, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    bn(x)
m = bn.running_mean + 1
""",
    ),
    _case(
        "batch_norm_statistics_joined",
        _SCHEMA,
        (),
        """
bn = nn.BatchNorm1d(8).cuda()
x = torch.ones(4, 8, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = bn(x)
cuda.current_stream().wait_stream(s)  #needed
m = bn.running_mean + 1
""",
    ),
    _case(
        "offset_view",
        _SAN,
        _RAW,
        """
x = torch.zeros(128, device="cuda")
tail = x[64:]
s.wait_stream(cuda.current_stream())
tail.fill_(1)
with cuda.stream(s):
    y = x.sum()
""",
    ),
    _case(
        "disjoint_halves",
        _SAN,
        (),
        """
x = torch.zeros(128, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
x[:64].fill_(1)
with cuda.stream(s):
    x[64:].fill_(2)
""",
    ),
    _case(
        "disjoint_columns",
        _SAN,
        (),
        """
x = torch.zeros(16, 16, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
x[:, :8].add_(1)
with cuda.stream(s):
    x[:, 8:].add_(1)
""",
    ),
    _case(
        "overlapping_columns",
        _SAN,
        _WAW,
        """
x = torch.zeros(16, 16, device="cuda")
s.wait_stream(cuda.current_stream())
x[:, :9].add_(1)
with cuda.stream(s):
    x[:, 8:].add_(1)
""",
    ),
    _case(
        "set_aliases",
        _SAN,
        _RAW,
        """
x = torch.zeros(64, device="cuda")
alias = torch.empty(0, device="cuda").set_(x)
s.wait_stream(cuda.current_stream())
alias.fill_(1)
with cuda.stream(s):
    y = x.sum()
""",
    ),
    _case(
        "like_factory",
        _SAN,
        _RAW,
        """
x = torch.ones(64, device="cuda")
y = torch.zeros_like(x)
with cuda.stream(s):
    z = y + 1
""",
    ),
    _case(
        "dropped_while_read",
        _REC,
        _UAF,
        """
x = torch.ones(100000, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
del x
z = torch.zeros(100000, device="cuda")
""",
    ),
    _case(
        "dropped_after_record_stream",
        _REC,
        (),
        """
x = torch.ones(100000, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
x.record_stream(s)  #needed
del x
z = torch.zeros(100000, device="cuda")
""",
    ),
    _case(
        "dropped_after_wait",
        _REC,
        (),
        """
x = torch.ones(100000, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
cuda.current_stream().wait_stream(s)  #needed
del x
z = torch.zeros(100000, device="cuda")
""",
    ),
    _case(
        "dropped_but_another_size",
        _ALLOC,
        (),
        """
x = torch.ones(100000, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
kept = x
del x
z = torch.zeros(100000, device="cuda")
""",
    ),
    _case(
        "side_owned_dropped",
        _REC,
        _UAF,
        """
with cuda.stream(s):
    y = torch.ones(100000, device="cuda")
cuda.current_stream().wait_stream(s)
z = y * 2
del y
with cuda.stream(s):
    again = torch.zeros(100000, device="cuda")
""",
    ),
    _case(
        "side_owned_recorded",
        _REC,
        (),
        """
with cuda.stream(s):
    y = torch.ones(100000, device="cuda")
cuda.current_stream().wait_stream(s)  #needed
z = y * 2
y.record_stream(cuda.current_stream())  #needed
del y
with cuda.stream(s):
    again = torch.zeros(100000, device="cuda")
""",
    ),
    _case(
        "three_streams",
        _ALLOC,
        _UAF,
        """
third = cuda.Stream()
x = torch.ones(100000, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
third.wait_stream(s)
with cuda.stream(third):
    z = x * 3
cuda.current_stream().wait_stream(s)
del x
w = torch.zeros(100000, device="cuda")
""",
    ),
    _case(
        "storage_resized_away",
        "PyTorch FSDP: _free_storage",
        _UAF,
        """
x = torch.ones(100000, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
x.untyped_storage().resize_(0)
z = torch.zeros(100000, device="cuda")
""",
    ),
    _case(
        "storage_resized_after_wait",
        "PyTorch FSDP: _free_storage",
        (),
        """
x = torch.ones(100000, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
cuda.current_stream().wait_stream(s)  #needed
x.untyped_storage().resize_(0)
z = torch.zeros(100000, device="cuda")
""",
    ),
    _case(
        "copy_back_not_awaited",
        _PIN,
        _HOST,
        """
x = torch.ones(64, device="cuda")
h = x.to("cpu", non_blocking=True)
total = h.sum()
""",
    ),
    _case(
        "copy_back_awaited",
        _PIN,
        (),
        """
x = torch.ones(64, device="cuda")
h = x.to("cpu", non_blocking=True)
cuda.current_stream().synchronize()  #needed
total = h.sum()
""",
    ),
    _case(
        "copy_back_into_pinned",
        _PIN,
        _HOST,
        """
x = torch.ones(64, device="cuda")
h = torch.empty(64, pin_memory=True)
h.copy_(x, non_blocking=True)
values = h.tolist()
""",
    ),
    _case(
        "copy_back_event",
        _PIN,
        (),
        """
x = torch.ones(64, device="cuda")
h = torch.empty(64, pin_memory=True)
h.copy_(x, non_blocking=True)
e = cuda.Event()
e.record()  #needed
e.synchronize()  #needed
values = h.tolist()
""",
    ),
    _case(
        "copy_back_event_too_early",
        _PIN,
        _HOST,
        """
x = torch.ones(64, device="cuda")
h = torch.empty(64, pin_memory=True)
e = cuda.Event()
e.record()
h.copy_(x, non_blocking=True)
e.synchronize()
values = h.tolist()
""",
    ),
    _case(
        "blocking_copy_back",
        _PIN,
        (),
        """
x = torch.ones(64, device="cuda")
h = x.to("cpu")
total = h.sum()
""",
    ),
    _case(
        "refilled_too_early",
        _PIN,
        _HOST,
        """
h = torch.ones(64).pin_memory()
x = h.to("cuda", non_blocking=True)
h.fill_(2)
""",
    ),
    _case(
        "refilled_after_event",
        _PIN,
        (),
        """
h = torch.ones(64).pin_memory()
x = h.to("cuda", non_blocking=True)
e = cuda.Event()
e.record()  #needed
e.synchronize()  #needed
h.fill_(2)
""",
    ),
    _case(
        "two_slots_without_events",
        _PIN,
        _HOST,
        """
slots = [torch.empty(64, pin_memory=True) for _ in range(2)]
for step in range(4):
    slots[step % 2].fill_(step)
    x = slots[step % 2].to("cuda", non_blocking=True)
""",
    ),
    _case(
        "two_slots_with_events",
        _PIN,
        (),
        """
slots = [torch.empty(64, pin_memory=True) for _ in range(2)]
events = [cuda.Event() for _ in range(2)]
for step in range(4):
    events[step % 2].synchronize()  #needed
    slots[step % 2].fill_(step)
    x = slots[step % 2].to("cuda", non_blocking=True)
    events[step % 2].record()  #needed
""",
    ),
    _case(
        "numpy_alias_written",
        _PIN,
        _HOST,
        """
h = torch.ones(64).pin_memory()
array = h.numpy()
x = h.to("cuda", non_blocking=True)
array[:] = 3
""",
    ),
    _case(
        "numpy_alias_read",
        _PIN,
        _HOST,
        """
x = torch.ones(64, device="cuda")
h = torch.empty(64, pin_memory=True)
array = h.numpy()
h.copy_(x, non_blocking=True)
total = array.sum()
""",
    ),
    _case(
        "numpy_alias_awaited",
        _PIN,
        (),
        """
x = torch.ones(64, device="cuda")
h = torch.empty(64, pin_memory=True)
array = h.numpy()
h.copy_(x, non_blocking=True)
cuda.synchronize()  #needed
total = array.sum()
""",
    ),
    _case(
        "graph_input_written",
        _GRAPH,
        _WAR,
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    g.replay()
x.fill_(3)
""",
    ),
    _case(
        "graph_output_read",
        _GRAPH,
        _RAW,
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    g.replay()
z = y + 1
""",
    ),
    _case(
        "graph_ordered",
        _GRAPH,
        (),
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    g.replay()
cuda.current_stream().wait_stream(s)  #needed
x.fill_(3)
z = y + 1
""",
    ),
    _case(
        "graph_same_stream",
        _GRAPH,
        (),
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x * 2
for value in (1.0, 2.0):
    x.fill_(value)
    g.replay()
    z = y + 1
""",
    ),
    _case(
        "prefetching_loader",
        _LOADER,
        (),
        """
source = [torch.ones(64).pin_memory() for _ in range(3)]
def prefetch(host):
    with cuda.stream(s):
        return host.to("cuda", non_blocking=True)
following = prefetch(source[0])
for host in [*source[1:], None]:
    cuda.current_stream().wait_stream(s)  #needed
    batch = following
    batch.record_stream(cuda.current_stream())
    if host is not None:
        following = prefetch(host)
    y = batch * 2
""",
    ),
    _case(
        "prefetching_without_wait",
        _LOADER,
        (*_RAW, *_UAF),
        """
source = [torch.ones(64).pin_memory() for _ in range(3)]
for host in source:
    with cuda.stream(s):
        batch = host.to("cuda", non_blocking=True)
    y = batch * 2
""",
    ),
    _case(
        "host_waits_for_stream",
        _NOTES,
        (),
        """
with cuda.stream(s):
    y = torch.ones(64, device="cuda")
s.synchronize()  #needed
z = y + 1
""",
    ),
    _case(
        "host_waits_for_another_stream",
        _NOTES,
        _RAW,
        """
other = cuda.Stream()
with cuda.stream(s):
    y = torch.ones(64, device="cuda")
other.synchronize()
z = y + 1
""",
    ),
    _case(
        "item_then_other_write",
        "CUDA sanitizer: false alarm on .item()",
        (),
        """
x = torch.ones(64, device="cuda")
total = x.sum().item()
with cuda.stream(s):
    x.fill_(total)
""",
    ),
    _case(
        "transitive_order",
        _EVENT,
        (),
        """
third = cuda.Stream()
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
third.wait_stream(s)  #needed
with cuda.stream(third):
    z = x + y
""",
    ),
    _case(
        "capture_is_no_execution",
        _GRAPH,
        (),
        """
x = torch.ones(64, device="cuda")
g = cuda.CUDAGraph()
with cuda.graph(g):
    y = x + 1
cuda.current_stream().wait_stream(s)
x.fill_(2)
""",
    ),
    _case(
        "empty_tensor",
        "CUDA sanitizer: zero-element tensors",
        (),
        """
x = torch.ones(0, device="cuda")
with cuda.stream(s):
    y = x * 2
""",
    ),
    _case(
        "new_zeros_on_side",
        "CUDA sanitizer: false alarm on new_zeros",
        (),
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x.new_zeros(64)
    y.add_(1)
""",
    ),
    _case(
        "optimizer_on_side_stream",
        _BACK,
        (*_RAW, *_WAR),
        """
model = nn.Linear(8, 8).cuda()
sgd = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
model(torch.ones(2, 8, device="cuda")).sum().backward()
with cuda.stream(s):
    sgd.step()
""",
    ),
    _case(
        "optimizer_on_side_stream_ordered",
        _BACK,
        (),
        """
model = nn.Linear(8, 8).cuda()
sgd = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
model(torch.ones(2, 8, device="cuda")).sum().backward()
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    sgd.step()
cuda.current_stream().wait_stream(s)
""",
    ),
)
