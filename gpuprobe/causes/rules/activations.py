"""Functions of one tensor that are written as several operators, each of which saves a tensor for
its backward pass, where the input alone is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.model.place import NoPlace
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made
from gpuprobe.user_frames import Owner, owner_of

_TWICE: Final = 1.9
"""A product of two tensors that are as large as it reads this much of its size, at least."""

_FUSED: Final = (
    ({"erf"}, "torch.nn.functional.gelu(x)"),
    ({"softplus", "tanh"}, "torch.nn.functional.mish(x)"),
    ({"tanh"}, 'torch.nn.functional.gelu(x, approximate="tanh")'),
    ({"sigmoid"}, "torch.nn.functional.silu(x)"),
)
"""Operators of a function, and the one of torch that saves its input only. Read from PyTorch's
``derivatives.yaml``: the backward passes of gelu, mish and silu take ``self``."""


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """What the functions of one line save, except their inputs."""
    by_line: dict[object, list[int]] = {}
    names: dict[object, set[str]] = {}
    scaled: set[object] = set()
    for root, saved in _functions(live).items():
        wasted = saved if live.for_backward(root) else saved[1:]
        if not wasted:
            continue
        line = live.kinds[wasted[0]][0][0]  # of the function, by whoever calls it
        by_line.setdefault(line, []).extend(wasted)
        names.setdefault(line, set()).update(_operators(live, root))
        if any(
            live.text("made_name", row) == "sigmoid" and live.source(row) != root for row in saved
        ):
            scaled.add(line)
    for line, rows in by_line.items():
        main = live.largest(rows)
        yield Excess(
            Answer(
                "saved-twice",
                f"{human_bytes(live.bytes_of(rows))} from {live.place(main)} are saved for the "
                "backward pass in addition to the input that they are computed from: each "
                f"operator of the function ({', '.join(sorted(names[line]))}) saves its own",
                *_remedy(
                    names[line], of_library=_in_library(live, main), scaled=line in scaled
                ),
            ),
            main,
            rows,
            "with the input saved alone",
            sizes=dict.fromkeys(live.alike(rows), 0),
        )


def _remedy(names: set[str], *, of_library: bool, scaled: bool) -> tuple[str, str]:
    """The remedy in words and as code. ``scaled``: the sigmoid is one of the input times a number,
    as in the approximation of GELU by 1.702.
    """
    for needed, code in _FUSED:
        if scaled and needed == {"sigmoid"}:
            code = "torch.nn.functional.silu(a * x) / a"
        if needed <= names and of_library:
            return (
                f"the function is a library's: have its model use {code}, which saves its input "
                "only (in transformers the configuration names the activation)",
                "",
            )
        if needed <= names:
            return f"use {code}, which saves its input only", code
    return (
        "compute it in one function that saves its input only: torch.compile it, or use "
        "torch.utils.checkpoint.checkpoint, or a torch.autograd.Function",
        "",
    )


def _in_library(live: LiveMemory, row: int) -> bool:
    """Whether a library, and not the program, called the operator."""
    owners = (owner_of(frame.filename) for frame in live.frames(row))
    return next((one for one in owners if one in _CALLERS), None) is Owner.LIBRARY


_CALLERS: Final = (Owner.USER, Owner.LIBRARY)


def _functions(live: LiveMemory) -> Mapping[int, list[int]]:
    """By the input of a function of one tensor, in which two tensors that come from it are
    multiplied, what is saved for the backward pass, in order.
    """
    saved: dict[int, list[int]] = {}
    products: set[int] = set()
    for row in sorted(live.rows):
        root = _root(live, row)
        if root is None or not live.for_backward(row):
            continue
        saved.setdefault(root, []).append(row)
        product = live.made_by.get(live.lives.first[row])
        if product is not None and _is_product(live, product, row, root):
            products.add(root)
    return {root: rows for root, rows in saved.items() if root in products}


def _root(live: LiveMemory, row: int) -> int | None:
    """The tensor that a row is computed from, element by element and without another one, in one
    function of the program; None if it is not.
    """
    root = None
    at = row
    for source in live.sources(row):
        if not _is_alone(live, at, source):
            break
        root = source
        if not _same_function(live, source, row):
            break
        at = source
    return root


def _is_alone(live: LiveMemory, row: int, source: int) -> bool:
    return (
        live.how(row) is Made.POINTWISE
        and live.ledger.requested[row] == live.ledger.requested[source]
        and live.column("inputs")[row] == live.ledger.requested[source]
    )


def _is_product(live: LiveMemory, row: int, factor: int, root: int) -> bool:
    """Whether a row is the product of a factor that comes from the root and of another tensor that
    is the root or comes from it.
    """
    if live.how(row) is not Made.POINTWISE or live.text("made_name", row) != "mul":
        return False
    if live.column("inputs")[row] < _TWICE * live.ledger.requested[row]:
        return False
    source = live.source(row)
    same = source is not None and root in (source, _root(live, source))
    return same and _same_function(live, row, factor)


def _same_function(live: LiveMemory, one: int, other: int) -> bool:
    """Whether one call of a function of the program made both."""
    first, second = live.place(one), live.place(other)
    if isinstance(first, NoPlace) or isinstance(second, NoPlace):
        return False
    outer = [live.kinds[row][0][1:] for row in (one, other)]
    same = (first.file, first.function) == (second.file, second.function)
    return same and outer[0] == outer[1]


def _operators(live: LiveMemory, root: int) -> set[str]:
    """The names of the operators of a function, by its input."""
    made = {row for row in live.products.get(root, ()) if live.how(row) is Made.POINTWISE}
    more = set(made)
    while more:
        more = {
            after
            for row in more
            for after in live.products.get(row, ())
            if _root(live, after) == root
        } - made
        made |= more
    return {live.text("made_name", row) for row in made}
