"""The expression of a program's source that an instruction evaluates."""

from __future__ import annotations

import ast
import dis
import functools
import linecache
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

# Instructions between the one that leaves a value on the stack and the jump that tests it.
_BETWEEN: Final = frozenset({"CACHE", "COPY", "DUP_TOP", "EXTENDED_ARG", "NOP", "TO_BOOL"})

_PLAIN: Final = frozenset({"callable", "getattr", "hasattr", "isinstance", "len"})
_TESTS: Final = frozenset({"UNARY_NOT", "TO_BOOL", "CONTAINS_OP", "COMPARE_OP"})


class SourceTree(NamedTuple):
    """The syntax tree of one file, and the parent of each of its nodes."""

    tree: ast.Module
    parents: dict[ast.AST, ast.AST]
    by_position: dict[tuple[int, int, int, int], ast.expr]

    def function_of(self, node: ast.AST) -> ast.AST:
        """The function, lambda or module that a node belongs to."""
        while not isinstance(node, _SCOPES):
            node = self.parents[node]
        return node


_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)


def source_of(frame: FrameType) -> SourceTree | None:
    """The source of the file whose code a frame runs; None if it is not available."""
    file = frame.f_code.co_filename
    lines = linecache.getlines(file, frame.f_globals)
    return _parsed(file, "".join(lines)) if lines else None


@functools.lru_cache(maxsize=64)
def _parsed(file: str, text: str) -> SourceTree | None:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # the running code is not the file on disk
        return None
    parents: dict[ast.AST, ast.AST] = {}
    by_position: dict[tuple[int, int, int, int], ast.expr] = {}
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            parents[child] = node
        if isinstance(node, (ast.expr, ast.Assert)):
            key = (
                node.lineno,
                node.end_lineno or 0,
                node.col_offset,
                node.end_col_offset or 0,
            )
            # pytest rewrites assertions: its code tests the expression of the statement.
            by_position.setdefault(key, node.test if isinstance(node, ast.Assert) else node)
    return SourceTree(tree, parents, by_position)


class TruthSource(NamedTuple):
    """The origin of a truth in a frame. ``call``: the function whose result it is, ``""`` if the
    current instruction tests it, `WITHIN` if that passes a value to C code (a call, an operator),
    of which only the name is known.
    """

    frame: FrameType
    call: str = ""


WITHIN: Final = "(within)"


def reading_of(frame: FrameType) -> TruthSource:
    """The origin of the truth that a frame reads."""
    name = _instructions(frame.f_code).get(frame.f_lasti, "")
    return TruthSource(frame, "" if "JUMP" in name or name in _TESTS else WITHIN)


def evaluated(reading: TruthSource, source: SourceTree) -> list[ast.expr]:
    """The expression whose value a frame tests or has just received. If the interpreter keeps only
    lines (Python 3.10), all candidates; empty if it is unknown.
    """
    frame = reading.frame
    positions = _position(frame.f_code, frame.f_lasti)
    if positions is None:
        return list(_on_line(source, frame.f_lineno or 0, reading.call))
    node = source.by_position.get(positions)
    if node is None:
        return []
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        node = node.operand
    return [node]


def _position(code: CodeType, at: int) -> tuple[int, int, int, int] | None:
    """Lines and columns of the expression that the instruction at ``at`` evaluates; for a jump, of
    the expression that it tests.
    """
    if not hasattr(code, "co_positions"):
        return None
    instructions = _instructions(code)
    index = at // 2
    if "JUMP" in instructions.get(at, ""):
        index -= 1
        while index > 0 and instructions.get(2 * index, "CACHE") in _BETWEEN:
            index -= 1
    found: Any = list(code.co_positions())[index]
    if None in found:
        return None
    line, end_line, column, end_column = found
    return line, end_line, column, end_column


@functools.lru_cache(maxsize=256)
def _instructions(code: CodeType) -> dict[int, str]:
    return {item.offset: item.opname for item in dis.get_instructions(code)}


def _on_line(source: SourceTree, line: int, call: str) -> Iterator[ast.expr]:
    """The conditions of a line, or its calls."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.expr) or not (
            node.lineno <= line <= (node.end_lineno or node.lineno)
        ):
            continue
        if call == "__contains__":
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
                yield node
        elif call:
            if isinstance(node, ast.Call) and call in (WITHIN, name_of(node.func)):
                yield node
        elif _is_test(node, source):
            yield from (leaf for leaf in _operands(node) if not _is_plain(leaf))


def _is_test(node: ast.expr, source: SourceTree) -> bool:
    """Whether an expression is a whole condition, or the value of ``not``, ``and`` and ``or``."""
    parent = source.parents[node]
    if isinstance(parent, (ast.BoolOp, ast.UnaryOp)):
        return False  # part of another one
    if isinstance(parent, ast.comprehension):
        return node in parent.ifs
    negates = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return negates or isinstance(node, ast.BoolOp) or getattr(parent, "test", None) is node


def _operands(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _operands(value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from _operands(node.operand)
    elif not isinstance(node, ast.Constant):
        yield node


def _is_plain(node: ast.expr) -> bool:
    """Whether an operand is certainly not a tensor's value."""
    if isinstance(node, ast.Call):
        return name_of(node.func) in _PLAIN
    if isinstance(node, ast.Compare):
        if any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            return not isinstance(node.left, ast.Call)
        return any(
            (isinstance(side, ast.Constant) and isinstance(side.value, str))
            or (isinstance(side, ast.Call) and name_of(side.func) in _PLAIN)
            for side in (node.left, *node.comparators)
        )
    return False


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def loads(name: str, scope: ast.AST) -> Iterator[ast.Name]:
    """The places within a node that read a name."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield node
