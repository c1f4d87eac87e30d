"""How the files and lines of a program are named in an account."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from gpuprobe.analysis.trace.frames import UserFrame, short_name
from gpuprobe.model.place import Place, parse_place
from gpuprobe.model.trace import Frame

SITE_PACKAGES: Final = "site-packages/"
"""What the names of files of installed packages begin with."""

_PACKAGE: Final = re.compile(r"/(site|dist)-packages/")


@dataclass(frozen=True, slots=True)
class Naming:
    """How files are named: relative to the project's folder ``root``. ``files``: of each name that
    was given, the file."""

    root: str
    is_user: UserFrame
    files: dict[str, str] = field(default_factory=dict)

    def file(self, name: str) -> str:
        """A path below the project without the project's folder; of an installed package, below
        ``site-packages/``; of others, the last parts."""
        plain = name.replace("\\", "/")
        folder = self.root.replace("\\", "/").rstrip("/") + "/"
        package = _PACKAGE.search(plain)
        if package is not None:
            found = f"{SITE_PACKAGES}{plain[package.end() :]}"
        elif len(folder) > 1 and plain.startswith(folder):
            found = plain[len(folder) :]
        elif plain.startswith("/"):
            found = posixpath.join("...", *plain.strip("/").split("/")[-2:])
        else:
            found = plain
        self.files[found] = name
        return found

    def line(self, frame: Frame) -> str:
        return short_name(frame._replace(filename=self.file(frame.filename)))

    def place(self, text: str) -> str:
        """A place in words, ``file:line in function``, with its file named."""
        place = parse_place(text)
        if not isinstance(place, Place) or not place.file:
            return text
        return str(replace(place, file=self.file(place.file)))

    def is_of_package(self, frame: Frame) -> bool:
        """Whether a frame is the Python of an installed package other than torch."""
        name = frame.filename.replace("\\", "/")
        package = _PACKAGE.search(name)
        return (
            package is not None
            and name.endswith(".py")
            and not name.startswith(("torch/", "gpuprobe/"), package.end())
        )


_OUTSIDE: Final = re.compile(
    r"/(gpuprobe/sampler/program\.py|_pytest/python\.py|pluggy/_callers\.py)$"
)


def inside(frames: Iterable[Frame]) -> Iterator[Frame]:
    """The frames of the program that is watched, without those of what runs it: up to the module
    that the innermost of them are called from, or to pytest around a test."""
    for frame in frames:
        if _OUTSIDE.search(frame.filename.replace("\\", "/")) is not None:
            return
        yield frame
        if frame.name == "<module>":
            return
