"""The statements of a scope that may run while a variable has the value that one of them bound.

One-sided, as `gpuprobe.remedies.flow`: a statement that may run counts as one that does.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gpuprobe.remedies.text import LOOPS, Scope, Statement

_Places = frozenset[Statement]
_NOWHERE: _Places = frozenset()


class ControlFlow:
    """What may run after each statement of a scope, without functions and classes in it. The header
    of a compound statement counts as that statement.
    """

    def __init__(self, scope: Scope) -> None:
        self._after: dict[Statement, _Places] = {}  # without an exception
        self._raised: dict[Statement, _Places] = {}  # where an exception may lead
        self._block(scope.body, _Exits())

    def with_value(self, node: Statement, name: str) -> frozenset[Statement]:
        """The statements that may run with the value that ``node`` gives the variable, those that
        give it another one included.
        """
        found: set[Statement] = set()
        pending = list(self._after.get(node, _NOWHERE))
        while pending:
            one = pending.pop()
            if one in found:
                continue
            found.add(one)
            pending += self._raised[one]
            if not _replaces(one, name):
                pending += self._after[one]
        return frozenset(found)

    def _block(self, body: Sequence[Statement], exits: _Exits) -> _Places:
        """Add the statements of a block; returns what runs first."""
        follow = exits.follow
        for node in reversed(body):
            self._statement(node, exits.to(follow))
            follow = frozenset((node,))
        return follow

    def _statement(self, node: Statement, exits: _Exits) -> None:
        self._raised[node] = exits.raised
        self._after[node] = exits.follow
        if isinstance(node, (ast.Return, ast.Raise)):
            self._after[node] = exits.raised
        elif isinstance(node, ast.Break):
            self._after[node] = exits.ended | exits.raised
        elif isinstance(node, ast.Continue):
            self._after[node] = exits.next | exits.raised
        elif isinstance(node, LOOPS):
            other = self._block(node.orelse, exits)
            head = frozenset((node,))
            inner = _Exits(follow=head, ended=exits.follow, next=head, raised=exits.raised)
            self._after[node] = self._block(node.body, inner) | other
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            inner = exits.raising(exits.follow)  # the context may suppress an exception
            self._after[node] = self._block(node.body, inner) | exits.follow
        elif isinstance(node, ast.Match):
            cases = [self._block(case.body, exits) for case in node.cases]
            self._after[node] = exits.follow.union(*cases)
        elif hasattr(node, "handlers"):
            self._after[node] = self._try(node, exits)
        elif isinstance(node, ast.If):
            self._after[node] = self._block(node.body, exits) | self._block(node.orelse, exits)

    def _try(self, node: Statement, exits: _Exits) -> _Places:
        final: list[Statement] = node.finalbody  # type: ignore[attr-defined]
        if final:  # it runs before everything that leaves the statement
            anywhere = exits.follow | exits.ended | exits.next | exits.raised
            first = self._block(final, exits.to(anywhere))
            exits = _Exits(first, first, first, first | exits.raised)
        handled = frozenset[Statement]().union(
            *(self._block(one.body, exits) for one in node.handlers)  # type: ignore[attr-defined]
        )
        other = self._block(node.orelse, exits)  # type: ignore[attr-defined]
        body = exits.to(other).raising(handled)
        return self._block(node.body, body) | handled  # type: ignore[attr-defined]


class _Exits:
    """Where a block leads: at its end, at ``break``, at ``continue``, and by an exception."""

    def __init__(
        self,
        follow: _Places = _NOWHERE,
        ended: _Places = _NOWHERE,
        next: _Places = _NOWHERE,
        raised: _Places = _NOWHERE,
    ) -> None:
        self.follow = follow
        self.ended = ended
        self.next = next
        self.raised = raised

    def to(self, follow: _Places) -> _Exits:
        return _Exits(follow, self.ended, self.next, self.raised)

    def raising(self, more: _Places) -> _Exits:
        return _Exits(self.follow, self.ended, self.next, self.raised | more)


def _replaces(node: Statement, name: str) -> bool:
    """Whether the variable has another value, or none, when a simple statement has completed."""
    if isinstance(node, ast.Assign):
        return any(bound_by(target, name) for target in node.targets)
    if isinstance(node, ast.AnnAssign):
        return node.value is not None and bound_by(node.target, name)
    return isinstance(node, ast.Delete) and any(bound_by(one, name) for one in node.targets)


def bound_by(target: ast.AST, name: str) -> bool:
    """Whether an assignment to ``target`` binds the name itself, in a tuple too."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(bound_by(one, name) for one in target.elts)
    return isinstance(target, ast.Name) and target.id == name
