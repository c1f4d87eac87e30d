"""Files of readings: written while a screen is open, shown again later.

The first line is the header. Each line after it is a JSON object: ``{"moment": …}`` is a
whole reading, ``{"changes": …}`` what differs from the reading before. Most of a reading never
changes: eight GPUs take 90 KB whole and 10 KB as changes. Every `WHOLE_EVERY` lines there is
a whole one, from which a reader that jumps can begin.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gpuprobe.errors import DataError, UsageError
from gpuprobe.model.io.codec import from_plain, to_plain
from gpuprobe.model.io.document import check_version, header
from gpuprobe.model.io.files import open_regular
from gpuprobe.model.machine.monitor import SCHEMA, SCHEMA_VERSION, Moment

_MISFITS = (KeyError, IndexError, ValueError, TypeError, AttributeError, RecursionError)

WHOLE_EVERY = 60
"""Readings between two whole ones."""

_MAX_LINE = 16 << 20
"""Bytes. A whole reading of eight GPUs takes 90 KB."""


def changes(old: Any, new: Any) -> dict[str, object]:
    """The changes that turn ``old`` into ``new``, both plain JSON values. Empty if they are equal.

    ``{"=": value}`` replaces; ``{"+": {key: changes}, "-": [keys]}`` changes and removes keys
    of an object, or changes items of a list of the same length (keys are their positions).
    """
    if type(old) is not type(new) or not isinstance(old, (dict, list)):
        return {} if type(old) is type(new) and old == new else {"=": new}
    if isinstance(old, list):
        if len(old) != len(new):
            return {"=": new}
        pairs = {str(at): (a, b) for at, (a, b) in enumerate(zip(old, new, strict=True))}
        found: dict[str, object] = {}
        added: dict[str, object] = {}
    else:
        pairs = {key: (old[key], value) for key, value in new.items() if key in old}
        removed = [key for key in old if key not in new]
        found = {"-": removed} if removed else {}
        added = {key: {"=": value} for key, value in new.items() if key not in old}
    added.update((key, made) for key, (a, b) in pairs.items() if (made := changes(a, b)))
    if added:
        found["+"] = added
    return found


def applied(old: object, made: object) -> object:
    """``old`` with `changes` made to it, in place where it can be: with a copy, a change of a few
    bytes would take as long as the reading is large.

    Raises DataError where they do not belong together; then some of them may have been made.
    """
    if not isinstance(made, dict) or set(made) - {"=", "+", "-"}:
        raise DataError("not a description of changes")
    if "=" in made:
        return made["="]
    if not made:
        return old
    if not isinstance(old, (dict, list)):
        raise DataError("changes of a value without parts")
    try:
        for key in made.get("-", ()):
            del old[key]
        for key, part in made.get("+", {}).items():
            if isinstance(old, list):
                old[int(key)] = applied(old[int(key)], part)
            else:
                old[key] = part["="] if key not in old else applied(old[key], part)
    except _MISFITS as error:
        raise DataError(f"changes of a missing value: {error}") from error
    return old


class MomentLog:
    """A file of readings, to be written.

    Raises UsageError where the file exists already or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            # Open for as long as the screen is.
            self._file: IO[str] = Path(path).open("x", encoding="utf-8")  # noqa: SIM115
        except FileExistsError as error:
            raise UsageError(
                f"{os.fspath(path)} exists already", hint="give another name, or remove it first"
            ) from error
        except OSError as error:
            raise UsageError(
                f"cannot write {os.fspath(path)}: {error.strerror or error}"
            ) from error
        self._before: object = None
        self._written = 0
        self._write(header(SCHEMA, SCHEMA_VERSION))

    def write(self, moment: Moment) -> None:
        """Append one reading."""
        plain = to_plain(moment)
        if self._written % WHOLE_EVERY == 0:
            self._write({"moment": plain})
        else:
            self._write({"changes": changes(self._before, plain)})
        self._before = plain
        self._written += 1

    def _write(self, plain: object) -> None:
        # ASCII: bytes that were not UTF-8 (lone surrogates) stay what they are.
        self._file.write(json.dumps(plain, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class ReplayedLog:
    """An open log of moments: `read` returns the next one, `step` moves back and forth.

    A context manager. Raises UsageError if the file does not exist or cannot be read, DataError for
    a file that is something else, and UnsupportedSchema for a newer major version.
    A file that is still being written may be open.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._name = Path(path).name
        try:
            self._file = open_regular(path)
        except FileNotFoundError:
            raise UsageError(
                f"no such file: {os.fspath(path)}", hint="create one with gpuprobe top --log FILE"
            ) from None
        except OSError as error:
            raise UsageError(f"cannot read {os.fspath(path)}: {error.strerror or error}") from error
        try:
            _check_head(self._file.readline(_MAX_LINE), self._name)
        except DataError:
            self._file.close()
            raise
        self._starts = [self._file.tell()]  # of the readings so far, and of the next
        self._whole: list[int] = []  # which of them are whole, in order
        self._next = 0
        self._at = -1  # the reading that ``_plain`` is
        self._plain: object = None

    def __enter__(self) -> ReplayedLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def step(self, by: int) -> None:
        """Have the next `read` return the moment ``by`` after the one that was read last."""
        self._next = max(0, min(self._next - 1 + by, len(self._starts) - 1))

    def read(self) -> Moment | None:
        """The next moment; None at the end. An incomplete last line does not count."""
        if self._at != self._next - 1:
            # A jump: begin at the nearest whole reading before it.
            first = max(at for at in self._whole if at <= self._next)
            for number in range(first, self._next):
                if not self._load(number):
                    return None
        if not self._load(self._next):
            return None
        self._next += 1
        return from_plain(Moment, self._plain)

    def last(self) -> Moment | None:
        """The last moment; None in a log without one. The moments before it are not decoded."""
        while self._load(self._next):
            self._next += 1
        return None if self._at < 0 else from_plain(Moment, self._plain)

    def _load(self, number: int) -> bool:
        """Make ``_plain`` this reading, coming from the one before; whether it is there."""
        self._file.seek(self._starts[number])
        line = self._file.readline(_MAX_LINE)
        if not line.endswith(b"\n"):
            if len(line) < _MAX_LINE:
                return False
            raise DataError(
                f"{self._name}, line {number + 2}: a line of more than {_MAX_LINE >> 20} MiB is "
                "not a reading"
            )
        entry = _object(line, self._name, number + 2)
        if "moment" in entry:
            self._plain = entry["moment"]
            if number == len(self._starts) - 1:
                self._whole.append(number)
        elif self._at != number - 1 or number == 0:
            raise DataError(f"{self._name}, line {number + 2}: it begins with changes")
        else:
            plain, self._plain, self._at = self._plain, None, -1  # until all are made
            self._plain = applied(plain, entry.get("changes"))
        if number == len(self._starts) - 1:
            self._starts.append(self._file.tell())
        self._at = number
        return True


def read_moments(path: str | os.PathLike[str]) -> Iterator[Moment]:
    """The moments of a file that `MomentLog` wrote, one at a time. Raises as `ReplayedLog`."""
    with ReplayedLog(path) as log:
        while (moment := log.read()) is not None:
            yield moment


def last_moment(path: str | os.PathLike[str]) -> Moment:
    """The last moment of a log. Raises as `ReplayedLog`, and DataError where it has none."""
    with ReplayedLog(path) as log:
        last = log.last()
    if last is None:
        raise DataError(f"{Path(path).name} has no readings yet")
    return last


def _check_head(line: bytes, name: str) -> None:
    head = _object(line, name, 1)
    if head.get("schema") != SCHEMA:
        raise DataError(
            f"{name} is not a log of gpuprobe top", hint="create one with gpuprobe top --log"
        )
    check_version(head, SCHEMA_VERSION, name)


def _object(line: bytes, name: str, number: int) -> dict[str, object]:
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}, line {number}: not JSON") from error
    if not isinstance(plain, dict):
        raise DataError(f"{name}, line {number}: not an object")
    return plain
