"""Which side is taken of a condition whose two sides both do work, if its value is unknown.

The side that does more: the statements of an ``if`` are run, a loop continues. A loop that only
this condition ends would be endless, so the other side follows after `MOST` times.
"""

from __future__ import annotations

import ast
from types import FrameType
from typing import Final, NamedTuple

from gpuprobe.native.values.conditions.blocks import may_leave
from gpuprobe.native.values.conditions.source import SourceTree, evaluated, reading_of, source_of

MOST: Final = 20
"""The number of times in a row that a condition of an endless loop keeps its value."""

_SHOWN: Final = 60  # characters of a condition in a message


class Side(NamedTuple):
    """The value to take for a condition. ``limited``: only `MOST` times in a row. ``text``: the
    condition as in the source, "" if that is unknown. ``line``: its line.
    """

    value: bool
    limited: bool
    text: str
    line: int


def side_of(frame: FrameType | None) -> Side:
    """The side to take of the condition that a frame evaluates."""
    source = None if frame is None else source_of(frame)
    if frame is None or source is None:
        return Side(False, True, "", 0)
    nodes = evaluated(reading_of(frame), source)
    if len(nodes) != 1:
        return Side(False, True, "", frame.f_lineno or 0)
    node = nodes[0]
    value, limited = _climbed(node, source)
    text = ast.unparse(node)
    shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return Side(value, limited, shown, node.lineno)


def _climbed(node: ast.expr, source: SourceTree) -> tuple[bool, bool]:
    child: ast.AST = node
    negated = False
    while (parent := source.parents.get(child)) is not None:
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            negated = not negated
        elif isinstance(parent, ast.While) and child is parent.test:
            return not negated, True
        elif isinstance(parent, ast.If) and child is parent.test:
            enters = _enters(parent)
            return enters != negated, not enters and _endless(parent, source)
        elif isinstance(parent, ast.stmt):
            break
        child = parent
    return False, True


def _enters(branch: ast.If) -> bool:
    """Whether the statements of a branch are run: unless they may leave a loop or the function, and
    the others may not.
    """
    return not any(map(may_leave, branch.body)) or any(map(may_leave, branch.orelse))


def _endless(node: ast.AST, source: SourceTree) -> bool:
    """Whether the innermost loop around a statement is a ``while``."""
    while not isinstance(node, (ast.For, ast.AsyncFor, ast.FunctionDef, ast.Module)):
        if isinstance(node, ast.While):
            return True
        node = source.parents[node]
    return not isinstance(node, (ast.For, ast.AsyncFor))  # called by a loop, perhaps
