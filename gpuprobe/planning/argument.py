"""How a value is passed to a script: as an option, or in place of a constant in its source."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpuprobe.errors import ProgramFailed, UsageError


class ParameterSource(NamedTuple):
    """Where a program takes a parameter from: a command-line ``option``, or a ``constant`` that it
    assigns at its top level. ``value`` is the program's own, 0 if unknown.
    """

    option: str = ""
    constant: str = ""
    value: int = 0

    @property
    def description(self) -> str:
        if self.option:
            return f"as the option {self.option}"
        return f"in place of the constant {self.constant}"


def parameter_source(script: str, argument: str, arguments: Sequence[str] = ()) -> ParameterSource:
    """Find where a script takes ``argument`` from: an option (``batch_size`` means ``--batch-size``
    or ``--batch_size``), or a number assigned at its top level (``batch_size``, ``BATCH_SIZE``).

    Raises UsageError if it has neither; the message lists similar names.
    """
    path = Path(script)
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except OSError as error:
        raise UsageError(f"cannot read {script}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise ProgramFailed(f"{script} is not Python: {error}") from None
    bare = argument.lstrip("-")
    accepted = {argument, f"--{bare}", f"--{bare.replace('_', '-')}", f"--{bare.replace('-', '_')}"}
    given = {word.partition("=")[0] for word in arguments}
    options = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"--?[A-Za-z][\w-]*", node.value)
    }
    for option in sorted(accepted & (options | given)):
        return ParameterSource(option, value=_given(arguments, option) or _default(tree, option))
    names = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and isinstance(node.value, ast.Constant)
        and type(node.value.value) is int
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    plain = bare.replace("-", "_")
    for name in (plain, plain.upper()):
        if name in names:
            return ParameterSource(constant=name, value=max(0, names[name]))
    has = sorted({*options, *names})
    near = difflib.get_close_matches(bare, has, n=3, cutoff=0.4)
    raise UsageError(
        f"{script} has no option --{bare.replace('_', '-')} and no top-level number {plain}",
        hint=f"it has {', '.join(near)}" if near else "name an option of the script",
    )


def _given(arguments: Sequence[str], option: str) -> int:
    """The value of an option in ``arguments``; 0 if there is none."""
    for index, word in enumerate(arguments):
        name, _, value = word.partition("=")
        if name == option:
            value = value or "".join(arguments[index + 1 : index + 2])
            return int(value) if value.isdecimal() else 0
    return 0


def _default(tree: ast.Module, option: str) -> int:
    """The default in a call such as ``add_argument(option, default=8)``; 0 if there is none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(
            isinstance(argument, ast.Constant) and argument.value == option
            for argument in node.args
        ):
            for keyword in node.keywords:
                value = keyword.value
                if keyword.arg == "default" and isinstance(value, ast.Constant):
                    return value.value if type(value.value) is int and value.value > 0 else 0
    return 0


def with_option(arguments: list[str], option: str, value: int) -> list[str]:
    """``arguments`` with the option's value replaced, or added at the end."""
    others: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == option:
            next(remaining, None)
        elif not argument.startswith(f"{option}="):
            others.append(argument)
    return [*others, option, str(value)]


def with_constant(source: str, name: str, value: int) -> ast.Module:
    """The program with another number assigned to ``name`` at its top level."""
    tree = ast.parse(source)
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assert isinstance(node, (ast.Assign, ast.AnnAssign))
            if isinstance(node.value, ast.Constant):
                node.value = ast.copy_location(ast.Constant(value), node.value)
    return tree
