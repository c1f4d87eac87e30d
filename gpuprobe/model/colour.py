"""Colour in text: the streams that get it, and the colours of severities."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final, TextIO

from gpuprobe.model.findings import Level

BOLD: Final = "\x1b[1m"
RESET: Final = "\x1b[0m"
_COLOURS: Final = {Level.ERROR: "\x1b[1;31m", Level.WARNING: "\x1b[1;33m", Level.NOTE: "\x1b[1;36m"}
"""ECMA-48: bold, and red, yellow or cyan, which are readable on black and on white in the usual
palettes of terminals."""


def uses_colour(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a stream gets colour: a terminal, unless TERM is dumb, NO_COLOR (https://no-color.org)
    is set or CLICOLOR is 0; other streams only with FORCE_COLOR or CLICOLOR_FORCE
    (https://bixense.com/clicolors).
    """
    if environ.get("NO_COLOR"):
        return False
    if any(environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    if environ.get("CLICOLOR") == "0" or environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def coloured(text: str, level: Level | None, *, bold: bool = False, whole: bool = False) -> str:
    """Printable text with its severity in colour: the first word that names ``level`` or, with
    ``whole``, all of the text.
    """
    if level is not None and whole:
        return f"{_COLOURS[level]}{text}{RESET}"
    if level is None or not names(text, level):
        return _bold(text) if bold else text
    before, word, after = re.split(rf"\b({level.value})\b", text, maxsplit=1)
    if bold:
        before, after = _bold(before), _bold(after)
    return f"{before}{_COLOURS[level]}{word}{RESET}{after}"


def names(text: str, level: Level) -> bool:
    """Whether a text has the word of a severity."""
    return re.search(rf"\b{level.value}\b", text) is not None


def _bold(text: str) -> str:
    return f"{BOLD}{text}{RESET}" if text else ""
