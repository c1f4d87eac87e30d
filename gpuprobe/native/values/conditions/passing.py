"""What becomes of a number that C code gets or compares: only text, a sum, or the larger of two."""

from __future__ import annotations

import ast
import builtins
from types import FrameType
from typing import Final

from gpuprobe.native.values.conditions.blocks import prints
from gpuprobe.native.values.conditions.source import (
    WITHIN,
    SourceTree,
    evaluated,
    loads,
    name_of,
    reading_of,
    source_of,
)

_TEXT: Final = frozenset({"str", "repr", "format"})
_AVERAGES: Final = frozenset({"average", "mean", "std", "sum", "var"})
"""Functions of NumPy whose result is NaN if a number is."""
_NUMBERS: Final = frozenset({"abs", "float", "round"}) | _AVERAGES


def only_text(frame: FrameType, *, averaged: bool = False) -> bool:
    """Whether the number that a frame reads at its current instruction only becomes text: in an
    f-string, by ``%``, ``str.format`` or ``print``, also after arithmetic and under a local name.
    ``averaged``: code of NumPy reads it, which the frame calls.
    """
    source = source_of(frame)
    if source is None:
        return False
    nodes = evaluated(reading_of(frame), source)
    if averaged:
        nodes = [node for node in nodes if _called(node) in _AVERAGES]
    none: frozenset[str] = frozenset()
    # Where the interpreter keeps only lines, the nodes are all calls of one.
    return bool(nodes) and all(
        _formats(node) or _is_text(node) or _to_text(node, source, none) for node in nodes
    )


def only_added(frame: FrameType) -> bool:
    """Whether the number that a frame reads at its current instruction is added to a sum, as in
    ``right += (a == b).sum().item()``.
    """
    source = source_of(frame)
    nodes = [] if source is None else evaluated(reading_of(frame), source)
    statements = [] if source is None else [_passed_on(node, source) for node in nodes]
    return bool(nodes) and all(
        isinstance(one, ast.AugAssign) and isinstance(one.op, (ast.Add, ast.Sub))
        for one in statements
    )


def _passed_on(node: ast.AST, source: SourceTree) -> ast.AST | None:
    """What gets the value of an expression, or the result of arithmetic with that value."""
    while isinstance(parent := source.parents.get(node), (ast.BinOp, ast.UnaryOp)):
        node = parent
    return parent


def _is_text(node: ast.AST) -> bool:
    """Whether a call makes text of its arguments, and does nothing else."""
    return isinstance(node, ast.Call) and (prints(node) or _called(node) in _TEXT)


def _called(node: ast.expr) -> str:
    return name_of(node.func) if isinstance(node, ast.Call) else ""


def _formats(node: ast.AST) -> bool:
    """Whether an expression is ``"..." % numbers``."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mod)
        and isinstance(node.left, ast.Constant)
        and isinstance(node.left.value, str)
    )


def _to_text(node: ast.AST, source: SourceTree, names: frozenset[str]) -> bool:
    """Whether the value of an expression only becomes text; that of ``names`` is being followed."""
    child = node
    while (parent := source.parents.get(child)) is not None:
        if isinstance(parent, ast.FormattedValue):
            return child is parent.value
        if isinstance(parent, ast.Call):
            if child is parent.func:
                return False
            if _is_text(parent):
                return True
            if _called(parent) not in _NUMBERS or _makes_whole(parent):
                return False
        elif isinstance(parent, ast.BinOp):
            if _formats(parent):
                return True
        elif isinstance(parent, (ast.Assign, ast.AugAssign)):
            return _named(parent, source, names)
        elif isinstance(parent, (ast.Tuple, ast.Dict)):
            return _formats(source.parents[parent])
        elif not isinstance(parent, (ast.keyword, ast.UnaryOp)) or _denies(parent):
            return False
        child = parent
    return False


def _denies(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _makes_whole(call: ast.Call) -> bool:
    """Whether a call is ``round(number)``, which fails for NaN."""
    return _called(call) == "round" and len(call.args) == 1


def _named(
    statement: ast.Assign | ast.AugAssign, source: SourceTree, names: frozenset[str]
) -> bool:
    """Whether a local name is assigned, and all that its function does with it is to make text."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    scope = source.function_of(statement)
    if len(targets) != 1 or not isinstance(targets[0], ast.Name) or isinstance(scope, ast.Module):
        return False
    name = targets[0].id
    if name in names:
        return True
    if any(
        isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names
        for node in ast.walk(scope)
    ):
        return False
    uses = list(loads(name, scope))
    return bool(uses) and all(_to_text(use, source, names | {name}) for use in uses)


def answer_of_extreme(frame: FrameType | None, comparison: str) -> bool | None:
    """The answer to ``__lt__`` or ``__gt__`` of an unknown number, called by ``max`` or ``min``
    without a key, that makes it the result: the larger of an unknown number and another is unknown,
    and nothing is decided. None for other callers.

    Both compare the next item with the best one so far. Python calls the method of a subclass of
    `float` first, so for one that is the best so far it calls the reverse.
    """
    name = _builtin_called(frame)
    if name not in ("max", "min") or comparison not in ("__lt__", "__gt__"):
        return None
    return comparison == ("__gt__" if name == "max" else "__lt__")


def sorts(frame: FrameType | None) -> bool:
    """Whether ``sorted`` or ``list.sort`` compares, without a key. The order of numbers that are
    all unknown decides nothing.
    """
    return _builtin_called(frame) in ("sorted", "sort")


def _builtin_called(frame: FrameType | None) -> str:
    """The name of the function, without a key, that a frame calls; "" if it does something else."""
    source = None if frame is None else source_of(frame)
    if frame is None or source is None:
        return ""
    reading = reading_of(frame)
    nodes = evaluated(reading, source)
    if reading.call is not WITHIN or len(nodes) != 1:
        return ""
    call = nodes[0]
    if not isinstance(call, ast.Call) or any(one.arg in ("key", None) for one in call.keywords):
        return ""
    name = name_of(call.func)
    if isinstance(call.func, ast.Attribute):
        return name if name == "sort" else ""
    defined = frame.f_globals.get(name, vars(builtins).get(name))
    return name if defined is vars(builtins).get(name) else ""
