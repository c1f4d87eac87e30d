"""A bug of a public project, reduced: one text, which is the buggy and the mended program.

Marks at the end of a line: ``#bug`` is in the buggy program only, ``#fix`` in the mended one only;
``#1`` and ``#2`` are the two accesses that race, in the order in which they are launched. The
programs run as those of ``hazard_case`` do, and were written from the reports that they name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_MARKS = re.compile(r"\s*((?:#(?:bug|fix|1|2)\s*)+)$")


class Bug(NamedTuple):
    """``lines``: numbers, in the buggy program, of the first and the second access."""

    name: str
    url: str
    kind: str
    buggy: str
    mended: str
    lines: tuple[int, int]
    gpus: int = 1


def bug(name: str, url: str, kind: tuple[str, ...], text: str, gpus: int = 1) -> Bug:
    buggy: list[str] = []
    mended: list[str] = []
    first = second = 0
    for line in text.strip("\n").splitlines():
        found = _MARKS.search(line)
        marks = set(re.findall(r"#\w+", found[1])) if found else set()
        code = line[: found.start()] if found else line
        if "#fix" not in marks:
            buggy.append(code)
            first = len(buggy) if "#1" in marks else first
            second = len(buggy) if "#2" in marks else second
        if "#bug" not in marks:
            mended.append(code)
    assert first, f"{name}: no line is marked #1"
    assert second, f"{name}: no line is marked #2"
    return Bug(
        name, url, kind[0], "\n".join(buggy) + "\n", "\n".join(mended) + "\n", (first, second), gpus
    )
