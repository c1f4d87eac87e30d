"""Walks through gpuprobe: which of its files a value passes through, by following real calls, and
which of them `docs/explanation/architecture.md` names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(ROOT / "gpuprobe") + "/"
PAGE = ROOT / "docs/explanation/architecture.md"

_NOT_PASSED_TO = "gpuprobe/torch_support/holding/"
"""Reads all objects of the process."""
_MOST_ITEMS = 20  # of a collection that are looked into


class Walk(NamedTuple):
    """The files of gpuprobe, as paths from the project's folder: those with a function that takes
    or returns what is followed, in the order of the first such call, and all with a called one.
    """

    path: list[str]
    called: set[str]


def walk(run: Callable[[], object], *kinds: type) -> Walk:
    """Follow the objects of these types through the calls of ``run`` in this thread. A tuple, list
    or dictionary that has one in it counts, too.
    """
    path: dict[str, None] = {}
    called: set[str] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or event not in ("call", "return"):
            return
        file = "gpuprobe/" + name.removeprefix(PACKAGE)
        called.add(file)
        if file in path or file.startswith(_NOT_PASSED_TO):
            return
        values = [argument] if event == "return" else _arguments(frame)
        if any(_carries(value, kinds) for value in values):
            path[file] = None

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return Walk(list(path), called)


def _arguments(frame: FrameType) -> list[object]:
    code: CodeType = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 4) + bool(code.co_flags & 8)  # *args and **kwargs
    return [frame.f_locals.get(name) for name in code.co_varnames[:count]]


def _carries(value: object, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if type(value) in (tuple, list):
        assert isinstance(value, (tuple, list))
        return any(isinstance(item, kinds) for item in value[:_MOST_ITEMS])
    return isinstance(value, kinds)


def named(section: str, page: Path = PAGE) -> list[str]:
    """The files that the numbered list of a section names, in its order, each once."""
    text = page.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2]
    listed = "".join(re.findall(r"^\d+\. .*\n(?:   .*\n)*", text.partition("\n## ")[0], re.M))
    return list(dict.fromkeys(re.findall(r"`(gpuprobe/[\w./]+\.py)`", listed)))
