"""Branches that only set a flag, or a message, for a later branch to raise or to warn by."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, Final

from gpuprobe.torch_support.conditions.blocks import BlockOutcome, caught, kind_of
from gpuprobe.torch_support.conditions.source import SourceTree

_UNDECIDED: Final = object()


def flagged(branch: ast.If, source: SourceTree) -> tuple[BlockOutcome, BlockOutcome] | None:
    """What a branch that only gives constants to names comes to, and what comes of leaving it
    out: an error or a warning further down in its function, or work. None where the names, which
    are read after it, are read by more than that.
    """
    if branch.orelse:
        return None
    constants: dict[str, Any] = {}
    for statement in branch.body:
        if not (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
            and isinstance(statement.value, ast.Constant)
        ):
            return None
        constants[statement.targets[0].id] = statement.value.value
    scope = source.function_of(branch)
    body = other = BlockOutcome.WORKS
    for name, value in constants.items():
        readers = list(_readers(name, branch, scope, source))
        if not readers or None in readers:
            return None
        before = _values_before(name, branch, scope)
        for reader in readers:
            assert reader is not None
            kind = kind_of(reader.body, reader, source)
            if kind is BlockOutcome.WORKS or reader.orelse or caught(reader, source):
                return None
            if _holds(reader.test, name, value) is not False:
                body = _worse(body, kind)
            if before and all(_holds(reader.test, name, item) is True for item in before):
                other = _worse(other, kind)
    return (body, other)


def _worse(one: BlockOutcome, other: BlockOutcome) -> BlockOutcome:
    for kind in (BlockOutcome.RAISES, BlockOutcome.WARNS):
        if kind in (one, other):
            return kind
    return BlockOutcome.WORKS


def _readers(
    name: str, branch: ast.If, scope: ast.AST, source: SourceTree
) -> Iterator[ast.If | None]:
    """The later branches that read a name in their test; None for all that read it elsewhere
    than there and in those branches.
    """
    last = branch.end_lineno or branch.lineno
    for node in ast.walk(scope):
        if (
            isinstance(node, ast.Name)
            and node.id == name
            and isinstance(node.ctx, ast.Load)
            and node.lineno > last
        ):
            yield _reader(node, name, scope, source)


def _reader(node: ast.AST, name: str, scope: ast.AST, source: SourceTree) -> ast.If | None:
    while node is not scope:
        node = source.parents[node]
        if isinstance(node, ast.If) and any(
            isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node.test)
        ):
            return node
    return None


def _values_before(name: str, branch: ast.If, scope: ast.AST) -> list[Any]:
    """The constants that a name is given before a branch; none where it is given anything else."""
    found = []
    for node in ast.walk(scope):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.lineno >= branch.lineno:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if not any(isinstance(target, ast.Name) and target.id == name for target in targets):
            continue
        if not isinstance(node.value, ast.Constant):
            return []
        found.append(node.value.value)
    return found


def _holds(test: ast.expr, name: str, value: Any) -> bool | None:
    """Whether a test of a name holds that has a value; None where more decides."""
    found = _evaluated(test, name, value)
    return None if found is _UNDECIDED else bool(found)


def _evaluated(node: ast.expr, name: str, value: Any) -> Any:
    if isinstance(node, ast.Name):
        return value if node.id == name else _UNDECIDED
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _evaluated(node.operand, name, value)
        return inner if inner is _UNDECIDED else not inner
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left = _evaluated(node.left, name, value)
        right = _evaluated(node.comparators[0], name, value)
        if left is _UNDECIDED or right is _UNDECIDED:
            return _UNDECIDED
        op = node.ops[0]
        if isinstance(op, (ast.Is, ast.Eq)):
            return left is right or (isinstance(op, ast.Eq) and left == right)
        if isinstance(op, (ast.IsNot, ast.NotEq)):
            return left is not right and (isinstance(op, ast.IsNot) or left != right)
    return _UNDECIDED
