"""Patches for ``git apply``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence


def file_diff(name: str, before: Sequence[str], after: Sequence[str]) -> str:
    """The unified diff of one file; its paths begin with ``a/`` and ``b/``."""
    paths = []
    for folder in "ab":
        path = f"{folder}/{name}"
        if re.search(r'["\\\x00-\x1f]', path):  # git's quotes
            path = '"' + re.sub(r'["\\]|[\x00-\x1f]', _escaped, path) + '"'
        paths.append(path + "\t" * (" " in path))  # a tab ends a name with spaces
    return "".join(
        row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n"
        for row in difflib.unified_diff(before, after, paths[0], paths[1])
    )


def _escaped(match: re.Match[str]) -> str:
    return f"\\{match[0]}" if match[0] in '"\\' else f"\\{ord(match[0]):03o}"
