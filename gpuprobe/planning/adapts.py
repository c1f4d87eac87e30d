"""Whether a script handles an out-of-memory error, and so may continue with less."""

from __future__ import annotations

import ast
from pathlib import Path

from gpuprobe.model.io.files import read_regular

_MOST = 1 << 20  # bytes of a script
_FINDS_BATCH = "find_executable_batch_size"  # accelerate's decorator, which halves the batch


def handler_of(script: str) -> str:
    """The place, ``file:line``, of the first handler of such an error; "" if none is found. Only
    the script itself is read, not what it imports.
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
