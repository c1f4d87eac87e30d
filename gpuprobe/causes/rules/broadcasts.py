"""Results of broadcasting, or of a matrix product, that are far larger than what they are computed
from, and than what is made of them: differences or products of all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import PRODUCTS, STATE, Excess, LiveMemory
from gpuprobe.causes.wording import of_names, saved_by
from gpuprobe.model.causes import Bound
from gpuprobe.model.run.holders import Kept
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_FACTOR = 4
_CHUNKS = 8
_ELEMENT_WISE: Final = frozenset(
    (
        *("log_sigmoid_forward", "log_sigmoid_backward", "softplus_backward", "hardswish"),
        *("native_dropout", "native_dropout_backward", "tril", "triu", "_prelu_kernel"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
        *("huber_loss", "mse_loss", "smooth_l1_loss"),
    )
)
"""Operators of torch 2.13 that are element by element without its tag; losses if they are not
reduced."""


def _reduced_in_place(live: LiveMemory, row: int) -> int:
    """The bytes that remain of a larger tensor of the same size to which a row is added in place,
    and of which only a small part, or none, is read later; 0 if it is not.
    """
    if not live.text("last_name", row).endswith("_") or live.results(row):
        return 0
    into = [
        one
        for one in live.rows
        if live.ledger.requested[one] == live.ledger.requested[row]
        and live.lives.made[one] < live.lives.last[row] < live.lives.last[one]
        and live.is_temporary(one)
    ]
    last = [live.made_by.get(live.lives.last[one]) for one in into]
    small = [one for one in last if one is not None]
    if len(small) < len(into) or not into:
        return 0
    most = max(live.ledger.requested[one] for one in small)
    return most if _FACTOR * most <= live.ledger.requested[row] else 0


def _is_element_wise(live: LiveMemory, row: int) -> bool:
    return live.how(row) is Made.POINTWISE or live.text("made_name", row) in _ELEMENT_WISE


def _of_pairs(live: LiveMemory, row: int) -> bool:
    """Whether a row is a matrix product of two tensors, neither of them a weight."""
    if live.text("made_name", row) not in PRODUCTS:
        return False
    operands = live.operands(row)
    return bool(operands) and not any(live.category(one) in STATE for one in operands)


class _Combined(NamedTuple):
    """A combination of all pairs with what is computed from it element by element, and the bytes
    that remain: of what the forward pass makes of them, or else of what the backward pass does.
    """

    rows: set[int]
    remains: int


def _combined(live: LiveMemory, root: int) -> _Combined | None:
    """What is made of a root; None of a matrix product of which little remains only by another
    product, as of weights of attention, or without a backward pass: other rules have these.
    """
    requested = live.ledger.requested
    group, results = {root}, {False: 0, True: 0}  # the largest, by whether a backward makes it
    product_of_pairs = live.how(root) is not Made.POINTWISE
    ready = [root]
    while ready:
        row = ready.pop()
        for product in live.results(row):
            backward = live.in_backward(product)
            if product_of_pairs and not backward and live.text("made_name", product) in PRODUCTS:
                return None
            if _is_element_wise(live, product) and 2 * requested[product] >= requested[row]:
                if product not in group:
                    group.add(product)
                    ready.append(product)
            elif live.how(product) is Made.OTHER and _FACTOR * requested[product] <= requested[row]:
                results[backward] = max(results[backward], requested[product])
        results[False] = max(results[False], _reduced_in_place(live, row))
    remains = results[False] or results[True]
    trained = any(live.text("last_phase", row).startswith("backward") for row in group)
    if product_of_pairs and not (trained and remains):
        return None
    return _Combined(group, remains)


def _same_shape(live: LiveMemory, row: int) -> str:
    """What to do if the pairs of two tensors of as many elements are a mistake, as of a target of
    shape (N,) and a prediction of (N, 1); "" if a row has no such operands.
    """
    width, requested = live.column("width"), live.ledger.requested
    operands = [one for one in live.operands(row) if width[one]]
    elements = {requested[one] // width[one] for one in operands}
    if len(operands) != 2 or len(elements) != 1 or not width[row]:
        return ""
    if requested[row] // width[row] != elements.pop() ** 2:
        return ""
    return (
        "if their elements belong together one by one, give both the same shape (.squeeze(-1)): "
        "one has a dimension of 1 too many. Otherwise, "
    )


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Results of at least four times their inputs that are reduced again, by element-wise operators
    and a sum, or so.
    """
    requested, inputs = live.ledger.requested, live.column("inputs")
    roots = [
        row
        for row in range(len(inputs))
        if inputs[row]
        and requested[row] >= _FACTOR * inputs[row]
        and (live.how(row) is Made.POINTWISE or _of_pairs(live, row))
    ]
    made = {row: one for row in roots if (one := _combined(live, row)) is not None}
    forward = [row for row in made if not live.in_backward(row)]
    group = {row for one in made.values() for row in one.rows}
    remains = max((one.remains for one in made.values()), default=0)
    rows = [row for row in live.rows if row in group]
    if not rows or not remains or not forward:
        return
    main = max(forward, key=lambda row: (live.size[row], row in live.needs, -live.lives.made[row]))
    pairs = [row for row in sorted(live.operands(main)) if row in live.needs]
    held = {row: live.holders.get(row) for row in pairs}
    # The name of a graph that saved it is not that of the pair.
    tensors = [row for row, one in held.items() if one is None or one.kept is Kept.TENSOR]
    of_pairs = of_names(live, tensors) if tensors else ""
    saved = saved_by(live, rows)
    chunks = "in chunks"
    if any(map(live.for_backward, rows)):  # otherwise the graph keeps those of all chunks
        chunks += ", each under torch.utils.checkpoint.checkpoint"
    if live.how(main) is Made.POINTWISE:
        chunks += (
            ", or without the pairs: a square by norms and a matrix product (torch.cdist), a "
            "cosine similarity as a matrix product of normalized rows"
        )
    yield Excess(
        Answer(
            "broadcast-intermediate",
            f"{human_bytes(live.bytes_of(rows))}{of_names(live, rows)} are combinations of all "
            f"pairs{of_pairs}: {live.text('made_name', main)} at {live.place(main)} makes "
            f"{human_bytes(requested[main])} of {human_bytes(inputs[main])}, of which "
            f"{human_bytes(made[main].remains or remains)} remain{saved}",
            f"{_same_shape(live, main)}compute it {chunks}",
        ),
        main,
        rows,
        f"in chunks of an eighth ({_CHUNKS} of them, none saved for a backward pass)",
        sizes={row: live.size[row] // _CHUNKS for row in group},
        named=pairs,
        bound=Bound.OR_LESS,  # a matrix product has no pairs at all
    )
