"""The source files of a program, read for its baseline."""

from __future__ import annotations

import ast
import posixpath
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpuprobe.analysis.blame.source import Source, source_of
from gpuprobe.analysis.compare.naming import SITE_PACKAGES
from gpuprobe.model.io.files import read_text

_MOST_FILES: Final = 400
_MOST_BYTES: Final = 4 << 20  # of one file


def read_sources(
    files: Mapping[str, str], root: str = "", not_after: float | None = None
) -> dict[str, Source]:
    """The sources of ``files`` (names, and the files), and of what they import of the project in
    ``root``. Files that cannot be read, and those that were changed since ``not_after`` (seconds
    since the Unix epoch), are left out: their lines are not those that ran.
    """
    found: dict[str, Source] = {}
    pending = [(name, Path(root, file)) for name, file in sorted(files.items())]
    seen = {name for name, _ in pending}
    while pending and len(found) < _MOST_FILES:
        name, path = pending.pop(0)
        text = _text(path, not_after)
        if text is None:
            continue
        source = found[name] = source_of(text)
        if name.startswith((SITE_PACKAGES, ".../")):
            continue
        for other in _imported(source, name, path):
            if other not in seen:
                seen.add(other)
                pending.append((other, _sibling(path, name, other)))
    return dict(sorted(found.items()))


def with_text(sources: Mapping[str, Source], root: str = "") -> dict[str, Source]:
    """Sources of which a baseline that was read knows the digests alone, with the text of the files
    that still have them. ``root``: the project's folder, default the working directory."""
    found = {}
    for name, source in sources.items():
        inside = name.startswith(SITE_PACKAGES)
        rest = name[len(SITE_PACKAGES) :] if inside else name
        folders = [path for path in sys.path if path] if inside else [root]
        texts = (_text(Path(folder, rest), None) for folder in folders)
        whole = (source_of(text) for text in texts if text is not None)
        same = (other for other in whole if other.statements == source.statements)
        found[name] = next(same, source)
    return found


def _text(path: Path, not_after: float | None) -> str | None:
    if path.suffix != ".py":
        return None
    try:
        if not_after is not None and path.stat().st_mtime > not_after:
            return None
        return read_text(path, most=_MOST_BYTES)
    except (OSError, ValueError):  # not there; no text, or no name of a file (a null byte)
        return None


def _imported(source: Source, name: str, path: Path) -> list[str]:
    """The files that a file imports and that lie in the project, by name."""
    try:
        tree = ast.parse(source.text or "")
    except (SyntaxError, ValueError, RecursionError):
        return []
    here = posixpath.dirname(name)
    top = len(Path(name).parts)
    found = []
    for node in ast.walk(tree):
        wanted: list[tuple[str, int]] = []
        if isinstance(node, ast.Import):
            wanted = [(alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            wanted = [(module, node.level)]
            wanted += [(f"{module}.{alias.name}".strip("."), node.level) for alias in node.names]
        for module, level in wanted:
            tail = module.replace(".", "/")
            folders = ["", "src", here]
            if level:
                folder = here
                for _ in range(level - 1):
                    folder = posixpath.dirname(folder)
                folders = [folder]
            for folder in folders:
                base = posixpath.join(folder, tail) if tail else folder
                for file in (f"{base}.py", posixpath.join(base, "__init__.py")):
                    if len(path.parts) >= top and _sibling(path, name, file).is_file():
                        found.append(posixpath.normpath(file))
    return list(dict.fromkeys(found))


def _sibling(path: Path, name: str, other: str) -> Path:
    """The file of a name, next to one that is known: both names are relative to one folder."""
    root = path
    for _ in Path(name).parts:
        root = root.parent
    return root / other
