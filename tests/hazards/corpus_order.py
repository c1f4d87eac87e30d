"""Order between streams: waits, events, what an operator touches."""

from __future__ import annotations

from hazard_case import RAW, WAR, WAW, Case, case

__all__ = ["CASES"]

_NOTES = "PyTorch notes, CUDA semantics: CUDA streams"
_SAN = "PyTorch docs, CUDA stream sanitizer"
_EVENT = "CUDA programming guide: events"

CASES: tuple[Case, ...] = (
    case(
        "article",
        _NOTES,
        RAW,
        """
A = torch.empty(100, 100, device="cuda").normal_(0.0, 1.0)
with cuda.stream(s):
    B = torch.sum(A)
""",
    ),
    case(
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
    case(
        "missing_join",
        _NOTES,
        RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
z = y + 1
""",
    ),
    case(
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
    case(
        "write_while_read",
        _SAN,
        WAR,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
x.add_(1)
""",
    ),
    case(
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
    case(
        "two_writers",
        _SAN,
        WAW,
        """
x = torch.zeros(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    x.fill_(1)
x.fill_(2)
""",
    ),
    case(
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
    case(
        "event_recorded_too_early",
        _EVENT,
        RAW,
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
    case(
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
    case(
        "event_never_recorded",
        _EVENT,
        RAW,
        """
x = torch.ones(64, device="cuda")
e = cuda.Event()
s.wait_event(e)
with cuda.stream(s):
    y = x.sum()
""",
    ),
    case(
        "event_recorded_again_later",
        _EVENT,
        (),
        """
x = torch.ones(64, device="cuda")
e = cuda.Event()
e.record()  #needed
s.wait_event(e)  #needed
x2 = torch.ones(64, device="cuda")
e.record()
with cuda.stream(s):
    y = x.sum()
""",
    ),
    case(
        "event_recorded_again_too_late",
        _EVENT,
        RAW,
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
    case(
        "wait_in_the_wrong_direction",
        _EVENT,
        RAW,
        """
x = torch.ones(64, device="cuda")
cuda.current_stream().wait_stream(s)
with cuda.stream(s):
    y = x.sum()
""",
    ),
    case(
        "self_wait",
        _NOTES,
        RAW,
        """
x = torch.ones(64, device="cuda")
with cuda.stream(s):
    s.wait_stream(cuda.current_stream())
    y = x.sum()
""",
    ),
    case(
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
    case(
        "stream_left_set",
        _NOTES,
        RAW,
        """
x = torch.ones(64, device="cuda")
cuda.set_stream(s)
y = x.sum()
""",
    ),
    case(
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
    case(
        "generator_leaks_its_stream",
        "github.com/pytorch/pytorch/issues/94403",
        RAW,
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
    case(
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
    case(
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
    case(
        "host_waits_for_another_stream",
        _NOTES,
        RAW,
        """
other = cuda.Stream()
with cuda.stream(s):
    y = torch.ones(64, device="cuda")
other.synchronize()
z = y + 1
""",
    ),
    case(
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
    case(
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
)
