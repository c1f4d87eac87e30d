"""Which side of a branch a program takes when the condition is unknown.

If one side can only raise an error or print a warning, the program is assumed to take the other
side; if the condition tests whether numbers are finite, they are assumed to be.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

from gpuprobe.native.values.conditions.blocks import (
    BlockOutcome,
    caught,
    dotted,
    flagged,
    kind_of,
    leaves,
    may_leave,
    raises,
    reports,
)
from gpuprobe.native.values.conditions.source import (
    WITHIN,
    SourceTree,
    TruthSource,
    evaluated,
    loads,
    name_of,
    reading_of,
    source_of,
)

FINITE: Final = "numbers are finite"
"""How the reason of a verdict about NaN and infinity begins."""

_FRAMES: Final = 6  # callers through which a condition is followed
_SHOWN: Final = 60  # characters of a condition in a message

_TRUTH: Final = frozenset(
    {
        "bool",
        "any",
        "all",
        "item",
        "equal",
        "allclose",
        "is_nonzero",
        "_is_all_true",
        "_is_any_true",
    }
)
"""Calls that return the truth of their argument, or that of the first one that decides."""

_DEMANDS: Final = frozenset({"_assert", "_check", "check", "assertTrue", "assert_true"})


class Verdict(NamedTuple):
    """The assumed value of a condition. ``file`` and ``line`` are the place of the condition,
    ``why`` is the assumption. ``bound``: both sides do work, and this one does more.
    """

    value: bool
    file: str
    line: int
    why: str
    bound: bool = False


class _Found(NamedTuple):
    """The assumed value of an expression, and why; ``node`` is the condition."""

    value: bool
    why: str
    node: ast.expr
    bound: bool = False


class _Returned(NamedTuple):
    """The expression is returned by its function, negated or not."""

    negated: bool


def decide(frame: FrameType | None, ours: Callable[[FrameType], bool]) -> Verdict | None:
    """The value to assume for the truth that ``frame`` reads at its current instruction; None if
    both sides of the condition do work, or if it cannot be decided. Frames that are ``ours`` are
    skipped on the way out. An ``if`` without ``else`` whose statements do work is a verdict that is
    a ``bound``: with them the program does everything that it does without, and more.
    """
    negated = False
    call: str | None = None
    for _ in range(_FRAMES):
        while frame is not None and ours(frame):
            frame = frame.f_back
        source = None if frame is None else source_of(frame)
        if frame is None or source is None:
            return None
        reading = reading_of(frame) if call is None else TruthSource(frame, call)
        nodes = evaluated(reading, source)
        if reading.call is WITHIN:  # only calls that return what they read are known
            nodes = [node for node in nodes if _returns_truth(node)]
        found = _agreeing([_follow(node, source) for node in nodes])
        if isinstance(found, _Found):
            value = found.value != negated
            line, why = found.node.lineno, f"{found.why} (`{_shown(found.node)}`)"
            return Verdict(value, frame.f_code.co_filename, line, why, found.bound)
        if found is None:
            return None
        negated = negated != found.negated
        call = frame.f_code.co_name
        frame = frame.f_back
    return None


def _agreeing(results: Sequence[_Found | _Returned | None]) -> _Found | _Returned | None:
    """The common result, or one of several that all assume the same value; None if they differ."""
    if not results:
        return None
    if all(result == results[0] for result in results[1:]):
        return results[0]
    values = {result.value if isinstance(result, _Found) else None for result in results}
    return results[0] if len(values) == 1 and None not in values else None


def _shown(condition: ast.expr) -> str:
    text = ast.unparse(condition)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _follow(node: ast.expr, source: SourceTree) -> _Found | _Returned | None:
    """Climb from an expression to what its value decides."""
    known = finite(node, source)
    found = _climb(node, source)
    if known is not None and (found is None or (isinstance(found, _Found) and found.bound)):
        return _Found(known, FINITE, node)
    return found


def _climb(start: ast.expr, source: SourceTree) -> _Found | _Returned | None:
    negated = False
    child: ast.AST = start
    while True:
        parent = source.parents.get(child)
        if parent is None:
            return None
        negates = _passed_on(parent, child, source)
        if negates is None:
            return _outcome(parent, child, start, negated, source)
        negated = negated != negates
        child = parent


def _passed_on(parent: ast.AST, child: ast.AST, source: SourceTree) -> bool | None:
    """Whether an expression negates the truth of its part; None if its own truth is another one."""
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
        return True
    if isinstance(parent, ast.Compare):
        same = _compared(parent, child)
        return None if same is None else not same
    passes = (
        # The two last are text: what that is used for is decided further out.
        isinstance(parent, (ast.NamedExpr, ast.Starred, ast.FormattedValue, ast.JoinedStr))
        or (isinstance(parent, (ast.GeneratorExp, ast.ListComp)) and child is parent.elt)
        or (isinstance(parent, ast.BoolOp) and not _only_printed(parent, child, source))
        or (isinstance(parent, ast.Attribute) and parent.attr in _TRUTH)
        or (isinstance(parent, ast.Call) and name_of(parent.func) in _TRUTH)
    )
    return False if passes else None


def _outcome(
    parent: ast.AST, child: ast.AST, start: ast.expr, negated: bool, source: SourceTree
) -> _Found | _Returned | None:
    """What the truth of ``child`` decides in ``parent``, which does not pass it on."""
    if isinstance(parent, ast.BoolOp):
        return _Found(isinstance(parent.op, ast.Or), "nothing is printed", start)
    if isinstance(parent, ast.Call):
        if name_of(parent.func) in _DEMANDS and parent.args and child is parent.args[0]:
            return _Found(not negated, "the check passes", start)
        return _Found(False, _PRINTED, start) if reports(parent) else None
    if isinstance(parent, (ast.Return, ast.Lambda)):
        return _Returned(negated)
    if isinstance(parent, (ast.Assign, ast.AnnAssign)):
        return _assigned(parent, negated, source)
    if isinstance(parent, (ast.If, ast.While, ast.Assert)) and child is parent.test:
        return _decided(parent, negated, source)
    if isinstance(parent, ast.Expr):
        return _Found(False, "the value is not used", start)
    return None


def _returns_truth(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and name_of(node.func) in _TRUTH


def _compared(node: ast.Compare, child: ast.AST) -> bool | None:
    """Whether a truth keeps its value in a comparison with True or False, or is negated; None for
    all other comparisons.
    """
    if len(node.ops) != 1:
        return None
    other = node.comparators[0] if child is node.left else node.left
    if not isinstance(other, ast.Constant) or type(other.value) is not bool:
        return None
    if isinstance(node.ops[0], (ast.Is, ast.Eq)):
        return other.value
    if isinstance(node.ops[0], (ast.IsNot, ast.NotEq)):
        return not other.value
    return None


def _only_printed(node: ast.BoolOp, child: ast.AST, source: SourceTree) -> bool:
    """Whether a part is followed by output alone: ``broken.any() and print(...)``, as a
    statement.
    """
    after = node.values[node.values.index(child) + 1 :]  # type: ignore[arg-type]
    return bool(after) and all(map(reports, after)) and isinstance(source.parents[node], ast.Expr)


def _assigned(
    statement: ast.Assign | ast.AnnAssign, negated: bool, source: SourceTree
) -> _Found | None:
    """What the uses of a name that gets the value agree on, within its function."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    if len(targets) != 1 or not isinstance(targets[0], ast.Name):
        return None
    name = targets[0].id
    uses = [use for use in loads(name, source.function_of(statement)) if _after(use, statement)]
    found: list[_Found] = []
    for use in uses:
        answer = _climb(use, source)
        if not isinstance(answer, _Found):
            return None
        if answer.why != _PRINTED:
            found.append(answer)
    if not found or len({answer.value for answer in found}) != 1:
        return None if found or not uses else _Found(False, _PRINTED, uses[0])
    return found[0]._replace(value=found[0].value != negated)


_PRINTED: Final = "printed output does not matter"


def _after(use: ast.Name, statement: ast.stmt) -> bool:
    return use.lineno > (statement.end_lineno or statement.lineno)


def _decided(
    branch: ast.If | ast.While | ast.Assert, negated: bool, source: SourceTree
) -> _Found | None:
    """The side to take at a statement, and the assumption."""
    if isinstance(branch, ast.While):
        return None
    if isinstance(branch, ast.Assert):
        return _Found(not negated, "the assertion holds", branch.test)
    value = _side(branch, source)
    if value is None:
        if branch.orelse or any(map(may_leave, branch.body)):
            return None
        return _Found(not negated, "what is done only then is done", branch.test, bound=True)
    side, kind = value
    why = "the check passes" if kind is BlockOutcome.RAISES else "the warning does not apply"
    return _Found(side != negated, why, branch.test)


def _side(branch: ast.If, source: SourceTree) -> tuple[bool, BlockOutcome] | None:
    """The value to assume for the test of a branch, and the outcome of the other side."""
    body = kind_of(branch.body, branch, source)
    other = kind_of(branch.orelse, branch, source) if branch.orelse else BlockOutcome.WORKS
    found = flagged(branch, source) if body is BlockOutcome.WORKS else None
    if found is not None:
        body, other = found
    ends = body is BlockOutcome.RAISES or leaves(branch.body)
    if not branch.orelse and ends and raises(_following(branch, source)):
        other = BlockOutcome.RAISES
    if caught(branch, source):
        body, other = (
            BlockOutcome.WORKS if kind is BlockOutcome.RAISES else kind for kind in (body, other)
        )
    for kind in (BlockOutcome.RAISES, BlockOutcome.WARNS):
        if (body is kind) != (other is kind):
            return (False, kind) if body is kind else (True, kind)
    return (False, BlockOutcome.WARNS) if body is other is BlockOutcome.WARNS else None


def _following(branch: ast.If, source: SourceTree) -> list[ast.stmt]:
    """The statements after a branch, to the end of its block."""
    parent: Any = source.parents[branch]
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and branch in block:
            return block[block.index(branch) + 1 :]
    return []


_NOT: Final = frozenset({"isnan", "isinf", "isposinf", "isneginf", "isna"})
_SAME: Final = frozenset(
    {"any", "all", "item", "bool", "cpu", "float", "int", "sum", "max", "detach", "to", "long",
     "logical_or", "logical_and", "is_nonzero", "count_nonzero"}
)  # fmt: skip
"""Calls that are true if their operands are, and false (or 0) if these are."""

_COMPARED: Final[dict[type[ast.cmpop], Callable[[Any, Any], object]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def finite(node: ast.expr, source: SourceTree, depth: int = 0) -> bool | None:
    """The value of a condition if all numbers are finite; None if it tests anything else."""
    if depth > 8:
        return None
    if isinstance(node, ast.Call):
        return _call(node, source, depth + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
        inner = finite(node.operand, source, depth + 1)
        return None if inner is None else not inner
    if isinstance(node, ast.BoolOp):
        return _same([finite(value, source, depth + 1) for value in node.values])
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd)):
        return _same([finite(side, source, depth + 1) for side in (node.left, node.right)])
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compare(node, source, depth + 1)
    if isinstance(node, ast.Name):
        value = _assigned_once(node, source)
        return None if value is None else finite(value, source, depth + 1)
    return None


def _call(node: ast.Call, source: SourceTree, depth: int) -> bool | None:
    name = dotted(node.func).rpartition(".")[2]
    if name in _NOT:
        return False
    if name == "isfinite":
        return True
    if name == "logical_not":
        inner = _same([finite(argument, source, depth) for argument in node.args[:1]])
        return None if inner is None else not inner
    if name not in _SAME:
        return None
    operands = [finite(argument, source, depth) for argument in node.args]
    if isinstance(node.func, ast.Attribute):
        operands.append(finite(node.func.value, source, depth))
    return _same([operand for operand in operands if operand is not None])


def _same(operands: list[bool | None]) -> bool | None:
    if not operands or None in operands or len(set(operands)) != 1:
        return None
    return operands[0]


def _compare(node: ast.Compare, source: SourceTree, depth: int) -> bool | None:
    left, right, op = node.left, node.comparators[0], node.ops[0]
    if ast.dump(left) == ast.dump(right) and not isinstance(left, ast.Constant):
        if isinstance(op, ast.Eq):  # x == x: only NaN is not
            return True
        return False if isinstance(op, ast.NotEq) else None
    known = finite(left, source, depth)
    compare = _COMPARED.get(type(op))
    if known is None or compare is None or not isinstance(right, ast.Constant):
        return None
    if known and not isinstance(right.value, bool):
        return None  # a count of finite numbers
    return bool(compare(known, right.value))


def _assigned_once(node: ast.Name, source: SourceTree) -> ast.expr | None:
    """The only value that the function assigns to a name."""
    found: list[ast.expr] = []
    for other in ast.walk(source.function_of(node)):
        if isinstance(other, ast.Name) and other.id == node.id:
            if isinstance(other.ctx, ast.Load):
                continue
            parent = source.parents[other]
            if not isinstance(parent, ast.Assign) or parent.targets != [other]:
                return None
            found.append(parent.value)
    return found[0] if len(found) == 1 else None
