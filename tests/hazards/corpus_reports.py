"""Bugs that were reported and repaired in public projects, cut down; each beside its repair."""

from __future__ import annotations

from hazard_case import HOST, RAW, UAF, WAW, Case, case

__all__ = ["CASES"]

_ONLOAD = "github.com/huggingface/diffusers/pull/13502"
_DISK = "github.com/huggingface/diffusers/pull/14657"
_RECORD = "github.com/huggingface/diffusers/pull/12721"
_CURRENT = "github.com/pytorch/pytorch/issues/2702"
_BACK = "github.com/sgl-project/sglang/pull/16493"
_PINNED = "github.com/pytorch/pytorch/issues/137878"
_DROPPED = "github.com/pytorch/pytorch/issues/130785"
_ONE_EVENT = "github.com/torch/cutorch/pull/222"
_RESET = "github.com/Netflix/vmaf/pull/1583"
_PING_PONG = "github.com/shader-slang/slangpy/issues/377"

_OFFLOAD = """
kept = [torch.ones(100000).pin_memory() for _ in range(3)]
x = torch.ones(100000, device="cuda")
outer = cuda.current_stream()
def onload(at):
    with cuda.stream(s):
        return kept[at].to("cuda", non_blocking=True)
"""

CASES: tuple[Case, ...] = (
    case(
        "weights_brought_in_and_not_awaited",
        _ONLOAD,
        RAW,
        _OFFLOAD
        + """
weight = onload(0)
x = x * weight
""",
    ),
    case(
        "weights_brought_in_and_awaited",
        _ONLOAD,
        (),
        _OFFLOAD
        + """
weight = onload(0)
outer.wait_stream(s)  #needed
x = x * weight
""",
    ),
    case(
        "weights_handed_back_while_they_are_read",
        _DISK,
        UAF,
        _OFFLOAD
        + """
for at in range(3):
    weight = onload(at)
    outer.wait_stream(s)
    x = x * weight
    weight = None
""",
    ),
    case(
        "weights_handed_back_after_they_are_read",
        _DISK,
        (),
        _OFFLOAD
        + """
for at in range(3):
    weight = onload(at)
    outer.wait_stream(s)  #needed
    x = x * weight
    outer.synchronize()  #needed
    weight = None
""",
    ),
    case(
        "record_stream_named_the_stream_of_the_copy",
        _RECORD,
        UAF,
        _OFFLOAD
        + """
for at in range(3):
    weight = onload(at)
    with cuda.stream(s):
        weight.record_stream(cuda.current_stream())
    outer.wait_stream(s)
    x = x * weight
    weight = None
""",
    ),
    case(
        "record_stream_named_the_stream_of_the_use",
        _RECORD,
        (),
        _OFFLOAD
        + """
for at in range(3):
    weight = onload(at)
    weight.record_stream(outer)  #needed
    outer.wait_stream(s)  #needed
    x = x * weight
    weight = None
""",
    ),
    case(
        "a_new_stream_for_the_second_half",
        _CURRENT,
        RAW,
        """
M = torch.empty(32, 32, device="cuda")
M.fill_(0.1)
with cuda.stream(s):
    for _ in range(3):
        K = torch.matmul(M, M) / 32
        s.synchronize()
""",
    ),
    case(
        "a_new_stream_that_waits_and_is_read_within",
        _CURRENT,
        (),
        """
M = torch.empty(32, 32, device="cuda")
M.fill_(0.1)
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    for _ in range(3):
        K = torch.matmul(M, M) / 32
        M -= K
        norm = M.norm().item()
""",
    ),
    case(
        "lengths_copied_back_and_used_at_once",
        _BACK,
        HOST,
        """
lengths = torch.ones(4, dtype=torch.long, device="cuda")
on_host = lengths.to("cpu", non_blocking=True)
total = sum(on_host.tolist())
""",
    ),
    case(
        "lengths_copied_back_while_the_host_works",
        _BACK,
        (),
        """
lengths = torch.ones(4, dtype=torch.long, device="cuda")
on_host = lengths.to("cpu", non_blocking=True)
done = cuda.Event()
done.record()  #needed
other = torch.zeros(4).add(1)
done.synchronize()  #needed
total = sum(on_host.tolist())
""",
    ),
    case(
        "blocking_copies_into_parts_of_a_pinned_buffer",
        _PINNED,
        (),
        """
x = torch.randn(5, 8, device="cuda")
first, second = (torch.zeros(10, 8).pin_memory() for _ in range(2))
first[:5, :].copy_(x)
second[torch.arange(5), :] = x.to("cpu")
total = first.sum() + second.sum()
""",
    ),
    case(
        "a_pinned_source_that_ends_with_its_function",
        _DROPPED,
        (),
        """
def load():
    A = torch.rand(100000, pin_memory=True)
    return A.cuda(non_blocking=True)
C = load()
again = torch.rand(100000, pin_memory=True)
again.fill_(1)
C.sum()
""",
    ),
    case(
        "one_event_for_several_streams",
        _ONE_EVENT,
        RAW,
        """
workers = [cuda.Stream() for _ in range(2)]
done = cuda.Event()
results = []
for worker in workers:
    with cuda.stream(worker):
        results.append(torch.ones(64, device="cuda"))
    done.record(worker)
done.wait()
total = results[0] + results[1]
""",
    ),
    case(
        "an_event_for_each_stream",
        _ONE_EVENT,
        (),
        """
workers = [cuda.Stream() for _ in range(2)]
results = []
for worker in workers:
    with cuda.stream(worker):
        results.append(torch.ones(64, device="cuda"))
    cuda.current_stream().wait_event(worker.record_event())  #needed
total = results[0] + results[1]
""",
    ),
    case(
        "a_sum_reset_on_one_stream_and_grown_on_another",
        _RESET,
        WAW,
        """
total = torch.empty(1, device="cuda")
frames = [torch.ones(64, device="cuda") for _ in range(3)]
s.wait_stream(cuda.current_stream())
for frame in frames:
    total.zero_()
    with cuda.stream(s):
        total.add_(1)
        s.synchronize()
""",
    ),
    case(
        "a_sum_reset_and_grown_in_order",
        _RESET,
        (),
        """
total = torch.empty(1, device="cuda")
frames = [torch.ones(64, device="cuda") for _ in range(3)]
for frame in frames:
    total.zero_()
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        total.add_(frame.sum())
    cuda.current_stream().wait_stream(s)  #needed
""",
    ),
    case(
        "ping_pong_passes_out_of_step",
        _PING_PONG,
        RAW,
        """
ping, pong = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
s.wait_stream(cuda.current_stream())
torch.mul(ping, 2, out=pong)
with cuda.stream(s):
    third = pong * 2
""",
    ),
    case(
        "ping_pong_passes_in_step",
        _PING_PONG,
        (),
        """
ping, pong = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
for _ in range(2):
    torch.mul(ping, 2, out=pong)
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        torch.mul(pong, 2, out=ping)
    cuda.current_stream().wait_stream(s)  #needed
""",
    ),
)
