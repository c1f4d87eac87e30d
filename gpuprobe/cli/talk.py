"""stderr, and making untrusted text safe to print. stdout is data; everything else is talk."""

from __future__ import annotations

import sys

__all__ = ["error", "say", "visible"]


def visible(text: str) -> str:
    """The text with control characters shown, not executed.

    Process names, model names and paths come from elsewhere: an escape sequence in one of
    them must not reach the terminal. Newlines are shown too, so one value stays one line.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _shown(c) for c in text)


def _shown(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8 (surrogateescape)
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def say(text: str) -> None:
    """One line of talk. A closed stderr is no reason to fail."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        return


def error(message: str, hint: str = "") -> None:
    """One clear line (and a hint) about what went wrong."""
    say(f"gpuprobe: error: {visible(message)}")
    if hint:
        say(f"  hint: {visible(hint)}")
