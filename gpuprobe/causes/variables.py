"""The names of a program's variables, by the code that assigns them."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from pathlib import Path

from gpuprobe.model.io.files import read_regular
from gpuprobe.model.trace import Frame
from gpuprobe.remedies.text import ProgramText, Refused, parsed
from gpuprobe.user_frames import is_user_frame

_MOST_SOURCE = 1 << 20  # bytes of a file that is read


class Variables:
    """Variables of the program's files, each of which is read once."""

    def __init__(self) -> None:
        self._texts: dict[str, ProgramText | None] = {}

    def assigned(self, frames: Sequence[Frame]) -> str:
        """The name that the code of a stack, innermost frame first, assigns its result to: that of
        the innermost assignment, past functions that only return it. "" if there is none.
        """
        for frame in filter(is_user_frame, frames):
            text = self._text(frame.filename)
            statements = text.statements(frame.line) if text is not None else []
            if len(statements) != 1:
                return ""
            node = statements[0]
            if isinstance(node, ast.Return):
                continue
            return _target(node)
        return ""

    def accumulated(self, frames: Sequence[Frame]) -> str:
        """The name that a statement of a stack, innermost frame first, computes from itself:
        ``x`` of ``x = x + model(x)``; "" if there is none.
        """
        for frame in filter(is_user_frame, frames):
            text = self._text(frame.filename)
            for node in text.statements(frame.line) if text is not None else []:
                name = _target(node)
                value = getattr(node, "value", None)
                read = {ast.unparse(one) for one in ast.walk(value)} if value is not None else set()
                if name and (name in read or isinstance(node, ast.AugAssign)):
                    return name
        return ""

    def _text(self, path: str) -> ProgramText | None:
        if path not in self._texts:
            found: ProgramText | None = None
            if os.path.isabs(path):  # noqa: PTH117 - frames have other names, too
                try:
                    read = parsed(path, read_regular(Path(path), most=_MOST_SOURCE))
                    found = None if isinstance(read, Refused) else read
                except OSError:
                    found = None
            self._texts[path] = found
        return self._texts[path]


def _target(node: ast.stmt) -> str:
    """The name or attribute that a statement assigns; of several, the last that is not ``_``."""
    targets: list[ast.expr]
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    elif isinstance(node, ast.Assign):
        targets = [
            one
            for target in node.targets
            for one in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])
        ]
    else:
        return ""
    names = [
        ast.unparse(one)
        for one in targets
        if isinstance(one, (ast.Name, ast.Attribute)) and ast.unparse(one) != "_"
    ]
    return names[-1] if names else ""
