"""Code that needs no graph: under ``torch.no_grad``, or with gradients from ``autograd.grad``."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from gpuprobe.remedies.blocks import is_elif
from gpuprobe.remedies.calls import call_at
from gpuprobe.remedies.flow import (
    BACKWARD,
    Liveness,
    Storing,
    called_name,
    keys_of,
    needed_by_backward,
    shared,
    stored_by,
)
from gpuprobe.remedies.imports import full_name, with_import
from gpuprobe.remedies.text import (
    FUNCTIONS,
    ProgramText,
    Refusal,
    Refused,
    Replacement,
    Scope,
    Statement,
    first_line,
)

_NO_GRAD = frozenset(("no_grad", "inference_mode"))
_FSTRING_START = getattr(tokenize, "FSTRING_START", -1)  # Python 3.12
_FSTRING_END = getattr(tokenize, "FSTRING_END", -1)


def without_grad(text: ProgramText, first: int, last: int) -> list[Replacement] | Refused:
    """Put the statements of lines ``first`` to ``last`` under ``torch.no_grad``."""
    chosen = _between(text, first, last)
    if isinstance(chosen, Refused):
        return chosen
    function = chosen[0]
    if isinstance(function, (*FUNCTIONS, ast.ClassDef)):
        if isinstance(function, ast.FunctionDef) and len(chosen) == 1:
            return _decorated(text, function)
        return Refused(Refusal.NOT_MECHANICAL, "the block defines a coroutine or a class")
    reason = _unsuitable(text, chosen)
    if reason is not None:
        return reason
    imported = with_import(text, "torch", chosen[0])
    if isinstance(imported, Refused):
        return imported
    indent, line = text.indent(chosen[0]), first_line(chosen[0])
    unit = _unit(text, indent)
    start = text.starts[line - 1]
    header = f"{indent}with {imported.name}.no_grad():{text.newline(line)}"
    changes = [*imported.changes, Replacement(start, start, header)]
    inside = _inside_strings(text, chosen)
    for number in range(line, (chosen[-1].end_lineno or 0) + 1):
        row = text.line(number)
        if number in inside or not row.strip():
            continue
        at = text.starts[number - 1] + (len(indent) if row.startswith(indent) else 0)
        changes.append(Replacement(at, at, unit))
    return changes


def _between(text: ProgramText, first: int, last: int) -> list[Statement] | Refused:
    """The statements of one block that contain all lines from ``first`` to ``last``."""
    begins, ends = text.statements(first), text.statements(last)
    if not begins or not ends:
        return Refused(Refusal.NO_STATEMENT)
    if len(begins) > 1 or len(ends) > 1:
        return Refused(Refusal.ONE_LINE)
    one, two = begins[0], ends[0]
    if one is two:
        return [one]
    around = {id(node) for node in (two, *text.ancestors(two))}
    if id(one) in around:
        return [one]
    outer = one
    for parent in text.ancestors(one):
        if id(parent) in around and isinstance(outer, ast.stmt):
            block = text.block(outer)
            other = next((node for node in block if id(node) in around), None)
            if other is None:
                return Refused(Refusal.NOT_MECHANICAL, "the lines are in different blocks")
            return block[block.index(outer) : block.index(other) + 1]
        if isinstance(parent, ast.stmt):
            outer = parent
    return Refused(Refusal.NOT_MECHANICAL, "the lines are in different blocks")


def _unsuitable(text: ProgramText, chosen: Sequence[Statement]) -> Refused | None:
    """Why these statements cannot be a block without graphs."""
    if any(is_elif(text, node) for node in chosen):
        return Refused(Refusal.NOT_MECHANICAL, "elif")
    if not all(text.alone(node) for node in chosen):
        return Refused(Refusal.ONE_LINE)
    if any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in chosen):
        return Refused(Refusal.NOT_MECHANICAL, "the block imports modules")
    if _is_without_grad(text, chosen[0]):
        return Refused(Refusal.DONE_ALREADY)
    nodes = [one for node in chosen for one in ast.walk(node)]
    if any(
        isinstance(one, (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith))
        for one in nodes
    ):
        return Refused(Refusal.NOT_MECHANICAL, "the grad mode would leave the block at a yield")
    if not any(isinstance(one, ast.Call) for one in nodes):
        return Refused(Refusal.NOT_MECHANICAL, "no call")
    backward = _backward_in(text, nodes)
    if backward:
        return Refused(Refusal.NEEDED_BY_BACKWARD, backward)
    scope = text.scope(chosen[-1])
    if isinstance(scope, ast.ClassDef):
        return Refused(Refusal.NOT_MECHANICAL, "the body of a class")
    backward = needed_by_backward(text, _kept(text, scope, chosen, nodes), scope)
    return Refused(Refusal.NEEDED_BY_BACKWARD, backward) if backward else None


def _kept(
    text: ProgramText, scope: Scope, chosen: Sequence[Statement], nodes: Iterable[ast.AST]
) -> Iterator[Storing]:
    """What the statements store that other code may read."""
    for node in nodes:
        if isinstance(node, ast.Return) and isinstance(scope, FUNCTIONS):
            yield frozenset((f"({scope.name}",)), node
        for target in stored_by(node)[0]:
            for key in keys_of(target):
                plain = isinstance(target, (ast.Name, ast.Tuple, ast.List)) and key[0] != "."
                local = plain and not isinstance(node, ast.Call) and not shared(text, scope, key)
                if not local or Liveness(scope.body, key).after[chosen[-1]]:
                    yield frozenset((key,)), node


def _is_without_grad(text: ProgramText, node: Statement) -> bool:
    for one in (node, *text.ancestors(node)):
        calls: list[ast.expr] = []
        if isinstance(one, (ast.With, ast.AsyncWith)):
            calls = [item.context_expr for item in one.items]
        elif isinstance(one, (*FUNCTIONS, ast.ClassDef)):
            calls = list(one.decorator_list)
        for call in calls:
            name = (
                called_name(call)
                if isinstance(call, ast.Call)
                else ast.unparse(call).rpartition(".")[2]
            )
            if name in _NO_GRAD:
                return True
        if isinstance(one, FUNCTIONS):
            return False
    return False


def _backward_in(text: ProgramText, nodes: Iterable[ast.AST]) -> str:
    """The place of a backward pass in these nodes, or in functions of the file that they call, or
    pass to what they call.
    """
    functions: dict[str, list[ast.AST]] = {}
    for node in ast.walk(text.tree):
        if isinstance(node, FUNCTIONS):
            functions.setdefault(node.name, []).append(node)
    known: set[str] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if not isinstance(node, ast.Call):
            continue
        name = called_name(node)
        if name in BACKWARD or name in ("requires_grad_", "checkpoint"):
            return f"{name} in line {node.lineno}"
        values = [*node.args, *(one.value for one in node.keywords)]
        for called in {name, *map(_name_of, values)}.intersection(functions) - known:
            known.add(called)
            pending += [one for function in functions[called] for one in ast.walk(function)]
    return ""


def _name_of(value: ast.AST) -> str:
    """The last part of a name; "" of another expression."""
    if isinstance(value, ast.Attribute):
        return value.attr
    return value.id if isinstance(value, ast.Name) else ""


def _decorated(text: ProgramText, function: ast.FunctionDef) -> list[Replacement] | Refused:
    if _is_without_grad(text, function):
        return Refused(Refusal.DONE_ALREADY)
    if not text.alone(function):
        return Refused(Refusal.ONE_LINE)
    body = [one for node in function.body for one in ast.walk(node)]
    backward = _backward_in(text, body)
    if not backward and any(isinstance(one, ast.Return) and one.value is not None for one in body):
        backward = needed_by_backward(text, [(frozenset((f"({function.name}",)), None)], text.tree)
    if not backward:
        attributes = {
            key
            for node in body
            for target in stored_by(node)[0]
            for key in keys_of(target)
            if key[0] == "." or _is_outer(function, key)
        }
        backward = needed_by_backward(text, [(frozenset(attributes), None)], text.tree)
    if not backward and function.name in ("forward", "training_step", "compute_loss", "__call__"):
        backward = function.name
    if backward:
        return Refused(Refusal.NEEDED_BY_BACKWARD, backward)
    imported = with_import(text, "torch", function)
    if isinstance(imported, Refused):
        return imported
    start = text.starts[function.lineno - 1]
    row = f"{text.indent(function)}@{imported.name}.no_grad(){text.newline(function.lineno)}"
    return [*imported.changes, Replacement(start, start, row)]


def _is_outer(function: ast.FunctionDef, name: str) -> bool:
    """Whether a name in a function belongs to the code around it."""
    local = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)} | {
        one.id
        for one in ast.walk(function)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
    return name not in local


def _unit(text: ProgramText, indent: str) -> str:
    """One level of the file's indentation, of the same kind as ``indent``."""
    found: Counter[str] = Counter()
    for node in ast.walk(text.tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.stmt) and isinstance(body, list):
            outer, inner = text.indent(node), text.indent(body[0])
            if inner.startswith(outer) and inner != outer:
                found[inner[len(outer) :]] += 1
    same = [unit for unit, _ in found.most_common() if not indent or unit[0] == indent[0]]
    return same[0] if same else "\t" if indent.startswith("\t") else "    "


def _inside_strings(text: ProgramText, chosen: Sequence[Statement]) -> set[int]:
    """The lines that begin inside a string."""
    start, end = text.starts[first_line(chosen[0]) - 1], text.span(chosen[-1])[1]
    return set(_string_lines(text, start, end))


def _string_lines(text: ProgramText, start: int, end: int) -> Iterator[int]:
    opened: list[int] = []
    for token in text.tokens_between(start, end):
        if token.kind == _FSTRING_START:
            opened.append(token.start)
        elif token.kind == _FSTRING_END and opened:
            yield from _lines_within(text, opened.pop(), token.end)
        elif token.kind == tokenize.STRING:
            yield from _lines_within(text, token.start, token.end)


def _lines_within(text: ProgramText, start: int, end: int) -> Iterator[int]:
    line = text.line_at(start)
    return iter(range(line + 1, text.line_at(end) + 1))


def with_autograd_grad(text: ProgramText, line: int) -> list[Replacement] | Refused:
    """Replace ``loss.backward(create_graph=True)`` and the list of ``.grad`` that follows it, of
    the parameters in a variable or of a module.

    Only if the program's optimizers have the same parameters: ``.grad`` of others would lack.
    """
    call = call_at(text, line, "backward")
    if isinstance(call, Refused):
        return call
    statement = text.parents[call]
    given = {one.arg: ast.unparse(one.value) for one in call.keywords}
    if given.pop("create_graph", "") != "True":
        return Refused(Refusal.DONE_ALREADY)
    if not isinstance(statement, ast.Expr) or not isinstance(call.func, ast.Attribute):
        return Refused(Refusal.NOT_MECHANICAL, "backward is part of an expression")
    if call.args or given.keys() - {"retain_graph"}:
        return Refused(Refusal.NOT_MECHANICAL, "backward has other arguments")
    block = text.block(statement)
    following = block[block.index(statement) + 1 : block.index(statement) + 2]
    collected = _collected(following[0]) if following else None
    if collected is None:
        return Refused(Refusal.NOT_MECHANICAL, "no list of the gradients of a variable follows")
    if not (text.alone(statement) and text.alone(following[0])):
        return Refused(Refusal.ONE_LINE)
    target, parameters = collected
    listed = f"list({parameters})" if "(" in parameters else parameters
    other = _other_gradients(text, following[0], parameters)
    if other:
        return Refused(Refusal.NOT_MECHANICAL, other)
    imported = with_import(text, "torch", statement)
    if isinstance(imported, Refused):
        return imported
    names = [
        one for one in ("parameter", "gradient", "kept") if re.search(rf"\b{one}\b", text.text)
    ]
    if names:
        return Refused(Refusal.NAME_TAKEN, names[0])
    indent, newline = text.indent(statement), text.newline(statement.lineno)
    unit, loss = _unit(text, indent), text.source(call.func.value)
    rows = [
        f"{target} = {imported.name}.autograd.grad({loss}, {listed}, create_graph=True)",
        f"for parameter, gradient in zip({parameters}, {target}):",
        f"{unit}kept = parameter.grad",
        f"{unit}parameter.grad = gradient.detach() if kept is None else kept + gradient.detach()",
        "del parameter, gradient, kept",
    ]
    start = text.starts[statement.lineno - 1]
    end = text.span(following[0])[1]
    return [*imported.changes, Replacement(start, end, newline.join(indent + row for row in rows))]


def _other_gradients(text: ProgramText, collecting: Statement, parameters: str) -> str:
    """What needs gradients of other tensors, or the graph of those in ``.grad``; "" for nothing."""
    for node in ast.walk(text.tree):
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            function = ast.unparse(node).endswith("autograd.grad")
            if not function and collecting not in text.ancestors(node):
                return f"line {node.lineno} uses .grad"
        if isinstance(node, ast.Call) and called_name(node)[:1].isupper():
            optimizer = "optim." in f"{full_name(text, node.func)}."
            if optimizer and ast.unparse(node.args[0] if node.args else node) != parameters:
                return f"the optimizer in line {node.lineno} has other parameters"
        assigned = isinstance(node, ast.Assign) and parameters in map(ast.unparse, node.targets)
        if isinstance(node, ast.Assign) and assigned and _only_once(node.value):
            return f"line {node.lineno} makes what can be gone through only once"
    return ""


def _collected(node: Statement) -> tuple[str, str] | None:
    """The variable of ``grads = [p.grad for p in parameters]``, and the ``parameters``: another
    variable, or those of a module."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    target, value = node.targets[0], node.value
    if not isinstance(target, ast.Name) or not isinstance(value, ast.ListComp):
        return None
    (loop, *others) = value.generators
    if others or loop.ifs or loop.is_async:
        return None
    if ast.unparse(value.elt) != f"{ast.unparse(loop.target)}.grad":
        return None
    if not isinstance(loop.iter, ast.Name) and not _of_module(loop.iter):
        return None
    return target.id, ast.unparse(loop.iter)


def _of_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node).endswith(".parameters()")


def _only_once(node: ast.expr) -> bool:
    return isinstance(node, ast.GeneratorExp) or _of_module(node)
