"""Output on stderr: everything but a command's result."""

from __future__ import annotations

import contextlib
import sys

from gpuprobe.model.text import cut, visible

MOST_COLUMNS = 1000


def print_line(text: str) -> None:
    """Print one line, with control characters escaped: names in it come from others."""
    _write(visible(text) + "\n")


def error(message: str, hint: str = "") -> None:
    """Print an error in one line, and a hint. They are cut after `MOST_COLUMNS`: names in them have
    any length."""
    _write(_severity("error", cut(message, MOST_COLUMNS)))
    if hint:
        print_line(f"  hint: {cut(hint, MOST_COLUMNS)}")


def warning(message: str) -> None:
    """Print a warning in one line."""
    _write(_severity("warning", message))


def note(text: str) -> None:
    """Print one line about the progress or effect of the command."""
    print_line(f"gpuprobe: {text}")


def write(text: str) -> None:
    """Print text of several lines unchanged, such as the traceback of the user's program."""
    _write(text.rstrip("\n") + "\n")


def _severity(level: str, message: str) -> str:
    """The line of a message, with its severity in colour on a terminal that has it."""
    from gpuprobe.model.colour import coloured, uses_colour
    from gpuprobe.model.findings import Level

    prefix = f"gpuprobe: {level}: "
    with contextlib.suppress(ValueError, AttributeError):  # stderr is closed, or there is none
        if uses_colour(sys.stderr):
            prefix = coloured(prefix, Level(level))
    return f"{prefix}{visible(message)}\n"


def _write(text: str) -> None:
    """Write to stderr; does nothing if it is closed."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        return
