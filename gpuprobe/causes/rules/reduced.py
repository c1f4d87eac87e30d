"""Matrix products, distances and resized tensors that are far larger than what they are computed
from, and than what is made of them: scores of all pairs of which the highest are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.causes.wording import of_names
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_FACTOR: Final = 4
_CHUNKS: Final = 8
_PRODUCTS: Final = frozenset(
    ("mm", "bmm", "baddbmm", "_cdist_forward", "_euclidean_dist", "matmul")
)
"""Not ``addmm``: a layer with a bias, and the layer after it reduces what it makes."""
_LAYER: Final = "convolution"
"""What a decoder resizes is the input of its next layer, which reduces none of that."""
_RESIZED: Final = ("upsample_", "_upsample_")
_ROW_WISE: Final = frozenset(("_softmax", "softmax"))
"""Not log-probabilities: `log_softmaxes` has them."""


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Results of at least four times their inputs, of which a quarter or less remains, and which no
    backward pass uses.
    """
    requested, inputs = live.ledger.requested, live.column("inputs")
    names = live.column("made_name")
    strings = live.ledger.trace.stacks.strings
    roots = [
        row
        for row in range(len(inputs))
        if inputs[row]
        and requested[row] >= _FACTOR * inputs[row]
        and (strings[names[row]] in _PRODUCTS or strings[names[row]].startswith(_RESIZED))
        and live.is_temporary(row)
    ]
    group, remains = _results(live, roots)
    group |= live.internals({one for row in group for one in live.products.get(row, ())})
    group = {row for row in group if not _is_mask(live, row)}  # that of all may be read at the end
    rows = [row for row in live.rows if row in group]
    if not rows or not remains:
        return
    if any(live.text("last_phase", row).startswith("backward") for row in group):
        return
    main = max(
        (row for row in roots if row in group),
        key=lambda row: (live.size[row], row in live.needs, row),
    )
    name = live.text("made_name", main)
    yield Excess(
        Answer(
            "reduced-later",
            f"{human_bytes(live.bytes_of(rows))}{of_names(live, rows)} are computed in whole: "
            f"{name} at {live.place(main)} makes {human_bytes(requested[main])} of "
            f"{human_bytes(inputs[main])}, of which {human_bytes(remains)} remain",
            _remedy(name),
        ),
        main,
        rows,
        f"in chunks of an eighth ({_CHUNKS} of them)",
        sizes={row: live.size[row] // _CHUNKS for row in group},
    )


def _results(live: LiveMemory, roots: list[int]) -> tuple[set[int], int]:
    """The roots of which little remains, with what is computed from them element by element or row
    by row; and the bytes that remain at most.
    """
    requested = live.ledger.requested
    widths = live.column("width")
    found: set[int] = set()
    most = 0
    for root in roots:
        group, remains = {root}, 0
        ready = [root]
        while ready:
            row = ready.pop()
            for product in live.products.get(row, ()):
                wider = widths[row] and widths[product] > widths[row]  # `conversions` has it
                same = not wider and (
                    live.how(product) in (Made.POINTWISE, Made.COPY)
                    or live.text("made_name", product) in _ROW_WISE
                )
                mask = _is_mask(live, product) and product in live.products
                share = widths[row] / widths[product] if mask else 1
                if same and 2 * share * requested[product] >= requested[root]:
                    if product not in group:
                        group.add(product)
                        ready.append(product)
                elif (
                    _FACTOR * requested[product] <= requested[root]
                    and live.text("made_name", product) != _LAYER
                ):
                    remains = max(remains, requested[product])
                else:
                    remains = requested[root]  # another large result needs it
        if 0 < _FACTOR * remains <= requested[root]:
            found |= group
            most = max(most, remains)
    return found, most


def _is_mask(live: LiveMemory, row: int) -> bool:
    """Whether a row is a comparison of each element of a wider one."""
    widths, source = live.column("width"), live.source(row)
    if source is None or live.how(row) is not Made.POINTWISE:
        return False
    return widths[row] == 1 < widths[source]


def _remedy(name: str) -> str:
    if name.startswith(_RESIZED):
        return (
            "reduce it before it is resized (an argmax of classes, resized with "
            'mode="nearest", differs a little at their edges); or resize and reduce it in chunks, '
            "or on the CPU"
        )
    return (
        "compute it in chunks of its rows, and reduce each chunk (topk, max, argmax) before the "
        "next; for attention, use torch.nn.functional.scaled_dot_product_attention (attn_mask= "
        "adds a bias)"
    )
