"""Edits that lower the memory of a program: each is data, and `apply` makes it in the source.

An edit that cannot be made without a change of what the program computes is `Refused`, with the
reason. Lines count in the file before all edits.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, cast

from gpuprobe.remedies.blocks import appended_to_loop, inserted_after, inserted_before, is_elif
from gpuprobe.remedies.calls import call_at, keyword_set
from gpuprobe.remedies.flow import (
    Liveness,
    binds,
    bound_before,
    leaves,
    reads,
    shared,
)
from gpuprobe.remedies.grad_mode import with_autograd_grad, without_grad
from gpuprobe.remedies.imports import full_name, with_import
from gpuprobe.remedies.stored import stored_as
from gpuprobe.remedies.text import (
    FUNCTIONS,
    LOOPS,
    ProgramText,
    Refusal,
    Refused,
    Replacement,
    Scope,
    Statement,
)


@dataclass(frozen=True)
class Detach:
    """``.detach()`` for what the line stores: in a container, an attribute, an item, a sum, a
    returned value. ``name``: the expression, if the line stores several; ``every``: all of them."""

    line: int
    name: str = ""
    every: bool = False


@dataclass(frozen=True)
class ToCpu:
    """``.cpu()`` for what the line stores, as for `Detach`. ``detach``: without its graph.
    ``values``: what it stores are dictionaries, whose values are tensors.
    """

    line: int
    name: str = ""
    detach: bool = False
    every: bool = False
    values: bool = False


@dataclass(frozen=True)
class CloneStored:
    """``.clone()`` for what the line stores, as for `Detach`."""

    line: int
    name: str = ""


@dataclass(frozen=True)
class ExpandInsteadOfRepeat:
    """``.expand(…)`` instead of the ``.repeat(…)`` of the line. It runs only if the repeated
    dimensions have one element, and nothing changes the result in place."""

    line: int


@dataclass(frozen=True)
class WithoutAllocatorOption:
    """Remove an option from the allocator settings that the line passes as text."""

    line: int
    option: str


@dataclass(frozen=True)
class DeleteAfterUse:
    """``del name`` after the statement of its last use, on this line. If the value is read after
    the loop, ``name = None`` before the line of the loop that assigns the next one."""

    line: int
    name: str


@dataclass(frozen=True)
class ReleasePart:
    """``part = None`` after the statement of the line with its variable: ``out['logits']`` of the
    variable ``out``, of which other parts are still needed. A field of a ``named_tuple``, which
    cannot be assigned, is replaced."""

    line: int
    part: str
    named_tuple: bool = False

    @property
    def code(self) -> str:
        """The statement that releases it."""
        if not self.named_tuple:
            return f"{self.part} = None"
        name, _, field = self.part.partition(".")
        return f"{name} = {name}._replace({field}=None)"


@dataclass(frozen=True)
class NoGrad:
    """``with torch.no_grad():`` around the statements of these lines; the decorator for the lines
    of a function's header."""

    first: int
    last: int


@dataclass(frozen=True)
class SetKeyword:
    """A keyword of a call: ``value`` is its source, None removes it. ``call``: the last parts of
    the callee's name, ``backward`` or ``torch.load``. ``position``: that of the argument, if it can
    be passed without the keyword, from 0."""

    line: int
    call: str
    keyword: str
    value: str | None
    position: int | None = None


@dataclass(frozen=True)
class MapLocationCpu:
    """``map_location="cpu"`` for the ``torch.load`` of the line."""

    line: int


class Where(str, Enum):
    """The place of an inserted call."""

    BEFORE = "before the line"
    END_OF_LOOP = "at the end of the loop's body"
    AFTER_LOOP = "after the loop"


@dataclass(frozen=True)
class InsertCall:
    """A call such as ``gc.collect()``, with the import of torch or of a standard module. ``where``
    refers to the line, or to the innermost loop that the line is in or begins."""

    line: int
    call: str
    where: Where = Where.BEFORE


@dataclass(frozen=True)
class FreeGradients:
    """``zero_grad(set_to_none=True)`` of the optimizer after the ``step()`` of the line, which may
    be a gradient scaler's. What has no ``zero_grad`` in the file may be a scheduler."""

    line: int


@dataclass(frozen=True)
class LimitCache:
    """``maxsize=1`` for the `functools.lru_cache` of the function whose header has the line, also
    in place of `functools.cache`."""

    line: int


@dataclass(frozen=True)
class LimitEntries:
    """Drop the oldest entries of a dictionary beyond ``most`` after the line that stores one, as
    ``container[key] = value``."""

    line: int
    container: str
    most: int

    @property
    def rows(self) -> tuple[str, str]:
        """The statement that drops them."""
        container = self.container
        return f"while len({container}) > {self.most}:", f"{container}.pop(next(iter({container})))"


@dataclass(frozen=True)
class AutogradGrad:
    """`torch.autograd.grad` instead of the line's ``backward(create_graph=True)``, whose gradients
    the next statement collects from ``.grad``."""

    line: int


Edit: TypeAlias = (
    Detach
    | ToCpu
    | CloneStored
    | ExpandInsteadOfRepeat
    | WithoutAllocatorOption
    | DeleteAfterUse
    | ReleasePart
    | NoGrad
    | SetKeyword
    | MapLocationCpu
    | InsertCall
    | FreeGradients
    | LimitEntries
    | LimitCache
    | AutogradGrad
)


def apply(text: ProgramText, edits: Sequence[Edit]) -> ProgramText | Refused:
    """The file with all edits, or why one of them does not apply."""
    changes: list[Replacement] = []
    for edit in edits:
        found = _changes(text, edit)
        if isinstance(found, Refused):
            return found
        changes += found
    return text.edited(changes)


def _changes(text: ProgramText, edit: Edit) -> list[Replacement] | Refused:
    if not text.statements(edit.first if isinstance(edit, NoGrad) else edit.line):
        return Refused(Refusal.NO_STATEMENT)
    match edit:
        case Detach(line, name, every):
            return stored_as(text, line, name, ".detach()", every=every)
        case ToCpu(line, name, detach, every, values):
            method = ".detach().cpu()" if detach else ".cpu()"
            return stored_as(text, line, name, method, every=every, values=values)
        case CloneStored() | ExpandInsteadOfRepeat() | WithoutAllocatorOption() | LimitEntries():
            return _smaller(text, edit)
        case DeleteAfterUse() | ReleasePart():
            return _released(text, edit)
        case NoGrad(first, last):
            return without_grad(text, first, last)
        case SetKeyword() | MapLocationCpu() | LimitCache():
            return _with_argument(text, edit)
        case InsertCall(line, call, where):
            return _inserted(text, line, call, where)
        case FreeGradients(line):
            return _freed_gradients(text, line)
        case AutogradGrad(line):
            return with_autograd_grad(text, line)


def _with_argument(
    text: ProgramText, edit: SetKeyword | MapLocationCpu | LimitCache
) -> list[Replacement] | Refused:
    match edit:
        case SetKeyword():
            return keyword_set(text, edit.line, edit.call, edit.keyword, edit.value, edit.position)
        case MapLocationCpu(line):
            return keyword_set(text, line, "torch.load", "map_location", '"cpu"', 1)
        case LimitCache(line):
            return _limited_cache(text, line)


def _smaller(
    text: ProgramText,
    edit: CloneStored | ExpandInsteadOfRepeat | WithoutAllocatorOption | LimitEntries,
) -> list[Replacement] | Refused:
    match edit:
        case CloneStored(line, name):
            return stored_as(text, line, name, ".clone()")
        case LimitEntries():
            return _limited(text, edit)
        case ExpandInsteadOfRepeat(line):
            return _expanded(text, line)
        case WithoutAllocatorOption(line, option):
            return _without_option(text, line, option)


def _expanded(text: ProgramText, line: int) -> list[Replacement] | Refused:
    call = call_at(text, line, "repeat")
    if isinstance(call, Refused):
        return call
    if not isinstance(call.func, ast.Attribute) or call.keywords or not call.args:
        return Refused(Refusal.NOT_MECHANICAL, "repeat is not called with its numbers")
    if any(isinstance(one, (ast.Starred, ast.Tuple, ast.List)) for one in call.args):
        return Refused(Refusal.STAR_ARGUMENTS)
    end = text.span(call.func)[1]
    changes = [Replacement(end - len("repeat"), end, "expand")]
    for one in call.args:
        if isinstance(one, ast.Constant) and one.value == 1:
            changes.append(Replacement(*text.span(one), "-1"))
    return changes


def _without_option(text: ProgramText, line: int, option: str) -> list[Replacement] | Refused:
    found = [
        node
        for statement in text.statements(line)
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and option in map(_option_name, node.value.split(","))
    ]
    if len(found) != 1:
        return Refused(Refusal.NO_STATEMENT if not found else Refusal.AMBIGUOUS, option)
    if any(isinstance(around, ast.JoinedStr) for around in text.ancestors(found[0])):
        return Refused(Refusal.IN_A_STRING)
    kept = [one for one in str(found[0].value).split(",") if _option_name(one) != option]
    return [Replacement(*text.span(found[0]), f'"{",".join(kept)}"')]


def _option_name(text: str) -> str:
    return text.partition(":")[0].strip()


def _released(text: ProgramText, edit: DeleteAfterUse | ReleasePart) -> list[Replacement] | Refused:
    if isinstance(edit, DeleteAfterUse):
        return _deleted(text, edit.line, edit.name)
    part = ast.parse(edit.part, mode="eval").body
    if not isinstance(part, (ast.Attribute, ast.Subscript)) or not isinstance(part.value, ast.Name):
        return Refused(Refusal.NOT_A_LOCAL, edit.part)
    name = part.value.id
    here = [one for one in text.statements(edit.line) if reads(one, name) or binds(one, name)]
    if not here:
        return Refused(Refusal.NO_STATEMENT, name)
    if hasattr(here[-1], "body") or leaves(here[-1]):
        return Refused(Refusal.NOT_REACHED)
    return inserted_after(text, here[-1], edit.code)


def _deleted(text: ProgramText, line: int, name: str) -> list[Replacement] | Refused:
    if not name.isidentifier():
        return Refused(Refusal.NOT_A_LOCAL, name)
    here = [one for one in text.statements(line) if reads(one, name) or binds(one, name)]
    if not here:
        return Refused(Refusal.NO_STATEMENT, name)
    node = here[-1]
    scope = text.scope(node)
    if isinstance(scope, ast.ClassDef) or not _is_variable(scope, name):
        return Refused(Refusal.NOT_A_LOCAL, name)
    elsewhere = shared(text, scope, name)
    if elsewhere:
        return Refused(Refusal.VISIBLE_ELSEWHERE, elsewhere)
    live = Liveness(scope.body, name)
    if live.after[node]:
        return _released_before_the_next(text, node, name, live)
    node = _outermost(text, scope, node, name, live)
    if leaves(node):
        return Refused(Refusal.NOT_REACHED)
    bound = bound_before(text, scope, node, name) or _binds_simply(node, name)
    return inserted_after(text, node, f"del {name}" if bound else f"{name} = None")


def _is_variable(scope: Scope, name: str) -> bool:
    """Whether a scope assigns the name, or has it as a parameter."""
    own = [] if isinstance(scope, ast.Module) else list(ast.walk(scope.args))
    if any(isinstance(one, ast.arg) and one.arg == name for one in own):
        return True
    return any(
        isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Store)
        for one in ast.walk(scope)
    )


def _binds_simply(node: Statement, name: str) -> bool:
    return not hasattr(node, "body") and binds(node, name)


def _outermost(
    text: ProgramText, scope: Scope, node: Statement, name: str, live: Liveness
) -> Statement:
    """The statement after which the variable is deleted: around ``node`` and other branches if it
    has a value there on all of them.
    """
    best = node
    while True:
        parent = text.parents[node]
        if not isinstance(parent, ast.If) or live.after[parent]:
            return best
        branch = is_elif(text, best)
        node = parent
        if branch:
            best = parent  # no statement can follow within the branch
        elif bound_before(text, scope, parent, name):
            best = parent


def _released_before_the_next(
    text: ProgramText, node: Statement, name: str, live: Liveness
) -> list[Replacement] | Refused:
    """``name = None`` before the statement of the same loop that assigns the next value."""
    loop = next((one for one in text.ancestors(node) if isinstance(one, LOOPS)), None)
    if loop is None or text.scope(loop) is not text.scope(node):
        return Refused(Refusal.USED_LATER, name)
    within = Liveness(loop.body, name, in_loop=True)
    if node not in within.after or within.after[node]:
        return Refused(Refusal.USED_LATER, name)
    assigning = [
        one
        for one in ast.walk(loop)
        if isinstance(one, ast.stmt) and one is not loop and binds(one, name)
    ]
    dead = [
        one
        for one in assigning
        if _is_assignment(one) and one is not node and not live.before.get(one, True)
    ]
    if not dead:
        return Refused(Refusal.USED_LATER, name)
    later = [one for one in dead if one.lineno > node.lineno]  # or in the next iteration
    return inserted_before(text, min(later or dead, key=lambda one: one.lineno), f"{name} = None")


def _is_assignment(node: Statement) -> bool:
    return isinstance(node, (ast.Assign, ast.AnnAssign))


def _loop_at(text: ProgramText, line: int) -> ast.For | ast.AsyncFor | ast.While | None:
    """The innermost loop that the line is in or begins."""
    node = text.statements(line)[0]
    around = (node, *text.ancestors(node))
    for one in around:
        if isinstance(one, LOOPS):
            return one
        if isinstance(one, (*FUNCTIONS, ast.ClassDef)):
            return None
    return None


def _is_module(name: str) -> bool:
    """Whether the first part of a call is a module; otherwise it is a variable of the program."""
    return name == "torch" or name in sys.stdlib_module_names


def _inserted(text: ProgramText, line: int, call: str, where: Where) -> list[Replacement] | Refused:
    try:
        parsed = ast.parse(call, mode="eval").body
    except (SyntaxError, ValueError):
        return Refused(Refusal.INVALID, call)
    if not isinstance(parsed, ast.Call) or "\n" in call:
        return Refused(Refusal.INVALID, call)
    node = text.statements(line)[0]
    if where is not Where.BEFORE:
        loop = _loop_at(text, line)
        if loop is None:
            return Refused(Refusal.NO_STATEMENT, "loop")
        node = loop
    root: ast.AST = parsed.func
    while isinstance(root, ast.Attribute):
        root = root.value
    added: list[Replacement] = []
    module = isinstance(root, ast.Name) and root is not parsed.func and _is_module(root.id)
    if isinstance(root, ast.Name) and module:
        imported = with_import(text, root.id, node)
        if isinstance(imported, Refused):
            return imported
        if imported.name != root.id:
            call = imported.name + call.removeprefix(root.id)
        added = imported.changes
    if where is Where.BEFORE:
        found = inserted_before(text, node, call)
    elif where is Where.AFTER_LOOP:
        found = inserted_after(text, node, call)
    else:
        found = appended_to_loop(text, cast("ast.For | ast.AsyncFor | ast.While", node), call)
    return found if isinstance(found, Refused) else [*added, *found]


def _freed_gradients(text: ProgramText, line: int) -> list[Replacement] | Refused:
    zeroed = {
        ast.unparse(one.value)
        for one in ast.walk(text.tree)
        if isinstance(one, ast.Attribute) and one.attr == "zero_grad"
    }
    for node in text.statements(line):
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr != "step":
            continue
        optimizer = call.func.value
        if "scaler" in ast.unparse(optimizer).lower() and call.args:
            optimizer = call.args[0]
        name = ast.unparse(optimizer)
        if name in zeroed:
            return inserted_after(text, node, f"{name}.zero_grad(set_to_none=True)")
    return Refused(Refusal.NO_STATEMENT, "the step of an optimizer whose gradients are zeroed")


def _limited(text: ProgramText, edit: LimitEntries) -> list[Replacement] | Refused:
    for node in text.statements(edit.line):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(
            isinstance(one, ast.Subscript) and ast.unparse(one.value) == edit.container
            for one in targets
        ):
            if not text.alone(node):
                return Refused(Refusal.ONE_LINE)
            header, body = edit.rows
            return inserted_after(text, node, header, f"    {body}")
    return Refused(Refusal.NOTHING_STORED, edit.container)


def _limited_cache(text: ProgramText, line: int) -> list[Replacement] | Refused:
    for node in text.statements(line):
        for decorator in node.decorator_list if isinstance(node, FUNCTIONS) else ():
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = full_name(text, called)
            if name == "functools.lru_cache" and isinstance(decorator, ast.Call):
                return keyword_set(text, decorator.lineno, "lru_cache", "maxsize", "1", 0)
            if name == "functools.lru_cache":
                return [Replacement(*text.span(decorator), f"{text.source(decorator)}(maxsize=1)")]
            if name == "functools.cache":
                imported = with_import(text, "functools", node)
                if isinstance(imported, Refused):
                    return imported
                limited = f"{imported.name}.lru_cache(maxsize=1)"
                return [*imported.changes, Replacement(*text.span(decorator), limited)]
    return Refused(Refusal.NO_STATEMENT, "a function with functools.cache")
