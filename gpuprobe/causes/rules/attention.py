"""Attention weights that are saved for the backward pass: a number for each pair of positions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.causes.wording import for_variable
from gpuprobe.model.causes import Bound
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_SOFTMAX: Final = frozenset(("_softmax", "softmax", "_safe_softmax"))
_PRODUCTS: Final = frozenset(("bmm", "baddbmm", "matmul"))
_CONVERSION: Final = "_to_copy"
"""Under autocast, the softmax computes in float32, and both products in half precision."""
_OF_GRADIENTS: Final = _PRODUCTS | {
    "_softmax_backward_data",
    "native_dropout_backward",
    _CONVERSION,
}
_DROPOUT: Final = "native_dropout"
_MEAN: Final = "mean"
"""`MultiheadAttention` makes the mean of the weights over the heads, to return it."""
_LEAST: Final = 0.5
"""Weights are this many times as large as what they are a product of, at least. Of 128 positions
and heads of 64 numbers, they are as large as queries and keys together; those of gates are smaller.
"""
_TRANSFORMERS: Final = "/transformers/models/"
_MULTIHEAD: Final = "torch/nn/functional.py", "multi_head_attention_forward"


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Weights of a product, which only another product reads, and their gradients. What else reads
    them, such as a loss, needs them: then there is no cause. Nor if scores are read elsewhere, such
    as those that the next layer adds to its own.
    """
    parts: dict[int, set[int]] = {}
    needed: set[Place | NoPlace] = set()
    for row in range(len(live.ledger)):
        if live.text("made_name", row) not in _SOFTMAX:
            continue
        scores = _scores(live, row)
        if scores is None or not live.is_temporary(row):
            continue
        read, copies = _multiplied(live, row), _copies(live, scores)
        if read is not None:
            parts[row] = read | scores | copies
            if _is_read(live, scores, {row, *scores, *copies}):
                needed.add(live.place(row))  # the code of all layers that compute there
    weights = [row for row in parts if live.place(row) not in needed]
    group = {one for row in weights for one in parts[row]}
    saved = [row for row in weights if live.for_backward(row)]
    if not saved:
        return
    group |= _gradients(live, group)
    group |= live.internals(group)
    rows = [row for row in live.rows if row in group]
    main = live.largest(saved)
    at = live.place(main)
    yield Excess(
        Answer(
            "attention-weights",
            f"{human_bytes(live.bytes_of(rows))}{for_variable(live, main)} are attention weights "
            f"from {at}, with a number for each pair of positions: the autograd graph "
            f"keeps {human_bytes(live.bytes_of(saved))} of them for the backward pass, and only "
            "the product with the values reads them",
            *_remedy(live, main, group),
        ),
        main,
        rows,
        "without the weights, as fused attention computes it",
        sizes=dict.fromkeys(group, 0),
        kept_at=at if isinstance(at, Place) else None,
        bound=Bound.OR_MORE if any(map(partial(_is_sum, live), group)) else Bound.EXACT,
    )


def _is_sum(live: LiveMemory, row: int) -> bool:
    """Whether a row of the forward pass is a sum with another tensor of its size, as of scores of
    relative positions: that has to be computed for ``attn_mask``.
    """
    both = live.column("inputs")[row] >= 2 * live.ledger.requested[row]
    return both and live.text("made_name", row) == "add" and not live.in_backward(row)


def _remedy(live: LiveMemory, row: int, group: set[int]) -> tuple[str, str]:
    """In words and as code. ``group``: the weights, scores and what is made of them."""
    file, function = _MULTIHEAD
    if function in live.functions(row, file):
        return (
            "pass need_weights=False to nn.MultiheadAttention, if the weights that it returns are "
            "not used: it calls torch.nn.functional.scaled_dot_product_attention then",
            "need_weights=False",
        )
    if any(_TRANSFORMERS in name for name in live.files(row)):
        return (
            "let Transformers compute attention by scaled_dot_product_attention, if the model "
            "supports it and nothing reads the weights (output_attentions): attn_implementation in "
            "from_pretrained or in the configuration",
            'attn_implementation="sdpa"',
        )
    columns = ("made_name", "first_name", "last_name")
    forward = [one for one in group if not live.in_backward(one)]
    names = {live.text(column, one) for column in columns for one in forward}
    arguments = "".join(
        argument for argument, by in _ARGUMENTS.items() if any(one in names for one in by)
    )
    return (
        "use torch.nn.functional.scaled_dot_product_attention, which keeps no weights, and divides "
        "by the square root of the heads' size itself (or multiplies by scale=). Pass what else "
        "this attention does: attn_mask= (True where attention is allowed, so ~mask of "
        "a masked_fill; numbers are added), is_causal=True for a causal mask, dropout_p=",
        f"torch.nn.functional.scaled_dot_product_attention(q, k, v{arguments})",
    )


_ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    ", attn_mask=~mask": ("masked_fill", "masked_fill_"),
    ", attn_mask=mask": ("where", "add", "add_"),
    ", dropout_p=p if self.training else 0.0": (_DROPOUT, "bernoulli_"),
}
"""By operators between the two products, what the call has to pass."""


def _scores(live: LiveMemory, row: int) -> set[int] | None:
    """What weights were computed from element by element, up to the product; None without one."""
    elements = _elements(live, row)
    scores: set[int] = set()
    for source in live.sources(row):
        if _elements(live, source) != elements:
            return None
        scores.add(source)
        name = live.text("made_name", source)
        if name in _PRODUCTS:
            size = live.ledger.requested[source]
            return scores if _LEAST * live.column("inputs")[source] <= size else None
        if live.how(source) is not Made.POINTWISE and name != _CONVERSION:
            return None
    return None


def _copies(live: LiveMemory, scores: set[int]) -> set[int]:
    """The copies of scores that nothing reads, kept to be returned: there are no scores to copy."""
    return {
        product
        for score in scores
        for product in live.products.get(score, ())
        if live.how(product) is Made.COPY
        and _elements(live, product) == _elements(live, score)
        and not live.column("last_use")[product]
    }


def _is_read(live: LiveMemory, scores: set[int], attention: set[int]) -> bool:
    """Whether the forward pass computes something else of scores than ``attention``."""
    results = {result for score in scores for result in live.results(score)} - attention
    return not all(live.in_backward(one) for one in results)


def _elements(live: LiveMemory, row: int) -> int:
    """The numbers in a row."""
    return live.ledger.requested[row] // max(live.column("width")[row], 1)


def _multiplied(live: LiveMemory, row: int) -> set[int] | None:
    """Weights with what dropout and conversions make of them, if a matrix product reads these and
    nothing else but their own backward pass does; None otherwise.
    """
    multiplied = False
    weights = {row}
    ready = [row]
    while ready:
        for product in live.products.get(ready.pop(), ()):
            name = live.text("made_name", product)
            if live.in_backward(product):
                continue
            if name in (_DROPOUT, _CONVERSION) and product not in weights:
                weights.add(product)
                # A mask of dropout has as many elements; only the backward pass reads it.
                if _elements(live, product) == _elements(live, row):
                    ready.append(product)
            elif name in _PRODUCTS:
                multiplied = True
            elif name != _MEAN or live.products.get(product):
                return None
    return weights if multiplied else None


def _gradients(live: LiveMemory, group: set[int]) -> set[int]:
    """The gradients of weights and scores, which the backward pass makes in their sizes."""
    sizes = {live.ledger.requested[row] for row in group}
    return {
        row
        for row, size in enumerate(live.ledger.requested)
        if size in sizes and live.in_backward(row) and live.text("made_name", row) in _OF_GRADIENTS
    }
