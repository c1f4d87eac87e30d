"""A change to one of the programs, and what a check of it should report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """``edits``: pairs of texts, each of which is in the program once, in order. ``lines``: texts
    of the changed program's lines that a reader of the change would blame, none for a harmless
    one. ``public``: the repository and commit or pull request that it is modelled on; most were
    made in the other direction. ``why``: what it costs, by arithmetic.
    """

    program: str
    edits: tuple[tuple[str, str], ...]
    public: str
    why: str
    lines: tuple[str, ...] = ()

    def applied(self, source: str) -> str:
        """The program with the change."""
        for old, new in self.edits:
            if source.count(old) != 1:
                raise ValueError(f"{source.count(old)} times in the program: {old!r}")
            source = source.replace(old, new)
        return source
