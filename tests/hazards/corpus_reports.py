"""Bugs that were reported and repaired in public projects, cut down; each beside its repair."""

from __future__ import annotations

from hazard_case import RAW, Case, case

_BACK = "github.com/sgl-project/sglang/pull/16493"
_ONE_EVENT = "github.com/torch/cutorch/pull/222"
_PING_PONG = "github.com/shader-slang/slangpy/issues/377"


CASES: tuple[Case, ...] = (
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
