"""Conditions that ask whether numbers are finite: they are taken to be."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any, Final

from gpuprobe.torch_support.conditions.blocks import dotted
from gpuprobe.torch_support.conditions.source import SourceTree

_NOT: Final = frozenset({"isnan", "isinf", "isposinf", "isneginf", "isna"})
_SAME: Final = frozenset(
    {"any", "all", "item", "bool", "cpu", "float", "int", "sum", "max", "detach", "to", "long",
     "logical_or", "logical_and", "is_nonzero", "count_nonzero"}
)  # fmt: skip
"""Calls that are true where their operands are, and false (or 0) where these are."""

_COMPARED: Final[dict[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def finite(node: ast.expr, source: SourceTree, depth: int = 0) -> bool | None:
    """What a condition comes to if all numbers are finite; None where it asks anything else."""
    if depth > 8:
        return None
    if isinstance(node, ast.Call):
        return _call(node, source, depth + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
        inner = finite(node.operand, source, depth + 1)
        return None if inner is None else not inner
    if isinstance(node, ast.BoolOp):
        return _same([finite(value, source, depth + 1) for value in node.values])
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd)):
        return _same([finite(side, source, depth + 1) for side in (node.left, node.right)])
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compare(node, source, depth + 1)
    if isinstance(node, ast.Name):
        value = _assigned_once(node, source)
        return None if value is None else finite(value, source, depth + 1)
    return None


def _call(node: ast.Call, source: SourceTree, depth: int) -> bool | None:
    name = dotted(node.func).rpartition(".")[2]
    if name in _NOT:
        return False
    if name == "isfinite":
        return True
    if name == "logical_not":
        inner = _same([finite(argument, source, depth) for argument in node.args[:1]])
        return None if inner is None else not inner
    if name not in _SAME:
        return None
    operands = [finite(argument, source, depth) for argument in node.args]
    if isinstance(node.func, ast.Attribute):
        operands.append(finite(node.func.value, source, depth))
    return _same([operand for operand in operands if operand is not None])


def _same(operands: list[bool | None]) -> bool | None:
    if not operands or None in operands or len(set(operands)) != 1:
        return None
    return operands[0]


def _compare(node: ast.Compare, source: SourceTree, depth: int) -> bool | None:
    left, right, op = node.left, node.comparators[0], node.ops[0]
    if ast.dump(left) == ast.dump(right) and not isinstance(left, ast.Constant):
        if isinstance(op, ast.Eq):  # x == x: only NaN is not
            return True
        return False if isinstance(op, ast.NotEq) else None
    known = finite(left, source, depth)
    compare = _COMPARED.get(type(op))
    if known is None or compare is None or not isinstance(right, ast.Constant):
        return None
    if known and not isinstance(right.value, bool):
        return None  # a count of what is finite
    return bool(compare(known, right.value))


def _assigned_once(node: ast.Name, source: SourceTree) -> ast.expr | None:
    """The only value that the function gives to a name."""
    found: list[ast.expr] = []
    for other in ast.walk(source.function_of(node)):
        if isinstance(other, ast.Name) and other.id == node.id:
            if isinstance(other.ctx, ast.Load):
                continue
            parent = source.parents[other]
            if not isinstance(parent, ast.Assign) or parent.targets != [other]:
                return None
            found.append(parent.value)
    return found[0] if len(found) == 1 else None
