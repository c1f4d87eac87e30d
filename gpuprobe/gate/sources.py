"""The project's files that a program consists of: Python sources and text files that it opens.

A baseline stores them compressed, so that a later check has both sides of a change, wherever the
project's folder is. It contains small text files below that folder; never installed packages,
hidden files, files whose names suggest secrets (`_SECRET`), or files that git ignores.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import io
import os
import pathlib
import posixpath
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from gpuprobe.analysis.blame.source import Source, source_of
from gpuprobe.model.io.files import read_regular, read_text
from gpuprobe.user_frames import SITE_PACKAGES, is_outside

_MOST_FILES: Final = 400
_MOST_BYTES: Final = 4 << 20  # of one file


def read_sources(
    files: Mapping[str, str], root: str = "", not_after: float | None = None
) -> dict[str, Source]:
    """The sources of ``files`` (paths by name), and of the project's files in ``root`` that they
    import. Files that cannot be read are left out, and files changed since ``not_after`` (seconds
    since the Unix epoch): their lines are not those that ran.
    """
    found: dict[str, Source] = {}
    pending = [(name, Path(root, file)) for name, file in sorted(files.items())]
    visited = {name for name, _ in pending}
    while pending and len(found) < _MOST_FILES:
        name, path = pending.pop(0)
        text = _text(path, not_after)
        if text is None:
            continue
        source = found[name] = source_of(text)
        if is_outside(name):
            continue
        for other in _imported(source, name, path):
            if other not in visited:
                visited.add(other)
                pending.append((other, _sibling(path, name, other)))
    return dict(sorted(found.items()))


def with_text(sources: Mapping[str, Source], root: str = "") -> dict[str, Source]:
    """Add texts to the sources of a baseline, which has only their digests, from files with equal
    digests. ``root``: the project's folder, by default the working directory."""
    found = {}
    for name, source in sources.items():
        inside = name.startswith(SITE_PACKAGES)
        rest = name[len(SITE_PACKAGES) :] if inside else name
        folders = [path for path in sys.path if path] if inside else [root]
        texts = (_text(Path(folder, rest), None) for folder in folders)
        complete = (source_of(text) for text in texts if text is not None)
        same = (other for other in complete if other.statements == source.statements)
        found[name] = next(same, source)
    return found


def _text(path: Path, not_after: float | None) -> str | None:
    if path.suffix != ".py":
        return None
    try:
        if not_after is not None and path.stat().st_mtime > not_after:
            return None
        return read_text(path, most=_MOST_BYTES)
    except (OSError, ValueError):  # missing, not text, or a name with a null byte
        return None


def _imported(source: Source, name: str, path: Path) -> list[str]:
    """The names of the project's files that a file imports."""
    try:
        tree = ast.parse(source.text or "")
    except (SyntaxError, ValueError, RecursionError):
        return []
    here = posixpath.dirname(name)
    top = len(Path(name).parts)
    found = []
    for node in ast.walk(tree):
        modules: list[tuple[str, int]] = []
        if isinstance(node, ast.Import):
            modules = [(alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            modules = [(module, node.level)]
            modules += [(f"{module}.{alias.name}".strip("."), node.level) for alias in node.names]
        for module, level in modules:
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
    """The path of a name, from the ``path`` of another ``name`` relative to the same folder."""
    root = path
    for _ in Path(name).parts:
        root = root.parent
    return root / other


MOST_PYTHON: Final = 512 << 10  # bytes of one file
MOST_SETTINGS: Final = 64 << 10
MOST_TOGETHER: Final = 8 << 20

_SECRET: Final = re.compile(
    r"(^|[._-])env$|^\.env|secret|credential|passw|api_?key|^id_(rsa|dsa|ecdsa|ed25519)"
    r"|\.(pem|key|p12|pfx|jks|kdbx|gpg|asc)$|^\.?(netrc|pypirc|npmrc|pgpass|htpasswd)$"
    r"|(^|[._-])tokens?(\.(txt|json|ya?ml|toml|ini|cfg))?$",
    re.IGNORECASE,
)
"""Names of files that may contain secrets."""

_ELSEWHERE: Final = frozenset(("site-packages", "dist-packages", "node_modules", "__pycache__"))


class OpenedFiles:
    """The names of files that this process opens for reading, and those on the command lines of its
    subprocesses, with the working directory at that time."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], None] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the files that are opened inside by ``open`` and `io.open` (which `pathlib`
        calls), and those on command lines. An audit hook would catch more, but cost 0.4 µs for each
        attribute that a class resolves by ``__getattr__``: 1% of a check.
        """
        originals = builtins.open, subprocess.Popen.__init__

        @functools.wraps(originals[0])
        def opened(file: Any, mode: Any = "r", *arguments: Any, **options: Any) -> Any:
            self._opened(file, mode)
            return originals[0](file, mode, *arguments, **options)

        @functools.wraps(originals[1])
        def started(process: Any, args: Any, *arguments: Any, **options: Any) -> None:
            self._started(args)
            originals[1](process, args, *arguments, **options)

        builtins.open = io.open = opened
        accessor: Any = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10
        if accessor is not None:
            accessor.open = staticmethod(opened)
        subprocess.Popen.__init__ = started  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            if builtins.open is opened:
                builtins.open = originals[0]
            if io.open is opened:
                io.open = originals[0]
            if accessor is not None:
                accessor.open = staticmethod(originals[0])
            if subprocess.Popen.__init__ is started:
                subprocess.Popen.__init__ = originals[1]  # type: ignore[method-assign]

    def _opened(self, name: object, mode: object) -> None:
        if not isinstance(name, (str, bytes, os.PathLike)):
            return  # a descriptor, or an invalid argument
        if isinstance(mode, str) and mode[:1] not in ("w", "x", "a"):
            with contextlib.suppress(TypeError, ValueError):
                plain = os.fsdecode(name)
                if not plain.endswith(_NO_TEXT):
                    self._add(plain)

    def _started(self, arguments: Any) -> None:
        with contextlib.suppress(TypeError, ValueError):
            single = isinstance(arguments, (str, bytes, os.PathLike))
            for argument in [arguments] if single else list(arguments):
                for part in re.split(r"[\s'\"=;&|<>()]+", os.fsdecode(argument)):
                    if "." in part or "/" in part:
                        self._add(part)

    def _add(self, name: str) -> None:
        if len(self._names) < _MOST_NAMES and "\0" not in name:
            self._names[name, "" if os.path.isabs(name) else _folder()] = None  # noqa: PTH117

    def inside(self, root: str) -> set[str]:
        """The recorded files below ``root``, relative to it, with ``/``."""
        found = set()
        for name, folder in self._names:
            relative = below(os.path.join(folder, name), root)  # noqa: PTH118
            if relative is not None:
                found.add(relative)
        return found


_MOST_NAMES: Final = 20_000
_NO_TEXT: Final = (".pyc", ".so", ".pt", ".pth", ".bin", ".npy", ".safetensors")


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - called for each file that is opened
    except OSError:
        return ""  # the folder was removed


def below(path: str, root: str) -> str | None:
    """The name of a file relative to the project's folder ``root`` (absolute); None for other
    files, and for those in hidden folders and installed packages."""
    absolute = os.path.abspath(path)  # noqa: PTH100 - for each file that is opened
    for folder in _roots(root):
        if absolute.startswith(folder):
            parts = Path(absolute[len(folder) :]).parts
            if _ELSEWHERE & set(parts) or any(part.startswith(".") for part in parts[:-1]):
                return None
            return "/".join(parts)
    return None


@functools.cache
def _roots(root: str) -> tuple[str, ...]:
    """The project's folder as given and with links resolved, each with a trailing separator."""
    folders = (root, os.path.realpath(root))
    return tuple(dict.fromkeys(os.path.join(folder, "") for folder in folders))  # noqa: PTH118


def own_modules(root: str) -> set[str]:
    """The Python files below ``root`` that this process has imported, relative to it."""
    found = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py"):
            name = below(file, root)
            if name is not None:
                found.add(name)
    return found


def kept_texts(names: Iterable[str], root: str, not_after: float | None = None) -> dict[str, str]:
    """The texts of the project's files that may be stored, by name. Files changed since
    ``not_after`` (seconds since the Unix epoch) are left out: the program read other texts."""
    found: dict[str, str] = {}
    left = MOST_TOGETHER
    for name in sorted(set(names), key=lambda name: (not name.endswith(".py"), name)):
        path = Path(root, name)
        text = text_of(path, not_after) if below(os.path.realpath(path), root) else None
        if text is None or len(found) >= _MOST_FILES or len(text) > left:
            continue
        found[name] = text
        left -= len(text)
    return dict(sorted(found.items()))


def text_of(path: Path, not_after: float | None = None) -> str | None:
    """The text of a file, with its line ends; None if the file is large, binary, missing, hidden,
    may contain secrets, or was changed after ``not_after``.
    """
    if path.name.startswith(".") or _SECRET.search(path.name):
        return None
    most = MOST_PYTHON if path.suffix == ".py" else MOST_SETTINGS
    try:
        if not_after is not None and path.stat().st_mtime > not_after:
            return None
        data = read_regular(path, most=most)
        text = data.decode("utf-8")
    except (OSError, ValueError):
        return None
    return None if "\0" in text else text


def ignored_by_git(names: Collection[str], root: str) -> set[str]:
    """The names of files that the repository ignores; none without git."""
    if not names:
        return set()
    try:
        done = subprocess.run(
            ["git", "-C", root or ".", "check-ignore", "-z", "--stdin"],
            input="\0".join(names).encode("utf-8", "surrogateescape"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            timeout=30,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return set()
    return set(done.stdout.decode("utf-8", "surrogateescape").split("\0"))
