"""Fixes of a race whose two accesses are of one statement: nothing can be put between them before
the statement is split.

What makes the first access is found by its position in the source, which instructions have since
Python 3.11. It is computed before the statement, under a name of its own, where all that is
evaluated before it are names, constants and parts of them; else a copy is made to wait.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from typing import Any, Final

from gpuprobe.hazards.accesses import HOST, Race
from gpuprobe.hazards.findings.code import StatementAt, free_name, torch_name
from gpuprobe.hazards.findings.repairs import FUNCTIONAL, CodeChange, Sites, listing
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
    # Of these only the first part is evaluated whatever it gives.
    ast.Compare: ("left",),
    ast.IfExp: ("test",),
    ast.BoolOp: (),
}


def split(race: Race, at: Sites) -> Iterator[CodeChange]:
    """Ways to order two accesses of one statement, the best first."""
    found = at.first
    if found is None or at.second is None:
        return
    call = _expression_of(race, found)
    if call is None:
        return
    if race.first.note == FUNCTIONAL:
        cuda = torch_name(found.file).rpartition(".")[0] or "torch"
        waited = f"{cuda}.ops._c10d_functional.wait_tensor({_segment(found, call)})"
        yield _changed("work", found, "", _replaced(found, call, waited))
        return
    if _hoistable(found.node, call):
        asynchronous = isinstance(call, ast.Call) and _keyword(call, "async_op") is not None
        name = free_name(found, "work" if asynchronous else "copied")
        how, wait = ("work", f"{name}.wait()") if asynchronous else _wait(race, found)
        if isinstance(found.node, ast.Expr) and found.node.value is call:  # others follow it
            text, _, end = _span(found, call)
            rest = text[end:].decode().lstrip("; ")
            named = f"{name} = " if asynchronous else ""
        else:
            rest, named = _replaced(found, call, name), f"{name} = "
        hoisted = f"{named}{_segment(found, call)}\n{found.indent}{wait}\n"
        yield _changed(how, found, hoisted, rest)
    if isinstance(call, ast.Call) and race.second.actor == HOST:
        value = _keyword(call, "non_blocking")
        if isinstance(value, ast.Constant) and value.value is True:
            yield _changed("blocking", found, "", _replaced(found, value, "False"))


def _expression_of(race: Race, found: StatementAt) -> ast.expr | None:
    """The expression whose evaluation made the first access."""
    nodes = [node for node in ast.walk(found.node) if isinstance(node, ast.expr)]
    position = _position(race.first.site)
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


def _position(site: Any) -> tuple[Any, ...] | None:
    """Lines and columns of a site's instruction; None where Python does not keep them."""
    code, instruction = site
    positions = getattr(code, "co_positions", None)
    if positions is None:
        return None
    for at, position in enumerate(positions()):
        if 2 * at == instruction:
            return None if None in position else position
    return None


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return None


def _hoistable(node: ast.AST, wanted: ast.expr) -> bool:
    """Whether ``wanted`` may be evaluated before all of ``node``."""
    if node is wanted:
        return True
    if isinstance(node, ast.BoolOp):
        return _hoistable(node.values[0], wanted)
    for field in _FIRST.get(type(node), ()):
        value = getattr(node, field)
        for part in value if isinstance(value, list) else (value,):
            if any(below is wanted for below in ast.walk(part)):
                return _hoistable(part, wanted)
            if not _is_unchanging(part):
                return False
    return False


def _is_unchanging(node: ast.AST) -> bool:
    """Whether it does not matter when this is evaluated: a name, a constant, an attribute."""
    while isinstance(node, (ast.Attribute, ast.keyword)):
        node = node.value
    return isinstance(node, (ast.Name, ast.Constant))


def _wait(race: Race, found: StatementAt) -> tuple[str, str]:
    """How the second access is made to wait, right after the first one."""
    cuda, context = torch_name(found.file), race.context
    names = context.scopes[0].streams if context is not None and context.scopes else {}
    stream = (names.get(race.first.actor) or ("",))[0]
    if race.second.actor != HOST:
        waiter = (names.get(race.second.actor) or ("",))[0]
        return (
            ("split", f"{cuda}.synchronize()")
            if not (stream and waiter)
            else (
                "wait",
                f"{waiter}.wait_stream({stream})",
            )
        )
    if context is not None and race.first.actor in context.current:
        stream = f"{cuda}.current_stream()"
    return "split", f"{stream or cuda}.synchronize()"


def _changed(how: str, found: StatementAt, before: str, statement: str) -> CodeChange:
    text = f"{found.indent}{before}{found.indent if before else ''}{statement}"
    insertion = Insertion(found.file, found.line, text, found.end - found.line + 1)
    return CodeChange(how, listing((insertion,)), (insertion,))


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
