"""Order between streams: waits, events, what an operator touches."""

from __future__ import annotations

from hazard_case import RAW, WAR, WAW, Case, case

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
)
