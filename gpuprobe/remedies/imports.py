"""The names under which a file has imported modules, and imports that it lacks."""

from __future__ import annotations

import ast
from typing import NamedTuple

from gpuprobe.remedies.blocks import inserted_before
from gpuprobe.remedies.text import ProgramText, Refusal, Refused, Replacement


class Imported(NamedTuple):
    """The ``name`` of a module at a place, and the changes that import it."""

    name: str
    changes: list[Replacement]


def with_import(text: ProgramText, module: str, node: ast.AST) -> Imported | Refused:
    """The name of ``module`` for code at ``node``: an import above it, or a new one."""
    scopes = [text.tree, text.scope(node)]
    for one in ast.walk(text.tree):
        if not isinstance(one, ast.Import) or text.scope(one) not in scopes:
            continue
        for alias in one.names:
            whole = alias.name == module
            if (whole or (alias.name.startswith(f"{module}.") and not alias.asname)) and (
                one.lineno < getattr(node, "lineno", 0)
            ):
                return Imported(alias.asname or module, [])
    if _is_bound(text, module):
        return Refused(Refusal.NAME_TAKEN, module)
    first = next((one for one in text.tree.body if not _is_preamble(one)), None)
    if first is None:
        return Refused(Refusal.NO_STATEMENT)
    changes = inserted_before(text, first, f"import {module}")
    return changes if isinstance(changes, Refused) else Imported(module, changes)


def _is_preamble(node: ast.stmt) -> bool:
    """Whether a statement has to be before imports: a docstring, or one from ``__future__``."""
    future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
    return future or (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_bound(text: ProgramText, name: str) -> bool:
    """Whether any code of the file binds the name, other than by an import of that module."""
    for node in ast.walk(text.tree):
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            return True
        if isinstance(node, ast.arg) and node.arg == name:
            return True
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and node.name == name
        ):
            return True
        if isinstance(node, ast.ImportFrom) and any(
            (one.asname or one.name) == name for one in node.names
        ):
            return True
        if isinstance(node, ast.Import) and any(
            one.asname == name and one.name != name for one in node.names
        ):
            return True
    return False


def full_name(text: ProgramText, node: ast.expr) -> str:
    """A dotted name with the modules that its first part was imported from."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ".".join(("", *parts))
    root = node.id
    for one in ast.walk(text.tree):
        if isinstance(one, ast.Import):
            for alias in one.names:
                if alias.asname == root:
                    return ".".join((alias.name, *parts))
        elif isinstance(one, ast.ImportFrom) and one.module:
            for alias in one.names:
                if (alias.asname or alias.name) == root:
                    return ".".join((one.module, alias.name, *parts))
    return ".".join((root, *parts))
