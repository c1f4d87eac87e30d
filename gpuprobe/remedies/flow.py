"""The flow of one variable through a scope: where it has a value, and where that is needed.

The rules are one-sided: what may be read counts as read, what may be unbound as unbound.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from gpuprobe.remedies.reaching import ControlFlow, bound_by
from gpuprobe.remedies.text import BLOCKS, FUNCTIONS, LOOPS, ProgramText, Scope, Statement

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)
_INNER = (*FUNCTIONS, ast.ClassDef, ast.Lambda, ast.GeneratorExp)
"""Code that runs later, or with names that are visible elsewhere."""
_SCOPES = (*FUNCTIONS, *_COMPREHENSIONS, ast.GeneratorExp)
"""Code that has variables which nothing around it has."""
_FRAMES = frozenset(("locals", "vars", "eval", "exec", "dir", "globals"))
"""Functions that read variables by other means than their names."""


def shared(text: ProgramText, scope: Scope, name: str) -> str:
    """What reads a variable of ``scope`` apart from its own statements; "" if nothing does."""
    for node in ast.walk(scope):
        line = f"line {getattr(node, 'lineno', 0)}"
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return f"a declaration in {line}"
        if isinstance(node, ast.Name) and node.id in _FRAMES and _calls(text, node):
            return f"{node.id}() in {line}"
        if node is not scope and isinstance(node, _INNER) and _mentions(node, name):
            parameters = list(ast.walk(node.args)) if hasattr(node, "args") else []
            bound = any(isinstance(one, ast.arg) and one.arg == name for one in parameters)
            if not bound and not _rebinds(node, name):
                return f"code that is defined in {line}"
        if isinstance(node, ast.ExceptHandler) and node.name == name:
            return f"except in {line}"
    exported = isinstance(scope, ast.Module) and any(
        isinstance(node, ast.Assign)
        and any(isinstance(one, ast.Name) and one.id == "__all__" for one in node.targets)
        and any(isinstance(one, ast.Constant) and one.value == name for one in ast.walk(node.value))
        for node in scope.body
    )
    return "__all__" if exported else ""


def _calls(text: ProgramText, node: ast.Name) -> bool:
    parent = text.parents.get(node)
    if not isinstance(parent, ast.Call) or parent.func is not node:
        return False
    return node.id not in ("vars", "dir") or not parent.args


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))


def _rebinds(node: ast.AST, name: str) -> bool:
    """Whether a function assigns the name: its own variable."""
    return isinstance(node, FUNCTIONS) and any(
        isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Store)
        for one in ast.walk(node)
    )


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run with a statement: without inner statements and inner functions."""
    pending = [node]
    while pending:
        one = pending.pop()
        yield one
        for child in ast.iter_child_nodes(one):
            if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                continue
            pending.append(child)


def reads(node: ast.AST, name: str) -> bool:
    """Whether a statement, or the header of a compound one, reads or deletes the variable."""
    for one in _own(node):
        if isinstance(one, ast.Name) and one.id == name and not isinstance(one.ctx, ast.Store):
            return True
    target = node.target if isinstance(node, ast.AugAssign) else None
    return isinstance(target, ast.Name) and target.id == name


def binds(node: ast.AST, name: str) -> bool:
    """Whether a statement, or the header of a compound one, assigns the variable whenever it
    completes. Assignments in expressions do not count: they may be skipped.
    """
    targets: list[ast.AST] = []
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.For, ast.AsyncFor)):
        targets = [node.target]
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target] if node.value is not None else []
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        return any((one.asname or one.name.partition(".")[0]) == name for one in node.names)
    elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return node.name == name
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.NamedExpr):
        targets = [node.value.target]
    return any(
        isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Store)
        for target in targets
        for one in ast.walk(target)
    )


def unbinds(scope: Scope, name: str) -> bool:
    """Whether a scope deletes the variable anywhere."""
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Del)
        for node in ast.walk(scope)
    )


class Liveness:
    """Where the value that a variable has may still be read, in one scope or (``in_loop``) in one
    iteration of a loop's body.

    ``after``: for each statement, whether the value that the variable has when the statement is
    over may be read by what runs next.
    """

    def __init__(self, body: Sequence[Statement], name: str, *, in_loop: bool = False) -> None:
        self._name = name
        self.after: dict[ast.AST, bool] = {}
        self.before: dict[ast.AST, bool] = {}
        # Live at `continue`, live at `break`.
        self._loops: list[tuple[bool, bool]] = [(False, False)] if in_loop else []
        self._raised: list[bool] = []  # live in the handlers around
        self._block(body, False)

    def _block(self, block: Sequence[Statement], live: bool) -> bool:
        for node in reversed(block):
            self.after[node] = live
            live = self._statement(node, live)
            self.before[node] = live
        return live

    def _statement(self, node: Statement, live: bool) -> bool:
        name = self._name
        raised = any(self._raised)
        if isinstance(node, (ast.Return, ast.Raise)):
            return reads(node, name) or raised
        if isinstance(node, ast.Continue):
            return self._loops[-1][0] or raised
        if isinstance(node, ast.Break):
            return self._loops[-1][1] or raised
        if isinstance(node, LOOPS):
            return self._loop(node, live) or raised
        if isinstance(node, ast.If):
            inner = self._block(node.body, live) | self._block(node.orelse, live)
            return inner or reads(node, name)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            inner = self._block(node.body, live)
            return (inner and not binds(node, name)) or reads(node, name) or raised
        if isinstance(node, ast.Match):
            # A pattern may bind the name, or not.
            cases = [self._block(case.body, live) for case in node.cases]
            guards = any(_mentions(case.guard, name) for case in node.cases if case.guard)
            return any(cases) or live or guards or reads(node, name)
        if hasattr(node, "handlers"):
            return self._try(node, live)
        return (live and not binds(node, name)) or reads(node, name) or raised

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, live: bool) -> bool:
        name = self._name
        after = self._block(node.orelse, live)
        # A `for` binds its target at each start of the body, and not when it ends.
        bound = binds(node, name)
        test = isinstance(node, ast.While) and reads(node, name)
        head = after
        for _ in range(2):  # the body's end leads to its start
            self._loops.append((head, live))
            body = self._block(node.body, head)
            self._loops.pop()
            head = test or after or (body and not bound)
        return head or reads(node, name)

    def _try(self, node: Statement, live: bool) -> bool:
        final = self._block(node.finalbody, live)  # type: ignore[attr-defined]
        handlers = [self._block(one.body, final) for one in node.handlers]  # type: ignore[attr-defined]
        types = any(
            _mentions(one.type, self._name)
            for one in node.handlers  # type: ignore[attr-defined]
            if one.type is not None
        )
        other = self._block(node.orelse, final)  # type: ignore[attr-defined]
        raised = any(handlers) or types or final
        self._raised.append(raised)
        body = self._block(node.body, other)  # type: ignore[attr-defined]
        self._raised.pop()
        return body or raised


def bound_before(text: ProgramText, scope: Scope, node: Statement, name: str) -> bool:
    """Whether the variable has a value whenever ``node`` starts."""
    if unbinds(scope, name):
        return False
    here: ast.AST = node
    while here is not scope:
        parent = text.parents[here]
        for field in BLOCKS:
            block = getattr(parent, field, None)
            if isinstance(block, list) and here in block:
                if any(_completes_bound(one, name) for one in block[: block.index(here)]):
                    return True
                # The target of a loop is bound within its body only.
                if field == "body" and parent is not scope and binds(parent, name):
                    return True
        here = parent
    if isinstance(scope, ast.Module):
        return False
    arguments = scope.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return any(one.arg == name for one in every)


def _completes_bound(node: Statement, name: str) -> bool:
    """Whether the variable has a value after a statement that completed."""
    if isinstance(node, ast.If):
        return all(
            any(_completes_bound(one, name) for one in block) or _leaves(block)
            for block in (node.body, node.orelse)
        )
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return binds(node, name)  # the block may be left by a suppressed exception
    if isinstance(node, LOOPS):
        return False
    if hasattr(node, "finalbody"):
        return any(_completes_bound(one, name) for one in node.finalbody)
    return binds(node, name)


def _leaves(block: Sequence[Statement]) -> bool:
    """Whether no statement runs after a block."""
    return bool(block) and leaves(block[-1])


def leaves(node: Statement) -> bool:
    """Whether the statement after this one is not reached."""
    if isinstance(node, ast.If):
        return bool(node.orelse) and _leaves(node.body) and _leaves(node.orelse)
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return _leaves(node.body)
    return isinstance(node, (ast.Return, ast.Raise, ast.Break, ast.Continue))


_ENDS_A_GRAPH = frozenset(
    ("item", "detach", "tolist", "numpy", "detach_", "argmax", "size", "numel")
)
_NUMBERS = frozenset(("float", "int", "bool", "len", "str", "print", "isinstance", "type", "id"))


def without_graph(node: ast.expr) -> bool:
    """Whether an expression is surely not a tensor with a graph."""
    if isinstance(node, (ast.Constant, ast.JoinedStr, ast.Compare, ast.Lambda)):
        return True
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Name):
            return function.id in _NUMBERS
        if isinstance(function, ast.Attribute):
            return function.attr in _ENDS_A_GRAPH or without_graph(function.value)
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return isinstance(node, ast.Attribute) and (
            node.attr in ("shape", "data", "device", "dtype") or without_graph(node.value)
        )
    if isinstance(node, ast.BinOp):
        return without_graph(node.left) and without_graph(node.right)
    if isinstance(node, ast.UnaryOp):
        return without_graph(node.operand)
    return False


def carries(node: ast.AST, keys: frozenset[str]) -> bool:
    """Whether the value of an expression may depend, with its graph, on one of ``keys``: names,
    and attributes as ``.name``.
    """
    if isinstance(node, ast.expr) and without_graph(node):
        return False
    if isinstance(node, ast.Name):
        return node.id in keys
    if isinstance(node, ast.Attribute) and f".{node.attr}" in keys:
        return True
    return any(carries(child, keys) for child in ast.iter_child_nodes(node))


def keys_of(target: ast.AST) -> frozenset[str]:
    """The names and attributes that an assignment to ``target`` changes."""
    if isinstance(target, ast.Name):
        return frozenset((target.id,))
    if isinstance(target, ast.Attribute):
        return frozenset((f".{target.attr}",))
    if isinstance(target, (ast.Subscript, ast.Starred)):
        return keys_of(target.value)
    if isinstance(target, (ast.Tuple, ast.List)):
        return frozenset[str]().union(*(keys_of(one) for one in target.elts))
    return frozenset()


ADDING = frozenset(
    ("append", "appendleft", "add", "insert", "extend", "put", "update", "setdefault")
)
"""Methods of containers that store an argument."""
_FRAMEWORK = frozenset(("forward", "training_step", "compute_loss", "loss", "closure"))
"""Functions whose result a framework calls ``backward`` on."""


Storing: TypeAlias = tuple[frozenset[str], ast.AST | None]
"""Keys under which a value is stored, and the node that does, if it is known."""


def needed_by_backward(text: ProgramText, stored: Iterable[Storing], scope: Scope) -> str:
    """The place of a backward pass that may go through a value that is ``stored``; "" if there is
    none. Names count within ``scope``, attributes in the whole file; results of the file's
    functions count where they are called.
    """
    return _Reached(text, stored, scope).backward()


class _Reached:
    """What may depend, with its graph, on a stored value: names by their scope, attributes as
    ``.name``, results of functions as ``(name``.

    A name that an assignment binds counts where it has that value. It counts in its whole scope if
    inner code can read it, or if its value is changed: other names may have that value too.
    """

    def __init__(self, text: ProgramText, stored: Iterable[Storing], scope: Scope) -> None:
        self._text = text
        self._nodes = [
            (node, self._scope(node), self._statement(node)) for node in ast.walk(text.tree)
        ]
        self._stores: dict[ast.AST, set[str]] = {
            node: _assigned(node) for node in ast.walk(text.tree) if isinstance(node, _SCOPES)
        }
        self._read_later = self._names_of_inner_code()
        self._flows: dict[ast.AST, ControlFlow] = {}
        self._everywhere: set[str] = set()
        self._names: dict[ast.AST, set[str]] = {}
        self._values: dict[ast.AST, dict[str, set[ast.AST]]] = {}  # where a name has the value
        for keys, bound in stored:
            self._add(keys, scope, bound)
        while self._spread():
            pass

    def _statement(self, node: ast.AST) -> ast.AST | None:
        """The innermost statement that a node is, or is in."""
        around = (node, *self._text.ancestors(node))
        return next((one for one in around if isinstance(one, ast.stmt)), None)

    def _names_of_inner_code(self) -> set[str]:
        """The names of outer variables in functions, lambdas, generators and classes."""
        return {
            name.id
            for node, _, _ in self._nodes
            if isinstance(node, _INNER)
            for name in ast.walk(node)
            if isinstance(name, ast.Name) and name.id not in self._stores.get(node, ())
        }

    def _scope(self, node: ast.AST) -> ast.AST:
        around = self._text.ancestors(node)
        return next((one for one in around if isinstance(one, _SCOPES)), self._text.tree)

    def _add(self, keys: Iterable[str], scope: ast.AST, bound: ast.AST | None) -> bool:
        """Returns whether one is new. ``bound``: the node that stores them."""
        before = self._size()
        for key in keys:
            if key[0] in ".(":
                self._everywhere.add(key)
                continue
            here = scope
            while here in self._stores and key not in self._stores[here]:
                here = self._scope(here)
            if self._is_bound(key, here, bound):
                assert isinstance(bound, ast.stmt)
                assert isinstance(here, (*FUNCTIONS, ast.Module))
                if here not in self._flows:
                    self._flows[here] = ControlFlow(here)
                places = self._values.setdefault(here, {}).setdefault(key, set())
                places |= self._flows[here].with_value(bound, key)
            else:
                self._names.setdefault(here, set()).add(key)
        return self._size() > before

    def _is_bound(self, name: str, scope: ast.AST, node: ast.AST | None) -> bool:
        """Whether a node binds a variable that only the statements of its scope can read."""
        targets: Sequence[ast.AST] = ()
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = (node.target,)
        return (
            isinstance(scope, (*FUNCTIONS, ast.Module))
            and node is not None
            and self._text.scope(node) is scope
            and name not in self._read_later
            and any(bound_by(target, name) for target in targets)
        )

    def _size(self) -> int:
        names = len(self._everywhere) + sum(map(len, self._names.values()))
        return names + sum(len(one) for bound in self._values.values() for one in bound.values())

    def _known(self, scope: ast.AST, statement: ast.AST | None) -> frozenset[str]:
        """The keys that a statement can read in a scope."""
        found = self._everywhere | self._own(scope, statement)
        hidden = set(self._stores.get(scope, ()))
        while not isinstance(scope, ast.Module):
            scope = self._scope(scope)
            found = found | (self._own(scope, statement) - hidden)
            hidden |= self._stores.get(scope, set())
        return frozenset(found)

    def _own(self, scope: ast.AST, statement: ast.AST | None) -> set[str]:
        bound = self._values.get(scope, {})
        here = {name for name, places in bound.items() if statement in places}
        return self._names.get(scope, set()) | here

    def _spread(self) -> bool:
        found = False
        for node, scope, statement in self._nodes:
            targets, value = stored_by(node)
            if value is None or not _depends(value, self._known(scope, statement)):
                continue
            if isinstance(node, (ast.Return, ast.Yield)):
                keys = (
                    frozenset((f"({scope.name}",)) if isinstance(scope, FUNCTIONS) else frozenset()
                )
            else:
                keys = frozenset[str]().union(*(keys_of(target) for target in targets))
            found |= self._add(keys, scope, node)
        return found

    def backward(self) -> str:
        for node, scope, statement in self._nodes:
            known = self._known(scope, statement)
            if isinstance(node, ast.Call) and _runs_backward(node, known):
                return f"line {node.lineno}"
            if isinstance(node, FUNCTIONS) and node.name in _FRAMEWORK and f"({node.name}" in known:
                return f"the result of {node.name} in line {node.lineno}"
        return ""


def _assigned(function: ast.AST) -> set[str]:
    """The variables of a function and of those in it, without the declared global ones."""
    found: set[str] = set()
    declared: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            declared |= set(node.names)
    return found - declared


def stored_by(node: ast.AST) -> tuple[Sequence[ast.AST], ast.AST | None]:
    """The targets and the value of a statement that stores, returns or iterates over one."""
    if isinstance(node, ast.Assign):
        return node.targets, node.value
    if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
        return (node.target,), node.value
    if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        return (node.target,), node.iter
    if isinstance(node, (ast.Return, ast.Yield)):
        return (), node.value
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ADDING
    ):
        values = [*node.args, *(one.value for one in node.keywords)]
        return (node.func.value,), ast.Tuple(values, ast.Load())
    return (), None


def _depends(value: ast.AST, keys: frozenset[str]) -> bool:
    """Whether an expression depends on reached values: also by a call of a function with one."""
    if carries(value, keys):
        return True
    if isinstance(value, ast.expr) and without_graph(value):
        return False
    return any(
        isinstance(one, ast.Call) and f"({called_name(one)}" in keys for one in ast.walk(value)
    )


def called_name(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


BACKWARD = frozenset(("backward", "grad", "manual_backward"))


def _runs_backward(call: ast.Call, keys: frozenset[str]) -> bool:
    """Whether a call runs the backward pass of a reached value."""
    if called_name(call) not in BACKWARD:
        return False
    parts: list[ast.AST] = [*call.args]
    if isinstance(call.func, ast.Attribute):
        parts.append(call.func.value)
    return any(_depends(part, keys) for part in parts)
