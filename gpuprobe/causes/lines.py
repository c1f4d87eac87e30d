"""Lines of the program's source that a cause is about: those that store a value, keep a graph after
its backward pass, and capture a CUDA graph.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Final

from gpuprobe.remedies.text import FUNCTIONS, LOOPS, ProgramText

_STORING: Final = frozenset(
    ("append", "appendleft", "add", "extend", "insert", "put", "put_nowait", "setdefault", "update")
)
_READING: Final = frozenset(("get", "items", "values", "setdefault"))
_MOVING: Final = frozenset(("to", "cuda", "cpu", "item", "tolist", "numpy", *_STORING))
_CONTAINERS: Final = frozenset(("dict", "list", "set", "deque", "defaultdict", "OrderedDict"))


def storing_lines(text: ProgramText, name: str, function: str | None = None) -> set[int]:
    """The lines of a file that store a computed value under a name: a variable, an attribute, or an
    element of a container of this name. ``function``: the one of the variable, if that is not a
    container; ``""`` for a global. By default, anything with the name counts.
    """
    if function is None:
        return set(_elements(text.tree, name)) or set(_assigned(ast.walk(text.tree), name))
    return set(_assigned(_in_scope(text.tree, function, name), name))


def is_limited(texts: Iterable[ProgramText], name: str) -> bool:
    """Whether each line of some files that stores an element in a container of a name depends on
    how many it has: as in a pool of images, which does not grow when it is full.
    """
    stores = [(text, line) for text in texts for line in set(_elements(text.tree, name))]
    return bool(stores) and all(
        any(
            isinstance(node, (ast.If, ast.While)) and _compares_length(node.test, name)
            for statement in text.statements(line)
            for node in text.ancestors(statement)
        )
        for text, line in stores
    )


def _compares_length(test: ast.expr, name: str) -> bool:
    return any(
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id == "len"
        and any(_name(argument) == name for argument in value.args)
        for compared in ast.walk(test)
        if isinstance(compared, ast.Compare)
        for value in (compared.left, *compared.comparators)
    )


def _in_scope(tree: ast.Module, function: str, name: str) -> Iterator[ast.AST]:
    """The nodes of the functions of a name; for ``""`` of the module, and of functions in which the
    variable is its.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    scopes: list[ast.AST] = [node for node in functions if node.name == function]
    if not function:
        uses = [node for node in functions if any(_of_module(one, name) for one in _inside(node))]
        scopes = [tree, *uses]
    for scope in scopes:
        yield from _inside(scope)


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, or of a module, without those of the functions inside."""
    ready = list(ast.iter_child_nodes(scope))
    while ready:
        node = ready.pop()
        if not isinstance(node, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            yield node
            ready += ast.iter_child_nodes(node)


def _of_module(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Global) and name in node.names


def stored_as(text: ProgramText, line: int, name: str) -> str:
    """The expression by which a line stores something under a name: ``self.outputs`` of
    ``self.outputs.append(x)``; "" if it stores nothing under it.
    """
    for node in ast.walk(text.tree):
        if getattr(node, "lineno", 0) != line:
            continue
        stores: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            stores = [node.func.value] if node.func.attr in _STORING else []
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            stores = node.targets if isinstance(node, ast.Assign) else [node.target]
        for one in stores:
            for target in one.elts if isinstance(one, (ast.Tuple, ast.List)) else [one]:
                while isinstance(target, ast.Subscript):
                    target = target.value
                if _name(target) == name:
                    return ast.unparse(target)
    return ""


def reading_line(text: ProgramText, name: str, depth: int) -> int:
    """The first line that reads an element of a container with this name, or of one ``depth``
    subscripts into it, and neither moves the element to a device nor makes it a number; 0 if there
    is none.
    """
    lines = [
        node.lineno
        for node in ast.walk(text.tree)
        if isinstance(node, ast.expr)
        and _reads_element(node, name, depth)
        and not _is_method(text.parents.get(node), _MOVING)
    ]
    return min(lines, default=0)


def _reads_element(node: ast.expr, name: str, depth: int) -> bool:
    """Whether an expression is an element, or makes all of them available."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        inner, known = node.func.value, node.func.attr in _READING
    elif isinstance(node, ast.Subscript):
        inner, known = node.value, isinstance(node.ctx, ast.Load)
    else:
        return False
    for _ in range(depth):
        if not isinstance(inner, ast.Subscript):
            return False
        inner = inner.value
    return known and not isinstance(inner, ast.Subscript) and _name(inner) == name


def _is_method(node: ast.AST | None, names: frozenset[str]) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in names


def retaining_line(text: ProgramText, name: str) -> int:
    """The first line that calls ``name.backward(retain_graph=True)``; 0 if there is none."""
    lines = [
        node.lineno
        for node in ast.walk(text.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
        and ast.unparse(node.func.value) == name
        and any(
            one.arg == "retain_graph"
            and isinstance(one.value, ast.Constant)
            and one.value.value is True
            for one in node.keywords
        )
    ]
    return min(lines, default=0)


def capture_line(text: ProgramText, line: int) -> int:
    """The line of the innermost ``with torch.cuda.graph(...)`` around a line; 0 without one."""
    lines = [
        node.lineno
        for node in ast.walk(text.tree)
        if isinstance(node, ast.With)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
        and any(
            ast.unparse(item.context_expr).startswith("torch.cuda.graph(") for item in node.items
        )
    ]
    return max(lines, default=0)


def loop_line(text: ProgramText, line: int) -> int:
    """The line of the innermost loop around a line, in its function; 0 if there is none."""
    lines = [0]
    for node in ast.walk(text.tree):
        around = getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", 0) or 0)
        if around and isinstance(node, (*LOOPS, *FUNCTIONS)):
            lines.append(node.lineno if isinstance(node, LOOPS) else -node.lineno)
    return max(0, max(lines, key=abs))


def _elements(tree: ast.AST, name: str) -> Iterator[int]:
    """Lines that store an element in a container of this name: no constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _STORING and _name(node.func.value) == name:
                yield node.lineno
        elif isinstance(node, (ast.Assign, ast.AugAssign)) and not _is_empty(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Subscript) and _name(target.value) == name:
                    yield node.lineno


def _assigned(nodes: Iterable[ast.AST], name: str) -> Iterator[int]:
    """Lines that assign a value to this name: no constant, and no empty container."""
    for node in nodes:
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        flat = [
            one
            for target in targets
            for one in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])
        ]
        if any(_name(one) == name for one in flat) and not _is_empty(node.value):
            yield node.lineno


def _name(node: ast.expr) -> str:
    """The name of a variable or an attribute, or of the container of an element."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_empty(node: ast.expr) -> bool:
    """Whether an expression makes a constant, or a container without elements."""
    if isinstance(node, (ast.Constant, ast.UnaryOp)):
        return True
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return not node.elts
    if isinstance(node, ast.Dict):
        return not node.keys
    return isinstance(node, ast.Call) and _name(node.func) in _CONTAINERS
