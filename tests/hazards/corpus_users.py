"""Variations on the documentation's examples, as users write them: the order of streams."""

from __future__ import annotations

from hazard_case import RAW, WAR, WAW, Case, case

__all__ = ["CASES"]

CASES: tuple[Case, ...] = (
    case(
        "item_on_side_then_main",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    y = x * 2
    v = y.sum().item()
z = y + 1
""",
    ),
    case(
        "item_on_main_then_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda").normal_()
if x.sum() > 1e9:
    pass
with cuda.stream(s):
    y = x * 2
cuda.current_stream().wait_stream(s)  #needed
z = y + 1
""",
    ),
    case(
        "print_then_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda").normal_()
repr(x)
with cuda.stream(s):
    y = x * 2
""",
    ),
    case(
        "nonzero_then_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda").normal_()
n = (x > 0).nonzero()
with cuda.stream(s):
    y = x * 2
    k = n + 1
""",
    ),
    case(
        "mask_then_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda").normal_()
n = x[x > 0]
with cuda.stream(s):
    y = x * 2
""",
    ),
    case(
        "mask_result_read_on_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda").normal_()
n = x[x > 0]
with cuda.stream(s):
    y = n * 2
""",
    ),
    case(
        "event_synchronize",
        "CUDA programming guide: events",
        (),
        """
x = torch.ones(64, device="cuda").normal_()
e = cuda.Event(); e.record(); e.synchronize()
with cuda.stream(s):
    y = x * 2
""",
    ),
    case(
        "event_synchronize_too_early",
        "CUDA programming guide: events",
        RAW,
        """
x = torch.ones(64, device="cuda")
e = cuda.Event(); e.record()
x.normal_()
e.synchronize()
with cuda.stream(s):
    y = x * 2
""",
    ),
    case(
        "event_query_loop",
        "CUDA programming guide: events",
        (),
        """
x = torch.ones(64, device="cuda").normal_()
e = cuda.Event(); e.record()
while not e.query():
    pass
with cuda.stream(s):
    y = x * 2
""",
    ),
    case(
        "stream_query_loop",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda").normal_()
while not cuda.current_stream().query():
    pass
with cuda.stream(s):
    y = x * 2
""",
    ),
    case(
        "cpu_is_blocking",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda").normal_()
h = x.cpu()
with cuda.stream(s):
    y = x * 2
""",
    ),
    case(
        "wait_stream_before_later_write",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
x.add_(1)
with cuda.stream(s):
    y = x * 2
""",
    ),
    case(
        "two_readers",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
x = torch.ones(64, device="cuda")
t = cuda.Stream()
s.wait_stream(cuda.current_stream()); t.wait_stream(cuda.current_stream())
with cuda.stream(s):
    a = x * 2
with cuda.stream(t):
    b = x * 3
c = x * 4
""",
    ),
    case(
        "two_side_writers",
        "PyTorch notes, CUDA semantics: CUDA streams",
        WAW,
        """
x = torch.ones(64, device="cuda")
t = cuda.Stream()
s.wait_stream(cuda.current_stream()); t.wait_stream(cuda.current_stream())
with cuda.stream(s):
    x.fill_(2)
with cuda.stream(t):
    x.fill_(3)
""",
    ),
    case(
        "out_argument",
        "PyTorch notes, CUDA semantics: CUDA streams",
        WAR,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
torch.add(x, 1, out=x)
""",
    ),
    case(
        "out_on_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda"); z = torch.empty(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    torch.mul(x, 2, out=z)
w = z + 1
""",
    ),
    case(
        "foreach_on_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
xs = [torch.ones(64, device="cuda") for _ in range(3)]
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    torch._foreach_add_(xs, 1.0)
y = xs[2] * 2
""",
    ),
    case(
        "foreach_on_side_joined",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
xs = [torch.ones(64, device="cuda") for _ in range(3)]
s.wait_stream(cuda.current_stream())  #needed
with cuda.stream(s):
    torch._foreach_add_(xs, 1.0)
cuda.current_stream().wait_stream(s)  #needed
y = xs[2] * 2
""",
    ),
    case(
        "cat_of_side_results",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
parts = [x]
with cuda.stream(s):
    parts.append(x * 2)
y = torch.cat(parts)
""",
    ),
    case(
        "index_from_side",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    i = torch.argsort(x)
y = x[i]
""",
    ),
    case(
        "thread_uses_default_stream",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
import threading
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
out = []
with cuda.stream(s):
    x.mul_(2)
    th = threading.Thread(target=lambda: out.append(x + 1))
    th.start(); th.join()
""",
    ),
    case(
        "thread_given_the_stream",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
import threading
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
out = []
def work():
    with cuda.stream(s):
        out.append(x + 1)
with cuda.stream(s):
    x.mul_(2)
    th = threading.Thread(target=work)
    th.start(); th.join()
cuda.current_stream().wait_stream(s)
""",
    ),
    case(
        "thread_on_side_read_on_main",
        "PyTorch notes, CUDA semantics: CUDA streams",
        RAW,
        """
import threading
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
out = []
def work():
    with cuda.stream(s):
        out.append(x + 1)
th = threading.Thread(target=work)
th.start(); th.join()
y = out[0] * 2
""",
    ),
    case(
        "thread_on_side_synchronized",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
import threading
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())  #needed
out = []
def work():
    with cuda.stream(s):
        out.append(x + 1)
    s.synchronize()  #needed
th = threading.Thread(target=work)
th.start(); th.join()
y = out[0] * 2
""",
    ),
    case(
        "two_threads_default_stream",
        "PyTorch notes, CUDA semantics: CUDA streams",
        (),
        """
import threading
x = torch.ones(64, device="cuda")
def work():
    x.add_(1)
ths = [threading.Thread(target=work) for _ in range(2)]
for th in ths: th.start(); th.join()
y = x * 2
""",
    ),
)
