"""Repairs of a race between two accesses of one statement, which must be split first.

The expression that makes the first access is found by its position in the source, which
instructions have since Python 3.11. It is computed before the statement and gets a name, if only
names, constants and parts of them are evaluated before it; else the host waits for the copy.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from typing import Final

from gpuprobe.hazards.accesses import Race
from gpuprobe.hazards.events import FUNCTIONAL, HOST, Event, StreamSynchronize
from gpuprobe.hazards.findings.code import StatementAt, free_name, torch_name
from gpuprobe.hazards.findings.repairs import AwaitHandle, LocatedRace, Repair, Wait, position_of
from gpuprobe.model.findings import Insertion

_FIRST: Final[dict[type[ast.AST], tuple[str, ...]]] = {
    # What is evaluated once, and before anything below the statement runs.
    ast.Expr: ("value",),
    ast.Assign: ("value",),
    ast.AnnAssign: ("value",),
    ast.Return: ("value",),
    ast.Assert: ("test",),
    ast.If: ("test",),
    ast.For: ("iter",),
    ast.AugAssign: ("target", "value"),
    ast.With: ("items",),
    ast.withitem: ("context_expr",),
    # Parts of an expression, in the order in which they are evaluated.
    ast.Call: ("func", "args", "keywords"),
    ast.keyword: ("value",),
    ast.Starred: ("value",),
    ast.Attribute: ("value",),
    ast.Subscript: ("value", "slice"),
    ast.BinOp: ("left", "right"),
    ast.UnaryOp: ("operand",),
    ast.Tuple: ("elts",),
    ast.List: ("elts",),
    ast.Set: ("elts",),
    ast.JoinedStr: ("values",),
    ast.FormattedValue: ("value",),
    ast.NamedExpr: ("value",),
    # Only the first part of these is always evaluated.
    ast.Compare: ("left",),
    ast.IfExp: ("test",),
    ast.BoolOp: (),
}


class SplitStatement(Repair):
    """The first half of a statement, a wait for the first access's stream, and the rest."""

    words = "split the statement, and wait before the rest of it uses the memory"

    def after_first(self) -> tuple[Event, ...]:
        return (StreamSynchronize(self.race.first.actor),)


class BlockingCopy(SplitStatement):
    """A copy that the host waits for."""

    words = "copy without non_blocking: the same statement uses the memory"


def split(located: LocatedRace) -> Iterator[Repair]:
    """Repairs that order two accesses of one statement, the best first."""
    race, found = located.race, located.first
    if found is None or located.second is None:
        return
    call = _expression_of(race, found)
    if call is None:
        return
    if race.first.note == FUNCTIONAL:
        torch = torch_name(found.file).rpartition(".")[0] or "torch"
        awaited = f"{torch}.ops._c10d_functional.wait_tensor({_segment(found, call)})"
        yield _changed(AwaitHandle, located, found, "", _replaced(found, call, awaited))
        return
    if _hoistable(found.node, call):
        yield _hoisted(located, found, call)
    if isinstance(call, ast.Call) and race.second.actor == HOST:
        value = _keyword(call, "non_blocking")
        if isinstance(value, ast.Constant) and value.value is True:
            yield _changed(BlockingCopy, located, found, "", _replaced(found, value, "False"))


def _hoisted(located: LocatedRace, found: StatementAt, call: ast.expr) -> Repair:
    """The expression ``call``, a wait for it, and the rest of the statement."""
    asynchronous = isinstance(call, ast.Call) and _keyword(call, "async_op") is not None
    name = free_name(found, "work" if asynchronous else "copied")
    kind, wait = (AwaitHandle, f"{name}.wait()") if asynchronous else _wait(located.race, found)
    if isinstance(found.node, ast.Expr) and found.node.value is call:  # others in the same line
        text, _, end = _span(found, call)
        rest = text[end:].decode().lstrip("; ")
        named = f"{name} = " if asynchronous else ""
    else:
        rest, named = _replaced(found, call, name), f"{name} = "
    first = f"{named}{_segment(found, call)}\n{found.indent}{wait}\n"
    return _changed(kind, located, found, first, rest)


def _expression_of(race: Race, found: StatementAt) -> ast.expr | None:
    """The expression whose evaluation made the first access."""
    nodes = [node for node in ast.walk(found.node) if isinstance(node, ast.expr)]
    position = position_of(race.first.site)
    if position is not None:
        line, end, column, end_column = position
        ending = [n for n in nodes if (n.end_lineno, n.end_col_offset) == (end, end_column)]
        exact = [n for n in ending if (n.lineno, n.col_offset) == (line, column)]
        # A method's call over several lines begins with the method's name for the interpreter.
        found_nodes = exact or [n for n in ending if isinstance(n, ast.Call)]
        return found_nodes[0] if len(found_nodes) == 1 else None
    named = ("non_blocking", "async_op")
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and any(_keyword(node, name) for name in named)
    ]
    return calls[0] if len(calls) == 1 else None


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return None


def _hoistable(node: ast.AST, target: ast.expr) -> bool:
    """Whether ``target`` may be evaluated before all other parts of ``node``."""
    if node is target:
        return True
    if isinstance(node, ast.BoolOp):
        return _hoistable(node.values[0], target)
    for field in _FIRST.get(type(node), ()):
        value = getattr(node, field)
        for part in value if isinstance(value, list) else (value,):
            if any(below is target for below in ast.walk(part)):
                return _hoistable(part, target)
            if not _is_unchanging(part):
                return False
    return False


def _is_unchanging(node: ast.AST) -> bool:
    """Whether it has the same value whenever it is evaluated: a name, a constant, an attribute."""
    while isinstance(node, (ast.Attribute, ast.keyword)):
        node = node.value
    return isinstance(node, (ast.Name, ast.Constant))


def _wait(race: Race, found: StatementAt) -> tuple[type[Repair], str]:
    """A wait of the second access right after the first one."""
    cuda, context = torch_name(found.file), race.context
    names = context.scopes[0].streams if context is not None and context.scopes else {}
    stream, *_ = names.get(race.first.actor) or ("",)
    if race.second.actor != HOST:
        waiter, *_ = names.get(race.second.actor) or ("",)
        if stream and waiter:
            return Wait, f"{waiter}.wait_stream({stream})"
        return SplitStatement, f"{cuda}.synchronize()"
    if context is not None and race.first.actor in context.current:
        stream = f"{cuda}.current_stream()"
    return SplitStatement, f"{stream or cuda}.synchronize()"


def _changed(
    kind: type[Repair], located: LocatedRace, found: StatementAt, before: str, statement: str
) -> Repair:
    text = f"{found.indent}{before}{found.indent if before else ''}{statement}"
    insertion = Insertion(found.file, found.line, text, found.end - found.line + 1)
    return kind(located, insertions=(insertion,))


def _lines(found: StatementAt) -> list[bytes]:
    """The statement's lines: columns of the source are counted in bytes of UTF-8."""
    lines = linecache.getlines(found.file)[found.line - 1 : found.end]
    return [(line if line.endswith("\n") else f"{line}\n").encode() for line in lines]


def _span(found: StatementAt, node: ast.expr) -> tuple[bytes, int, int]:
    """The statement's text, and where the expression begins and ends in it."""
    lines = _lines(found)
    starts = [sum(map(len, lines[:at])) for at in range(len(lines))]
    begin = starts[node.lineno - found.line] + node.col_offset
    last = (node.end_lineno or node.lineno) - found.line
    return b"".join(lines), begin, starts[last] + (node.end_col_offset or 0)


def _segment(found: StatementAt, node: ast.expr) -> str:
    text, begin, end = _span(found, node)
    code = text[begin:end].decode()
    return f"({code})" if "\n" in code else code


def _replaced(found: StatementAt, node: ast.expr, code: str) -> str:
    """The statement, without its indentation, with other code in the expression's place."""
    text, begin, end = _span(found, node)
    return (text[:begin] + code.encode() + text[end:]).decode()[len(found.indent) :]
