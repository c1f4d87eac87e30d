"""The expressions that a line stores, and a method called on them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from gpuprobe.remedies.flow import ADDING, called_name, keys_of, needed_by_backward, without_graph
from gpuprobe.remedies.text import (
    FUNCTIONS,
    ProgramText,
    Refusal,
    Refused,
    Replacement,
    Scope,
    Statement,
)

_ON_THE_CPU = frozenset(("item", "tolist", "numpy", "cpu"))
_NO_TENSOR = frozenset(("item", "tolist", "numpy", "size", "numel", "shape", "dtype", "device"))
_PRIMARY = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
"""Expressions that a method can be called on without parentheses."""


class _Stored(NamedTuple):
    """``node`` is stored under ``keys``, as `gpuprobe.remedies.flow` names them."""

    node: ast.expr
    keys: frozenset[str]


def stored_as(
    text: ProgramText,
    line: int,
    name: str,
    method: str,
    *,
    every: bool = False,
    values: bool = False,
) -> list[Replacement] | Refused:
    """Call ``method`` on what the line stores; on the expressions with ``name``, if it is given, or
    on ``every`` value of several. Counters are left out. ``values``: calls that are stored return
    dictionaries of tensors.
    """
    if name:
        try:
            name = ast.unparse(ast.parse(name, mode="eval"))
        except (SyntaxError, ValueError):
            return Refused(Refusal.INVALID, name)
    leaves: list[_Stored] = []
    for statement in text.statements(line):
        leaves += _leaves_of(text, statement)
    leaves = [one for one in leaves if not name or _contains(one.node, name)]
    if not leaves:
        return Refused(Refusal.NOTHING_STORED, name)
    left = [
        one for one in leaves if not _done(one.node, method) and not _is_counter(text, one.node)
    ]
    if not left:
        return Refused(Refusal.NO_TENSOR, ast.unparse(leaves[0].node))
    if len(left) > 1 and not name and not every:
        return Refused(Refusal.AMBIGUOUS, ", ".join(ast.unparse(one.node) for one in left))
    changes: list[Replacement] = []
    for one in left:
        if any(isinstance(around, ast.JoinedStr) for around in text.ancestors(one.node)):
            return Refused(Refusal.IN_A_STRING)
        detached = _is_detached(one.node)
        if "detach" in method and not detached:
            scope = _scope_of(text, one.node)
            backward = needed_by_backward(text, [(one.keys, text.parents[one.node])], scope)
            if backward:
                return Refused(Refusal.NEEDED_BY_BACKWARD, backward)
        added = method.removeprefix(".detach()") if detached else method
        changes += _called(text, one.node, added, values=values)
    return changes


def _called(
    text: ProgramText, node: ast.expr, method: str, *, values: bool
) -> Iterator[Replacement]:
    """Call ``method`` on a value; on each of a dictionary: with ``values``, of what a call returns,
    and of a `state_dict`.
    """
    start, end = text.span(node)
    of = _state_dict(node) if method.endswith(".cpu()") else None
    if of is not None:
        method = '.to("cpu", copy=True)'
    elif values and isinstance(node, ast.Call):
        of = node
    if of is not None:
        first, last = text.span(of)
        yield Replacement(start, first, f"{{name: value{method} for name, value in ")
        yield Replacement(last, end, ".items()}")
        return
    opening, closing = ("", "") if isinstance(node, _PRIMARY) else ("(", ")")
    if opening:
        yield Replacement(start, start, opening)
    yield Replacement(end, end, f"{closing}{method}")


def _state_dict(node: ast.expr) -> ast.Call | None:
    """The call in ``x.state_dict()``, or in a copy of that. The result of a module has tensors; an
    optimizer's has other dictionaries, with which the edit fails."""
    if not isinstance(node, ast.Call):
        return None
    if called_name(node) in ("copy", "deepcopy") and len(node.args) == 1:
        return _state_dict(node.args[0])
    return node if called_name(node) == "state_dict" and not node.args else None


def _is_counter(text: ProgramText, node: ast.expr) -> bool:
    """Whether an expression is a variable that counts, anywhere in the file: by ``+= 1``, or as the
    target of a loop over a `range` or an `enumerate`.
    """
    return isinstance(node, ast.Name) and node.id in {
        target.id for one in ast.walk(text.tree) for target in _counted_by(one)
    }


def _counted_by(node: ast.AST) -> Iterator[ast.Name]:
    target: ast.AST | None = None
    if isinstance(node, ast.AugAssign):
        value = node.value
        target = node.target if isinstance(value, ast.Constant) and value.value == 1 else None
    elif isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.iter, ast.Call):
        name = ast.unparse(node.iter.func)
        target = node.target if name == "range" else None
        if name == "enumerate" and isinstance(node.target, ast.Tuple):
            target = node.target.elts[0]
    if isinstance(target, ast.Name):
        yield target


def _scope_of(text: ProgramText, node: ast.AST) -> Scope:
    found = text.scope(node)
    while isinstance(found, ast.ClassDef):
        found = text.scope(found)
    return found


def _done(node: ast.expr, method: str) -> bool:
    """Whether calling the method changes nothing."""
    if "detach" not in method:
        return _is_on_the_cpu(node)
    if method.endswith(".cpu()") and _is_detached(node):
        return _is_on_the_cpu(node)
    return without_graph(node)


def _is_detached(node: ast.expr) -> bool:
    """Whether an expression is surely a tensor without a graph, on an unknown device."""
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif node.attr in ("detach", "detach_", "data"):
            return True
        elif node.attr in _NO_TENSOR:
            return False
        else:
            node = node.value
    return False


def _is_on_the_cpu(node: ast.expr) -> bool:
    """Whether an expression is surely not a tensor on a GPU."""
    if isinstance(node, (ast.Constant, ast.JoinedStr, ast.Compare, ast.Lambda)):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _ON_THE_CPU or (
            node.func.attr == "detach" and _is_on_the_cpu(node.func.value)
        )
    return isinstance(node, ast.Call) and without_graph(node)


def _contains(node: ast.expr, name: str) -> bool:
    return any(isinstance(one, ast.expr) and ast.unparse(one) == name for one in ast.walk(node))


def _leaves_of(text: ProgramText, statement: Statement) -> Iterator[_Stored]:
    if isinstance(statement, ast.Assign):
        keys = frozenset[str]().union(*(keys_of(target) for target in statement.targets))
        yield from _expanded(statement.value, keys)
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)) and statement.value is not None:
        yield from _expanded(statement.value, keys_of(statement.target))
    elif isinstance(statement, ast.Return) and statement.value is not None:
        function = text.scope(statement)
        assert isinstance(function, FUNCTIONS)
        yield from _expanded(statement.value, frozenset((f"({function.name}",)))
    for node in _expressions(statement):
        if isinstance(node, ast.NamedExpr):
            yield from _expanded(node.value, keys_of(node.target))
        elif isinstance(node, (ast.Yield,)) and node.value is not None:
            function = text.scope(node)
            if isinstance(function, FUNCTIONS):
                yield from _expanded(node.value, frozenset((f"({function.name}",)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr not in ADDING:
                continue
            values = node.args[-1:] if node.func.attr != "update" else node.args
            for value in (*values, *(one.value for one in node.keywords)):
                yield from _expanded(value, keys_of(node.func.value))


def _expressions(statement: Statement) -> Iterator[ast.AST]:
    """The nodes of a statement without inner statements; those of a lambda, which may be a hook."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        yield node
        pending += [
            child
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case))
        ]


def _expanded(node: ast.expr, keys: frozenset[str]) -> Iterator[_Stored]:
    """The values in displays, comprehensions, choices and constructors."""
    parts: list[ast.expr | None] = []
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        parts = [*node.elts]
    elif isinstance(node, ast.Dict):
        parts = [*node.values]
    elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
        parts = [node.elt]
    elif isinstance(node, ast.DictComp):
        parts = [node.value]
    elif isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    elif isinstance(node, ast.Starred):
        return  # its elements are unknown
    elif isinstance(node, ast.Call) and _constructs(node.func):
        parts = [*node.args, *(one.value for one in node.keywords)]
    else:
        yield _Stored(node, keys)
        return
    for part in parts:
        if part is not None:
            yield from _expanded(part, keys)


def _constructs(function: ast.expr) -> bool:
    """Whether a name is that of a class, by its spelling."""
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    return name in ("dict", "list", "tuple", "set") or name[:1].isupper()
