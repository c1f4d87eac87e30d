"""Fingerprints of findings, which survive shifted lines."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Final

# A string is kept unchanged; comments and white space do not change what a line does.
_PARTS: Final = re.compile(r"(\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*')|#.*|\s+")


def normalized(source: str) -> str:
    """A line of Python without comments and white space outside of strings."""
    return _PARTS.sub(lambda match: match[1] or "", source)


def fingerprint(rule: str, kind: str, subject: str, places: Iterable[tuple[str, str, str]]) -> str:
    """16 hexadecimal digits. ``subject`` names the operators; ``places`` are (file, function,
    source line). They depend on no line number, and only on the name of a file: they stay the same
    when the code moves, alone or with its file, and change when one of the lines does.
    """
    parts = [rule, kind, subject]
    for file, function, source in places:
        parts += [PurePath(file).name, function, normalized(source)]
    key = "\0".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.sha256(key).hexdigest()[:16]
