"""One estimate of a changed run, in a process of its own: ``python -m gpuprobe.api.fit_trial``.

The order comes as JSON in the first argument; the answer, the last line of stdout, is the
estimate's document, or ``{"error": text}``.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from gpuprobe.errors import GpuprobeError, ValueNeeded

__all__ = ["main", "with_constant", "with_option"]


def with_option(arguments: list[str], option: str, value: int) -> list[str]:
    """``arguments`` with the option's value replaced, or added at the end."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == option:
            next(words, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return [*kept, option, str(value)]


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


def main(order: dict[str, Any]) -> dict[str, Any]:
    """The estimate that ``order`` (see `gpuprobe.api.fit`) describes."""
    from gpuprobe.api import watch
    from gpuprobe.api.estimate import estimate_program
    from gpuprobe.reporters.json import estimate as estimate_json

    arguments, script = list(order["arguments"]), order["script"]
    way = order["way"]
    if way["option"]:
        arguments = with_option(arguments, way["option"], order["value"])
    program = watch.program(script, arguments)
    if way["constant"]:
        source = Path(script).read_text(encoding="utf-8")
        tree = with_constant(source, way["constant"], order["value"])
        program.code = compile(tree, program.file, "exec", dont_inherit=True)
    if order["change"] not in ("", "expandable"):
        from gpuprobe.virtual.changes import apply

        apply(order["change"])
    try:
        found = estimate_program(
            program,
            order["gpu"],
            steps=order["steps"] * (2 if order["change"] == "accumulate" else 1),
            compute=order["compute"],
            conf=order["conf"],
            ranks=order["ranks"],
        )
    except GpuprobeError as error:
        cause = error.__cause__
        plain = cause is None or isinstance(error, ValueNeeded)
        text = f"{error}" if plain else f"{type(cause).__name__}: {cause}"
        return {"error": text}
    return estimate_json.document(found)


if __name__ == "__main__":
    talk = os.dup(1)
    os.dup2(2, 1)  # what the program prints, from C too, is not the answer
    with contextlib.redirect_stdout(sys.stderr):
        answer = main(json.loads(sys.argv[1]))
    with os.fdopen(talk, "w") as stream:
        stream.write("\n" + json.dumps(answer) + "\n")
