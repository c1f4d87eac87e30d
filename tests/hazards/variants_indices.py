"""Variants of caches whose rows are written and read on several streams by index."""

from __future__ import annotations

from hazard_case import RAW, WAR, WAW, Case
from upstream_case import Bug, bug

_VLLM = "https://github.com/vllm-project/vllm/blob/main/vllm/v1/worker/gpu_model_runner.py"
_NOTES = "https://github.com/pytorch/pytorch/blob/main/docs/source/notes/cuda.rst"

_PAGED = """
main = cuda.current_stream()
kv = torch.zeros(16, 8, device="cuda")
slots = torch.tensor([[3, 9], [1, 12], [7, 0], [14, 5]], device="cuda")
values = torch.ones(2, 8, device="cuda")
cuda.synchronize()
"""

BUGS: tuple[Bug, ...] = (
    bug(
        "slots_of_this_step_read_aside",
        _VLLM,
        RAW,
        _PAGED
        + """
kv[slots[0]] = values
written = main.record_event()
for step in range(1, 4):
    kv[slots[step]] = values  #1
    s.wait_event(written)
    with cuda.stream(s):
        y = kv[slots[step]] * 2  #2 #bug
        y = kv[slots[step - 1]] * 2  #fix
    written = main.record_event()
main.wait_stream(s)
""",
    ),
    bug(
        "slots_of_the_second_dimension",
        _VLLM,
        WAR,
        """
kv = torch.zeros(2, 16, 8, device="cuda")
read, written = torch.tensor([0, 4, 6], device="cuda"), torch.tensor([1, 5, 9], device="cuda")
written[1] = 4  #bug
values = torch.ones(2, 3, 8, device="cuda")
cuda.synchronize()
y = kv[:, read] * 2  #1
with cuda.stream(s):
    kv[:, written] = values  #2
cuda.synchronize()
""",
    ),
    bug(
        "blocks_and_offsets_within_them",
        _VLLM,
        RAW,
        """
kv = torch.zeros(8, 4, 16, device="cuda")
blocks = torch.tensor([3, 3, 6], device="cuda")
offsets = torch.tensor([0, 1, 2], device="cuda")
values = torch.ones(3, 16, device="cuda")
cuda.synchronize()
kv[blocks, offsets] = values  #1
with cuda.stream(s):
    y = kv[blocks, offsets] * 2  #2 #bug
    y = kv[blocks, offsets + 1] * 2  #fix
cuda.synchronize()
""".replace("[0, 1, 2]", "[0, 2, 2]"),
    ),
)


def _copies(name: str, first: str, second: str, same: str, kind: tuple[str, ...]) -> Bug:
    """Two streams work on rows of one tensor, by index: other ones, or ``same``."""
    return bug(
        name,
        _NOTES,
        kind,
        f"""
main, other = cuda.current_stream(), cuda.Stream()
cache = torch.zeros(16, 8, device="cuda")
low, high = torch.arange(8, device="cuda"), torch.arange(8, 16, device="cuda")
rows, columns = torch.ones(8, 8, device="cuda"), torch.ones(16, 4, device="cuda")
left, right = torch.arange(4, device="cuda"), torch.arange(4, 8, device="cuda")
s.wait_stream(main)
other.wait_stream(main)
with cuda.stream(s):
    {first}  #1
with cuda.stream(other):
    {same}  #2 #bug
    {second}  #fix
main.wait_stream(s)
main.wait_stream(other)
y = cache * 2
""",
    )


BUGS += (
    _copies(
        "rows_copied_by_index",
        "cache.index_copy_(0, low, rows)",
        "cache.index_copy_(0, high, rows)",
        "cache.index_copy_(0, high - 1, rows)",
        WAW,
    ),
    _copies(
        "columns_copied_by_index",
        "cache.index_copy_(1, left, columns)",
        "cache.index_copy_(1, right, columns)",
        "cache.index_copy_(-1, right - 1, columns)",
        WAW,
    ),
    _copies(
        "rows_added_by_index",
        "cache.index_add_(0, low, rows)",
        "cache.index_add_(0, high, rows)",
        "cache.index_add_(0, low, rows)",
        WAW,
    ),
    _copies(
        "rows_filled_and_selected_by_index",
        "cache.index_fill_(0, low, 1.0)",
        "y = cache.index_select(0, high)",
        "y = cache.index_select(0, high - 4)",
        RAW,
    ),
    _copies(
        "rows_put_and_accumulated",
        "cache.index_put_((low,), rows, accumulate=True)",
        "cache.index_put_((high,), rows)",
        "cache.index_put_((high - 3,), rows)",
        WAW,
    ),
    _copies(
        "rows_copied_into_halves",
        "cache[:8].index_copy_(0, low, rows)",
        "cache[8:].index_copy_(0, low, rows)",
        "cache[4:].index_copy_(0, low, rows)",
        WAW,
    ),
)

CASES: tuple[Case, ...] = ()
