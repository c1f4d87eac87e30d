"""What goes to stderr: everything but the data that a command was asked for."""

from __future__ import annotations

import sys

from gpuprobe.model.text import cut, visible

MOST_COLUMNS = 1000


def print_line(text: str) -> None:
    """One line, in which names of anybody's choice may be: nothing in it is executed."""
    _write(visible(text) + "\n")


def error(message: str, hint: str = "") -> None:
    """One clear line (and a hint) about what went wrong. Names in it may be of any length: it is
    cut after `MOST_COLUMNS`."""
    print_line(f"gpuprobe: error: {cut(message, MOST_COLUMNS)}")
    if hint:
        print_line(f"  hint: {cut(hint, MOST_COLUMNS)}")


def warning(message: str) -> None:
    """One line about something that went wrong without ending anything."""
    print_line(f"gpuprobe: warning: {message}")


def note(text: str) -> None:
    """One line about what the command does or did."""
    print_line(f"gpuprobe: {text}")


def write(text: str) -> None:
    """Text of several lines as it is, such as the traceback of the watched program."""
    _write(text.rstrip("\n") + "\n")


def _write(text: str) -> None:
    """A closed stderr is no reason to fail."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        return
