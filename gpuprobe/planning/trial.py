"""One estimate, in a process that `gpuprobe.planning.warm` or `gpuprobe.planning.auto` starts.

The order is plain data; the answer, the last line of stdout, is the estimate's document, or
``{"error": text}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gpuprobe.errors import GpuprobeError, ProgramFailed, TooLarge, ValueNeeded
from gpuprobe.model.plans.estimate import Estimate
from gpuprobe.planning.argument import with_constant, with_option
from gpuprobe.reporters.json import estimate as estimate_json
from gpuprobe.sampler.program import Program, load_module, load_script, own_traceback

_OPTIONAL: Final = (
    "rank",
    "meeting",
    "link",
    "per_node",
    "output",
    "recorded",
    "torch",
    "engine",
)


def answer(order: dict[str, Any], estimate: Callable[..., Estimate]) -> None:
    """Do what the order says, with `gpuprobe.api.virtual.estimate_program`."""
    out = os.dup(1)
    os.dup2(2, 1)  # what the program prints, from C too, is not the answer
    with contextlib.redirect_stdout(sys.stderr):
        found = _estimate(order, estimate)
    with os.fdopen(out, "w") as stream:
        stream.write("\n" + json.dumps(found) + "\n")


def _estimate(order: dict[str, Any], estimate: Callable[..., Estimate]) -> dict[str, Any]:
    """The document of the estimate that ``order`` describes: of a script (a case and a value, for
    `gpuprobe.planning.fit`), or of a program once more (for `gpuprobe.planning.auto`).
    """
    program = program_of(order)
    change = order.get("change", "")
    if change not in ("", "expandable"):
        from gpuprobe.planning.changes import apply

        apply(change)
    try:
        found = estimate(
            program,
            order["gpu"],
            steps=order["steps"],
            compute=order["compute"],
            conf=order["conf"],
            ranks=order["ranks"],
            assume=order["assume"],
            **{
                name: order[key]
                for name, key in (("within", "why"), *((key, key) for key in _OPTIONAL))
                if key in order
            },
        )
    except TooLarge as error:
        return {"too_large": str(error)}
    except GpuprobeError as error:
        cause = error.__cause__
        plain = cause is None or isinstance(error, ValueNeeded)
        if cause is not None and isinstance(error, ProgramFailed):
            sys.stderr.write(own_traceback(cause))
        return {
            "error": f"{error}" if plain else f"{type(cause).__name__}: {cause}",
            "hint": error.hint,
            "needs_value": isinstance(error, ValueNeeded),
        }
    return estimate_json.document(found)


def program_of(order: dict[str, Any]) -> Program:
    """The program that an order names, with the value and the change that it describes."""
    arguments, script = list(order["arguments"]), order["script"]
    if order.get("module"):
        return load_module(script, arguments)
    way = order.get("way")
    if way is None:
        return load_script(script, arguments)
    if way["option"]:
        arguments = with_option(arguments, way["option"], order["value"])
    program = load_script(script, arguments)
    program.changes = {key: order[key] for key in ("way", "value", "change")}
    if way["constant"]:
        source = Path(script).read_text(encoding="utf-8")
        tree = with_constant(source, way["constant"], order["value"])
        program.code = compile(tree, program.file, "exec", dont_inherit=True)
    return program
