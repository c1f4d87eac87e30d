"""Variations on the documentation's examples, as users write them: the order of streams."""

from __future__ import annotations

from hazard_case import RAW, WAR, Case, case

CASES: tuple[Case, ...] = (
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
)
