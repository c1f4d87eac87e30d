"""Which statements of a program have to do with each other, by the names that they share.

Two statements are one apart where both mention a variable of one function, an attribute or a
function of the program's own, or a name that one file imports from another; a call is one apart
from the header of what it calls, and that from each statement of its body; and a statement from
the header of the block that it is in (``with``, ``for``, ``if``).
"""

from __future__ import annotations

import ast
import posixpath
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpuprobe.analysis.blame.source import Source, is_docstring, nested

Node = tuple[str, int]
"""A statement: its file, and its number there."""

_Key = tuple[str, ...]

_MANY: Final = 24
"""Statements that mention a name: with more, it links nothing (a name of everything)."""


@dataclass(slots=True)
class StatementFacts:
    """What a statement does, besides mentioning names. ``defines``: the function or class whose
    header it is, as others mention it."""

    keys: set[_Key] = field(default_factory=set)
    defines: set[_Key] = field(default_factory=set)
    within: int | None = None  # the header of its block, by its number
    opens: str = ""  # the function or class whose header it is, by its qualified name
    scope: str = ""
    is_import: bool = False
    talks: bool = False  # it prints or logs
    optimizes: bool = False  # it makes an optimizer


class SourceGraph:
    """The statements of all files, and what links them."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = sources
        self.facts: dict[Node, StatementFacts] = {}
        self._mentions: dict[_Key, list[Node]] = defaultdict(list)
        self._bodies: dict[_Key, list[Node]] = defaultdict(list)
        trees = {name: tree for name, source in sources.items() if (tree := _tree(source))}
        attributes = {name for tree in trees.values() for name in _own_attributes(tree)}
        for name, tree in trees.items():
            _File(self, name, sources, attributes).read(tree)
        for node, facts in self.facts.items():
            for key in facts.keys:
                self._mentions[key].append(node)
            if facts.scope:
                self._bodies[node[0], facts.scope].append(node)

    def at(self, file: str, line: int) -> Node | None:
        """The statement at a line."""
        source = self.sources.get(file)
        number = None if source is None else source.by_line.get(line)
        return None if number is None else (file, number)

    def scope(self, node: Node) -> str:
        """The qualified name of the function or class that a statement is in."""
        return self.facts[node].scope if node in self.facts else ""

    def body(self, node: Node) -> list[Node]:
        """The statements of the function or class whose header a statement is."""
        return self._bodies.get((node[0], self.facts[node].opens), [])

    def distances(self, start: Node, most: int) -> dict[Node, int]:
        """How far other statements are from one, up to ``most``."""
        found = {start: 0}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            away = found[node] + 1
            if away > most:
                break
            for other in self._next_to(node):
                if other not in found:
                    found[other] = away
                    queue.append(other)
        return found

    def _next_to(self, node: Node) -> Iterator[Node]:
        facts = self.facts.get(node)
        if facts is None:
            return
        for key in sorted(facts.keys):
            nodes = self._mentions[key]
            if len(nodes) <= _MANY or key[0] == "name":
                yield from nodes
        if facts.within is not None:
            yield node[0], facts.within
        if facts.opens:
            yield from self._bodies[node[0], facts.opens]
            yield from self._bodies[node[0], f"{facts.opens}.__init__"]


def _tree(source: Source) -> ast.Module | None:
    try:
        return ast.parse(source.text or "")
    except (SyntaxError, ValueError, RecursionError):
        return None


def _own_attributes(tree: ast.Module) -> Iterator[str]:
    """The attributes that the program itself defines: set on ``self``, fields and methods of its
    classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield item.name
                elif isinstance(item, (ast.Assign, ast.AnnAssign)):
                    targets = item.targets if isinstance(item, ast.Assign) else [item.target]
                    yield from (t.id for t in targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Call):
            # self.register_buffer("name", ...), self.add_module, setattr
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name in ("register_buffer", "register_parameter", "add_module") and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value


_NOT_OWN = frozenset(("__init__", "forward", "__call__", "shape", "device", "dtype", "to", "grad"))
_TALK = frozenset(("print", "log", "info", "debug", "warning", "write", "set_description"))


class _File:
    """The statements of one file, as `StatementFacts`."""

    def __init__(
        self, program: SourceGraph, name: str, sources: Mapping[str, Source], attributes: set[str]
    ) -> None:
        self._program = program
        self._name = name
        self._source = sources[name]
        self._files = sources.keys()
        self._attributes = attributes - _NOT_OWN
        self._globals: dict[str, _Key] = {}

    def read(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._imported(node)
        for item in tree.body:
            for name in _bound(item):
                self._globals.setdefault(name, ("name", self._name, name))
        self._block(tree, "", {})

    def _imported(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            module = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
            file = self._file_of(module, getattr(node, "level", 0))
            if file is not None and isinstance(node, ast.ImportFrom):
                self._globals[bound] = ("name", file, alias.name)

    def _file_of(self, module: str, level: int) -> str | None:
        """The program's file of a module, by the end of its path."""
        tail = module.replace(".", "/")
        folder = posixpath.dirname(self._name)
        for _ in range(level - 1):
            folder = posixpath.dirname(folder)
        wanted = [posixpath.join(folder, tail)] if level else [posixpath.join(folder, tail), tail]
        for path in wanted:
            for file in (f"{path}.py", f"{path}/__init__.py"):
                if file in self._files:
                    return file
        ends = [f for f in self._files if f.endswith((f"/{tail}.py", f"/{tail}/__init__.py"))]
        return ends[0] if tail and len(ends) == 1 else None

    def _block(
        self, parent: ast.AST, scope: str, local: dict[str, _Key], within: int | None = None
    ) -> None:
        for node in nested(parent):
            inner_scope, inner = scope, local
            facts = StatementFacts(scope=scope, within=within)
            for part in _header(node):
                self._mention(part, facts, local)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner_scope = f"{scope}.{node.name}" if scope else node.name
                facts.opens = inner_scope
                if not scope:
                    facts.defines.add(("name", self._name, node.name))
                elif node.name in self._attributes:
                    facts.defines.add(("attribute", node.name))
                elif node.name in local:
                    facts.defines.add(local[node.name])
                facts.keys |= facts.defines
                if not isinstance(node, ast.ClassDef):
                    inner = dict(local)
                    inner.update(
                        (name, ("local", self._name, inner_scope, name)) for name in _locals(node)
                    )
                    facts.keys.update(inner[arg] for arg in _arguments(node))
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and scope and not local:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [t.id for t in targets if isinstance(t, ast.Name)]
                facts.keys.update(("attribute", n) for n in names if n in self._attributes)
            facts.is_import = isinstance(node, (ast.Import, ast.ImportFrom))
            if facts.is_import:
                names = [alias.asname or alias.name for alias in node.names]  # type: ignore[attr-defined]
                facts.keys.update(self._globals[n] for n in names if n in self._globals)
            number = self._source.by_line.get(_line_of(node))
            if number is not None and not (isinstance(node, ast.stmt) and is_docstring(node)):
                self._program.facts[self._name, number] = facts
                for decorator in getattr(node, "decorator_list", ()):
                    at = self._source.by_line.get(decorator.lineno)
                    if at is not None:
                        self._program.facts[self._name, at] = facts
            self._block(node, inner_scope, inner, None if facts.opens else number)

    def _mention(self, part: ast.AST, facts: StatementFacts, local: Mapping[str, _Key]) -> None:
        for node in ast.walk(part):
            if isinstance(node, ast.Name):
                key = local.get(node.id) or self._globals.get(node.id)
                if key is not None:
                    facts.keys.add(key)
            elif isinstance(node, ast.Attribute):
                if node.attr in self._attributes:
                    facts.keys.add(("attribute", node.attr))
                if node.attr == "optim":
                    facts.optimizes = True
            elif isinstance(node, ast.Call):
                function = node.func
                name = getattr(function, "id", "") or getattr(function, "attr", "")
                facts.talks = facts.talks or name in _TALK
                facts.optimizes = facts.optimizes or name in _OPTIMIZERS


_OPTIMIZERS = frozenset(
    ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "LBFGS",
     "Adafactor", "Muon", "ASGD", "Rprop", "SparseAdam", "Lion")
)  # fmt: skip


def _line_of(node: ast.AST) -> int:
    if isinstance(node, ast.match_case):
        return node.pattern.lineno
    return int(getattr(node, "lineno", 0))


def _header(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement that are not statements themselves, annotations left out."""
    for name, value in ast.iter_fields(node):
        if name in ("body", "orelse", "finalbody", "handlers", "cases", "annotation", "returns"):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(value, ast.arguments):
            values = value if isinstance(value, list) else [value]
        else:
            values = [*value.defaults, *value.kw_defaults]
        yield from (item for item in values if isinstance(item, ast.AST))


def _bound(node: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top of a file binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif not isinstance(node, (ast.Import, ast.ImportFrom)):
        for item in ast.walk(node):
            if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
                yield item.id


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    yield from (arg.arg for arg in every if arg is not None and arg.arg not in ("self", "cls"))


def _locals(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The variables of a function, with its arguments."""
    names = set(_arguments(node))
    outside: set[str] = set()
    pending: list[ast.AST] = list(node.body)
    while pending:
        item = pending.pop()
        if isinstance(item, (ast.Global, ast.Nonlocal)):
            outside.update(item.names)
        elif isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(item.name)
            continue
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            names.add(item.id)
        elif isinstance(item, ast.ExceptHandler) and item.name:
            names.add(item.name)
        pending += ast.iter_child_nodes(item)
    return names - outside
