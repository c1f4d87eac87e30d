"""The changed lines that explain what grew, the best explanation first.

A changed line fully explains the growth of a call path that crosses it. It explains less of any
other path, the further its statement is from those on the path. Lines that were only moved or
renamed count only if no other line explains anything.

Two statements have the distance 1 (`SourceGraph`) if both mention a local variable of one function,
an attribute or function that the program defines, or a name that one file imports from another.
So do a call and the header of the function that it calls, that header and each statement of its
body, and a statement and the header of the block around it (``with``, ``for``, ``if``).
"""

from __future__ import annotations

import ast
import posixpath
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from gpuprobe.analysis.blame.source import (
    GAP,
    INDENTED,
    MOVED,
    NEW,
    RENAMED,
    ChangedLine,
    Source,
    is_docstring,
    nested,
)
from gpuprobe.model.place import Place, parse_place

_NEARER: Final = 0.6
"""Factor of an explanation for each statement of distance."""

_FARTHEST: Final = 6

_OUTER: Final = 0.97
"""Factor of an explanation for each call outwards: of two lines on a path, the inner one wins."""

_LEAST: Final = 0.01
"""The share of the growth below which real changes explain nothing, and moved lines count."""

_KINDS: Final = {NEW: 1.0, GAP: 0.9, INDENTED: 0.7, RENAMED: 0.5, MOVED: 0.4}
_OTHERWISE: Final = 0.1
"""Factor for a line that prints, and for one that creates an optimizer if the memory is not an
optimizer's."""

_OF_OPTIMIZERS: Final = frozenset(("optimizer_state", "gradient", "temporary", "workspace"))


class GrowthPath(NamedTuple):
    """Growth of ``bytes`` along a call path: the places of the calls, outermost first."""

    path: tuple[str, ...]
    bytes: int
    category: str


@dataclass(frozen=True, slots=True)
class Suspect:
    """A changed line that explains growth. ``paths``: the indices of the growth paths that no other
    line explains better, ``bytes`` their sum. ``score``: the bytes of all paths, each times the
    share that the line explains.
    """

    change: ChangedLine
    score: float
    bytes: int
    paths: tuple[int, ...]


_MOST_PATHS: Final = 200
"""Growth paths that are considered, the largest first."""


class Blame:
    """The changes of one program."""

    def __init__(self, program: SourceGraph, changes: Sequence[ChangedLine]) -> None:
        self.program = program
        self._changes = self._without_renamings([c for c in changes if not self._is_import(c)])
        self._distances: dict[Node, dict[Node, int]] = {}

    def _is_import(self, change: ChangedLine) -> bool:
        facts = self.program.facts.get((change.file, change.statement))
        return facts is not None and facts.is_import and change.kind != GAP

    def _without_renamings(self, found: Sequence[ChangedLine]) -> list[ChangedLine]:
        """Mark replaced lines as renamed if they only call a function that was renamed, or that was
        assembled from lines that were elsewhere.
        """
        kinds = {(change.file, change.statement): change.kind for change in found}
        elsewhere: set[tuple[str, ...]] = set()
        for node, facts in self.program.facts.items():
            if not facts.opens or kinds.get(node) not in (NEW, RENAMED):
                continue
            body = [kinds.get(inner) for inner in self.program.body(node)]
            if kinds[node] == RENAMED or (body and NEW not in body and MOVED in body):
                elsewhere |= facts.defines
        return [
            replace(change, kind=RENAMED)
            if change.kind == NEW
            and change.removed is not None
            and (at := self.program.facts.get((change.file, change.statement))) is not None
            and not at.opens
            and at.keys & elsewhere
            else change
            for change in found
        ]

    def suspects(self, paths: Iterable[GrowthPath]) -> tuple[Suspect, ...]:
        """The changes that explain the growth, the best first."""
        largest = sorted(paths, key=lambda grown: (-grown.bytes, grown.path))[:_MOST_PATHS]
        total = sum(grown.bytes for grown in largest)
        real = [c for c in self._changes if c.kind not in (RENAMED, MOVED)]
        found = self._ranked(real, largest)
        if sum(suspect.score for suspect in found) < _LEAST * total:
            found = self._ranked(self._changes, largest)
        return tuple(found)

    def _ranked(self, found: Sequence[ChangedLine], paths: Sequence[GrowthPath]) -> list[Suspect]:
        """The lines that explain anything: the best line of each stretch of changed lines, in the
        order of what the stretch explains, then the other lines.
        """
        nodes = [self._nodes(grown.path) for grown in paths]
        shares = {
            change: [self._share(change, *pair) for pair in zip(paths, nodes, strict=True)]
            for change in found
        }

        def score(changed: Sequence[ChangedLine]) -> float:
            best = map(max, zip(*(shares[change] for change in changed), strict=True))
            return float(sum(share * grown.bytes for share, grown in zip(best, paths, strict=True)))

        scores = {change: score([change]) for change in found}
        firsts: list[tuple[float, str, int, ChangedLine]] = []
        others: list[ChangedLine] = []
        for stretch in self._stretches([change for change in found if scores[change] > 0]):
            if not any(change.kind == INDENTED for change in stretch):
                stretch.sort(key=lambda change: (-scores[change], change.line))
            # Else the first line of a block that moved into another block, or out of one.
            first, *rest = stretch
            firsts.append((-score(stretch), first.file, first.line, first))
            others += rest
        order = [item[-1] for item in sorted(firsts, key=lambda item: item[:3])]
        others.sort(key=lambda change: (-scores[change], change.file, change.line))
        order += others
        mine: dict[ChangedLine, list[int]] = {change: [] for change in order}
        for number in range(len(paths)):
            best = max(order, key=lambda change: shares[change][number], default=None)
            if best is not None and shares[best][number] > 0:
                mine[best].append(number)
        return [
            Suspect(
                change,
                scores[change],
                sum(paths[number].bytes for number in mine[change]),
                tuple(mine[change]),
            )
            for change in order
        ]

    def _stretches(self, found: Sequence[ChangedLine]) -> list[list[ChangedLine]]:
        """Changes of statements that follow each other in one function."""
        stretches: list[list[ChangedLine]] = []
        last: tuple[str, int, str] | None = None
        for change in sorted(found, key=lambda item: (item.file, item.statement)):
            here = change.file, change.statement
            scope = self.program.scope(here)
            if last is None or last[0] != here[0] or here[1] - last[1] > 1 or last[2] != scope:
                stretches.append([])
            stretches[-1].append(change)
            last = (*here, scope)
        return stretches

    def _nodes(self, path: Sequence[str]) -> list[Node]:
        """The statements on a path, innermost first."""
        found = []
        for key in reversed(path):
            place = parse_place(key)
            if isinstance(place, Place) and place.file:
                node = self.program.at(place.file, place.line)
                if node is not None:
                    found.append(node)
        return found

    def _share(self, change: ChangedLine, grown: GrowthPath, nodes: Sequence[Node]) -> float:
        """The share of a path's growth that a change explains, 0 to 1."""
        target = (change.file, change.statement)
        best = 0.0
        for depth, node in enumerate(nodes):
            if node == target:
                best = max(best, _OUTER**depth)
                break
            away = self._from(node).get(target)
            if away is not None:
                best = max(best, _OUTER**depth * _NEARER**away)
        if not best:
            return 0.0
        facts = self.program.facts.get(target)
        if facts is not None and target not in nodes[:1]:
            is_of_optimizer = facts.optimizes and grown.category not in _OF_OPTIMIZERS
            if is_of_optimizer or facts.prints:
                best *= _OTHERWISE
        return best * _KINDS[change.kind]

    def _from(self, node: Node) -> Mapping[Node, int]:
        if node not in self._distances:
            self._distances[node] = self.program.distances(node, _FARTHEST)
        return self._distances[node]


Node = tuple[str, int]
"""A statement: its file, and its index there."""

_Key = tuple[str, ...]

_MANY: Final = 24
"""Limit of statements that mention a name: a name with more is too common to relate any."""


@dataclass(slots=True)
class StatementFacts:
    """The names that a statement mentions (``keys``), and what it does. ``defines``: the function
    or class whose header it is, as other statements mention it.
    """

    keys: set[_Key] = field(default_factory=set)
    defines: set[_Key] = field(default_factory=set)
    within: int | None = None  # the index of the header of its block
    opens: str = ""  # the qualified name of the function or class whose header it is
    scope: str = ""
    is_import: bool = False
    prints: bool = False  # or logs
    optimizes: bool = False  # it creates an optimizer


class SourceGraph:
    """The statements of all files, and the names that relate them."""

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
        """The distance of each statement from ``start``, up to ``most``."""
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
    classes, and registered buffers, parameters and modules.
    """
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
_PRINTING = frozenset(("print", "log", "info", "debug", "warning", "write", "set_description"))


class _File:
    """Reads the statements of one file into a `SourceGraph`."""

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
        """The program's file of a module, found by the end of its path."""
        tail = module.replace(".", "/")
        folder = posixpath.dirname(self._name)
        for _ in range(level - 1):
            folder = posixpath.dirname(folder)
        adjacent = posixpath.join(folder, tail)
        for path in [adjacent] if level else [adjacent, tail]:
            for file in (f"{path}.py", f"{path}/__init__.py"):
                if file in self._files:
                    return file
        ends = [f for f in self._files if f.endswith((f"/{tail}.py", f"/{tail}/__init__.py"))]
        return ends[0] if tail and len(ends) == 1 else None

    def _block(
        self, parent: ast.AST, scope: str, local: dict[str, _Key], within: int | None = None
    ) -> None:
        """Read the statements inside ``parent``. ``local``: the variables of the function around
        them.
        """
        for node in nested(parent):
            inner_scope, inner = scope, local
            facts = StatementFacts(scope=scope, within=within)
            for part in _header(node):
                self._mention(part, facts, local)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner_scope = facts.opens = f"{scope}.{node.name}" if scope else node.name
                inner = self._define(node, facts, local)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and scope and not local:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [t.id for t in targets if isinstance(t, ast.Name)]
                facts.keys.update(("attribute", n) for n in names if n in self._attributes)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                facts.is_import = True
                names = [alias.asname or alias.name for alias in node.names]
                facts.keys.update(self._globals[n] for n in names if n in self._globals)
            number = self._add(node, facts)
            self._block(node, inner_scope, inner, None if facts.opens else number)

    def _define(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
        facts: StatementFacts,
        local: dict[str, _Key],
    ) -> dict[str, _Key]:
        """Add what the header of a function or class defines; the variables inside it."""
        if not facts.scope:
            facts.defines.add(("name", self._name, node.name))
        elif node.name in self._attributes:
            facts.defines.add(("attribute", node.name))
        elif node.name in local:
            facts.defines.add(local[node.name])
        facts.keys |= facts.defines
        if isinstance(node, ast.ClassDef):
            return local
        own: dict[str, _Key] = {
            name: ("local", self._name, facts.opens, name) for name in _locals(node)
        }
        facts.keys.update(own[arg] for arg in _arguments(node))
        return local | own

    def _add(self, node: ast.AST, facts: StatementFacts) -> int | None:
        """Put a statement, and its decorators, into the graph. Returns its index."""
        number = self._source.by_line.get(_line_of(node))
        if number is None or (isinstance(node, ast.stmt) and is_docstring(node)):
            return number
        self._program.facts[self._name, number] = facts
        for decorator in getattr(node, "decorator_list", ()):
            at = self._source.by_line.get(decorator.lineno)
            if at is not None:
                self._program.facts[self._name, at] = facts
        return number

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
                facts.prints = facts.prints or name in _PRINTING
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
    """The parts of a statement that are not statements themselves, without annotations."""
    for name, value in ast.iter_fields(node):
        if name in ("body", "orelse", "finalbody", "handlers", "cases", "annotation", "returns"):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(value, ast.arguments):
            values = value if isinstance(value, list) else [value]
        else:
            values = [*value.defaults, *value.kw_defaults]
        yield from (item for item in values if isinstance(item, ast.AST))


def _bound(node: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top level of a file binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif not isinstance(node, (ast.Import, ast.ImportFrom)):
        for item in ast.walk(node):
            if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
                yield item.id


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    args = node.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    yield from (arg.arg for arg in every if arg is not None and arg.arg not in ("self", "cls"))


def _locals(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The local variables of a function, arguments included."""
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
