"""Values that an estimate does not compute, as the user gives them: ``--assume``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from gpuprobe.errors import UsageError

_FORM: Final = re.compile(r"(?P<file>.+):(?P<line>[1-9]\d*)=(?P<value>.+)", re.DOTALL)
_WORDS: Final = {"true": True, "false": False}


class Assumption(NamedTuple):
    """The value that a program reads at one line, as ``--assume train.py:12=false`` gives it."""

    text: str
    file: str
    line: int
    value: bool | int | float

    def applies(self, file: str, line: int) -> bool:
        """Whether it applies to this line of a file, an absolute path. An assumption may name a
        file by the end of its path.
        """
        if line != self.line:
            return False
        path = os.path.abspath(self.file)  # noqa: PTH100 - Path.absolute keeps ".."
        if path == file or Path(path).exists():
            return path == file
        parts = Path(self.file).parts
        return Path(file).parts[-len(parts) :] == parts


def parse(text: str) -> Assumption:
    """``FILE:LINE=VALUE``; a value is ``true``, ``false`` or a number. Raises UsageError."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise UsageError(
            f"not FILE:LINE=VALUE: {text!r}", hint="such as --assume train.py:12=false"
        )
    word = found["value"].strip().lower()
    value: bool | int | float | None = _WORDS.get(word)
    if value is None:
        try:
            value = int(word) if re.fullmatch(r"[+-]?\d+", word) else float(word)
        except ValueError:
            raise UsageError(
                f"no value: {found['value']!r} in {text!r}", hint="true, false or a number"
            ) from None
    return Assumption(text, found["file"], int(found["line"]), value)


class Assumptions:
    """The assumptions of an estimate, and which of them were used."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        """Raises UsageError for an invalid text, and for two values for one line."""
        self._all = [parse(text) for text in dict.fromkeys(texts)]
        self._used: set[Assumption] = set()
        lines: dict[tuple[str, int], str] = {}
        for item in self._all:
            other = lines.setdefault((os.path.abspath(item.file), item.line), item.text)  # noqa: PTH100
            if other != item.text:
                raise UsageError(f"two values for one line: {other} and {item.text}")

    def __bool__(self) -> bool:
        return bool(self._all)

    def at(self, file: str, line: int) -> Assumption | None:
        """The assumption for a line, which counts as used from now on; None without one."""
        for item in self._all:
            if item.applies(file, line):
                self._used.add(item)
                return item
        return None

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(item.text for item in self._all if item not in self._used)
