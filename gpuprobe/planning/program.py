"""The program of a request: how it starts, how a value is passed to a script (as an option, or in
place of a constant in its source), and what its source shows without being run.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpuprobe.errors import ProgramFailed, UsageError
from gpuprobe.model.io.files import read_regular
from gpuprobe.model.plans.request import EstimateRequest, ParameterSource
from gpuprobe.sampler.program import Program, load_module, load_script

_MOST: Final = 1 << 20  # bytes of a script that is read for handlers
_FINDS_BATCH: Final = "find_executable_batch_size"  # accelerate's decorator: it halves the batch


class ProgramStart:
    """The working directory and environment of this process, before the program changes them."""

    def __init__(self) -> None:
        self.cwd = Path.cwd()
        self.environment = dict(os.environ)


def program_of(request: EstimateRequest) -> Program:
    """The requested program, with the requested value.

    Raises UsageError if it does not exist, ProgramFailed if it is not valid Python.
    """
    script, parameter = request.script, request.parameter
    if request.module:
        return load_module(script, request.arguments)
    arguments = list(request.arguments)
    if parameter is not None and parameter.option:
        arguments = with_option(arguments, parameter.option, request.value)
    program = load_script(script, arguments)
    if parameter is not None and parameter.constant:
        source = Path(script).read_text(encoding="utf-8")
        tree = with_constant(source, parameter.constant, request.value)
        program.code = compile(tree, program.file, "exec", dont_inherit=True)
    return program


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


def handler_of(script: str) -> str:
    """The place, ``file:line``, where a script first handles an out-of-memory error, and so may
    continue with less; "" if none is found. Only the script itself is read, not what it imports.
    """
    try:
        tree = ast.parse(read_regular(Path(script), most=_MOST))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return ""
    handlers = (ast.FunctionDef, ast.ExceptHandler)
    lines = [
        node.lineno for node in ast.walk(tree) if isinstance(node, handlers) and _handles(node)
    ]
    return f"{Path(script).name}:{min(lines)}" if lines else ""


def _handles(node: ast.FunctionDef | ast.ExceptHandler) -> bool:
    if isinstance(node, ast.FunctionDef):
        return any(_FINDS_BATCH in ast.unparse(one) for one in node.decorator_list)
    if node.type is None:
        return False
    kind = ast.unparse(node.type)
    if "OutOfMemoryError" in kind:
        return True
    texts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
    return "RuntimeError" in kind and any(
        "out of memory" in text.lower() for text in texts if isinstance(text, str)
    )


def described(error: BaseException) -> str:
    """Its type and the first line of its message."""
    message, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {message}"
