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

_DEPTH: Final = 16
"""Operators in a row of one function: GELU by its formula has eight."""

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
    roots, functions = _functions(live)
    for root, saved in functions.items():
        wasted = saved if live.for_backward(root) else saved[1:]
        if not wasted:
            continue
        line = live.kinds[wasted[0]][0][0]  # of the function, by whoever calls it
        by_line.setdefault(line, []).extend(wasted)
        names.setdefault(line, set()).update(_operators(live, roots, root))
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
                *_remedy(names[line], of_library=_in_library(live, main), scaled=line in scaled),
            ),
            main,
            rows,
            "with the input saved alone",
            sizes={row: 0 for row in live.alike(rows) if roots.inside(row) is not None},
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


def _functions(live: LiveMemory) -> tuple[_Roots, Mapping[int, list[int]]]:
    """By the input of a function of one tensor, in which two tensors that come from it are
    multiplied, what its operators save for the backward pass, in order.
    """
    roots = _Roots(live)
    saved: dict[int, list[int]] = {}
    products: set[int] = set()
    for row in sorted(live.rows):
        root, result = roots.of(row), roots.inside(row)
        if root is None or result is None or not live.for_backward(row):
            continue
        saved.setdefault(root, []).append(row)
        if live.text("made_name", result) == "mul" and len(live.operands(result)) > 1:
            products.add(root)
    return roots, {root: rows for root, rows in saved.items() if root in products}


class _Roots:
    """The tensors that others are computed from element by element, and alone, in one function of
    the program.
    """

    def __init__(self, live: LiveMemory) -> None:
        self._live = live
        self._known: dict[int, int | None] = {}

    def of(self, row: int, depth: int = _DEPTH) -> int | None:
        """The tensor that a row is a function of; None if there are none, or several."""
        if row not in self._known:
            self._known[row] = self._found(row, depth)
        return self._known[row]

    def inside(self, row: int) -> int | None:
        """What an operator of the same function makes of a row; None of the result of a function,
        which the operator after it needs.
        """
        root, result = self.of(row), self._live.made_by.get(self._live.lives.first[row])
        if root is None or result is None or self.of(result) != root:
            return None
        return result if _same_function(self._live, result, row) else None

    def _found(self, row: int, depth: int) -> int | None:
        live = self._live
        if live.how(row) is not Made.POINTWISE or not depth:
            return None
        roots = set()
        for operand in live.operands(row):
            if live.ledger.requested[operand] != live.ledger.requested[row]:
                return None
            root = self.of(operand, depth - 1) if _same_function(live, operand, row) else None
            roots.add(operand if root is None else root)
        return roots.pop() if len(roots) == 1 else None


def _same_function(live: LiveMemory, one: int, other: int) -> bool:
    """Whether one call of a function of the program made both."""
    first, second = live.place(one), live.place(other)
    if isinstance(first, NoPlace) or isinstance(second, NoPlace):
        return False
    outer = [live.kinds[row][0][1:] for row in (one, other)]
    same = (first.file, first.function) == (second.file, second.function)
    return same and outer[0] == outer[1]


def _operators(live: LiveMemory, roots: _Roots, root: int) -> set[str]:
    """The names of the operators of a function, by its input."""
    made = {row for row in live.products.get(root, ()) if live.how(row) is Made.POINTWISE}
    more = set(made)
    while more:
        more = {
            after for row in more for after in live.products.get(row, ()) if roots.of(after) == root
        } - made
        made |= more
    return {live.text("made_name", row) for row in made}
