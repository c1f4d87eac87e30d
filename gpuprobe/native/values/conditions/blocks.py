"""What the statements of a branch amount to: an error, a warning, or work."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Final

from gpuprobe.native.values.conditions.source import SourceTree

_ENDS: Final = frozenset({"sys.exit", "exit", "quit", "os._exit", "os.abort"})
_FAILS: Final = re.compile(r"_?(raise|throw|fail)(_\w+)?")
_LOGGERS: Final = re.compile(
    r"(?i)(.*_)?(log|logger|logging|warnings|console|stderr|stdout|tqdm|pbar|progress)"
)
_REPORTS: Final = re.compile(
    r"_?(warn|warning|print|pprint|rank_zero_\w+|log_warning|log|logger)(ing|s)?"
    r"(_once|_only|_rank_?0|_main_process|_advice)?"
)
_METHODS: Final = frozenset(
    {"critical", "debug", "error", "exception", "info", "log", "print", "write", "flush", "echo"}
)
_MESSAGES: Final = frozenset({"critical", "debug", "error", "exception", "info", "warning"})
_FLAGS: Final = re.compile(r"warned|warning_(issued|shown)|logged|printed")
_LEAVE: Final = (ast.Return, ast.Break, ast.Continue)


class BlockOutcome(Enum):
    """The outcome of running a block."""

    RAISES = "an error"
    WARNS = "a warning"
    WORKS = "anything else"


def kind_of(statements: Sequence[ast.stmt], branch: ast.AST, source: SourceTree) -> BlockOutcome:
    """The outcome of a block of ``branch`` (an ``if``): `BlockOutcome.RAISES` if every path through
    it ends in an exception that nothing here catches, or in the end of the process;
    `BlockOutcome.WARNS` if it only builds text and prints it.
    """
    if raises(statements):
        return BlockOutcome.RAISES
    if statements and _only_reports(statements, branch, source) and _has_report(statements):
        return BlockOutcome.WARNS
    return BlockOutcome.WORKS


def leaves(statements: Sequence[ast.stmt]) -> bool:
    """Whether a block never continues with the statements after it."""
    return bool(statements) and isinstance(statements[-1], _LEAVE)


def reports(call: ast.expr) -> bool:
    """Whether a call prints, logs or warns."""
    if not isinstance(call, ast.Call):
        return False
    *base, name = dotted(call.func).split(".")
    if _REPORTS.fullmatch(name) or prints(call):
        return True
    return name in _METHODS and any(_LOGGERS.fullmatch(part) for part in base)


def prints(call: ast.Call) -> bool:
    """Whether a call makes text of its arguments, and does nothing else with them: ``print``, a
    logger's messages, and tqdm's ``set_postfix``.
    """
    *base, name = dotted(call.func).split(".")
    if name in _MESSAGES:
        return any(_LOGGERS.fullmatch(part) for part in base)
    return name == "set_postfix" or (name == "print" and not base)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an expression of that form; parts that are not names are left out."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else node.attr
    if isinstance(node, ast.Call):  # get_logger(__name__).warning(...)
        return dotted(node.func)
    return ""


def raises(statements: Sequence[ast.stmt]) -> bool:
    """Whether every path through statements ends in an exception."""
    for statement in statements:
        if isinstance(statement, ast.Raise):
            return True
        if isinstance(statement, ast.Expr) and _never_returns(statement.value):
            return True
        if isinstance(statement, ast.Assert) and _false(statement.test):
            return True
        if isinstance(statement, ast.If) and raises(statement.body) and raises(statement.orelse):
            return True
        if isinstance(statement, (ast.With, ast.AsyncWith)) and raises(statement.body):
            return not suppresses(statement)
        if any(
            isinstance(node, (*_LEAVE, ast.Yield, ast.YieldFrom)) for node in _inside(statement)
        ):
            return False
    return False


def may_leave(statement: ast.stmt) -> bool:
    """Whether a statement may leave its block, by an exception or otherwise, or yield."""
    away = (*_LEAVE, ast.Raise, ast.Yield, ast.YieldFrom, ast.Await)
    return any(isinstance(node, away) for node in _inside(statement))


def caught(branch: ast.AST, source: SourceTree) -> bool:
    """Whether a handler in the same function may catch an exception of the branch, and continue."""
    child = branch
    while not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        parent = source.parents[child]
        if isinstance(parent, ast.With) and suppresses(parent):
            return True
        if isinstance(parent, ast.Try) and child in parent.body:
            for handler in parent.handlers:
                if kind_of(handler.body, handler, source) is not BlockOutcome.RAISES:
                    return True
        child = parent
    return False


def suppresses(statement: ast.With | ast.AsyncWith) -> bool:
    """Whether a ``with`` may suppress an exception."""
    return any(re.search(r"suppress|raises", ast.unparse(item)) for item in statement.items)


def _inside(statement: ast.stmt) -> list[ast.AST]:
    """A statement and the nodes in it, without functions that it defines."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        found.append(node)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def _never_returns(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = dotted(node.func)
    if name in _ENDS or _FAILS.fullmatch(name.rpartition(".")[2]):
        return True
    # torch._assert(False, "..."), torch._check(False)
    checks = name.rpartition(".")[2] in ("_assert", "_check")
    return checks and bool(node.args) and _false(node.args[0])


def _false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _has_report(statements: Sequence[ast.stmt]) -> bool:
    """Whether a block contains a report, or nothing at all: with assignments alone it does work."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    assigns = any(isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) for node in nodes)
    return not assigns or any(isinstance(node, ast.Call) and reports(node) for node in nodes)


def _only_reports(statements: Sequence[ast.stmt], branch: ast.AST, source: SourceTree) -> bool:
    return all(_is_report(statement, branch, source) for statement in statements)


def _is_report(statement: ast.stmt, branch: ast.AST, source: SourceTree) -> bool:
    if isinstance(statement, (ast.Pass, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) or reports(statement.value)
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return all(_of_the_message(target, branch, source) for target in targets)
    if isinstance(statement, ast.If) and raises(statement.body):
        return _only_reports(statement.orelse, branch, source)
    if isinstance(statement, (ast.If, ast.For)):
        return _only_reports(statement.body + statement.orelse, branch, source)
    if isinstance(statement, ast.With):
        return _only_reports(statement.body, branch, source)
    return False


def _of_the_message(target: ast.expr, branch: ast.AST, source: SourceTree) -> bool:
    """Whether an assignment serves only the message: to a name that is used nowhere else, or to a
    flag that prevents a second message.
    """
    if isinstance(target, ast.Attribute):
        return bool(_FLAGS.search(target.attr))
    if not isinstance(target, ast.Name):
        return False
    if _FLAGS.search(target.id):
        return True
    statements = (*getattr(branch, "body", ()), *getattr(branch, "orelse", ()))
    inside = {node for statement in statements for node in ast.walk(statement)}
    if not any(_reads(node, target.id) for node in inside):
        return False  # kept for another purpose: memory that stays alive
    if isinstance(branch, ast.If):
        inside.update(ast.walk(branch.test))
    return not any(
        _reads(node, target.id) and node not in inside
        for node in ast.walk(source.function_of(branch))
    )


def _reads(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


_UNDECIDED: Final = object()


def flagged(branch: ast.If, source: SourceTree) -> tuple[BlockOutcome, BlockOutcome] | None:
    """The outcome of a branch that only assigns constants to names, and the outcome of skipping it:
    an error or a warning further down in its function, or work. None if the names, read after it,
    are also read elsewhere.
    """
    if branch.orelse:
        return None
    constants: dict[str, object] = {}
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
    """The later branches that read a name in their test; None for each read outside of those tests
    and branches.
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


def _values_before(name: str, branch: ast.If, scope: ast.AST) -> list[object]:
    """The constants that a name gets before a branch; empty if it gets anything else."""
    found: list[object] = []
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


def _holds(test: ast.expr, name: str, value: object) -> bool | None:
    """Whether a test of a name is true for a value; None if more decides."""
    found = _evaluated(test, name, value)
    return None if found is _UNDECIDED else bool(found)


def _evaluated(node: ast.expr, name: str, value: object) -> object:
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
