"""Details of a snapshot that are not what torch writes: kept as unknown, counted, and noted.

A real snapshot is never refused for one of them. What the accounts of memory are made of (actions,
addresses, sizes, states of blocks) is refused where it is wrong: see `decode`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gpuprobe.errors import SnapshotError
from gpuprobe.model.bounds import NewestMicroseconds
from gpuprobe.model.text import shortened
from gpuprobe.model.trace import Frame, known_line

T = TypeVar("T")

FRAMES = "invalid stack frames"
LINES = "stack frames with an impossible line number"
NAMES = "names of files and functions of more than 10,000 characters"
TAGS = "phases that are not text"
TIMES = "invalid event times"
ANNOTATIONS = "invalid annotations"
SETTINGS = "invalid allocator settings"

CONSEQUENCES = {
    FRAMES: "they were skipped: allocations are attributed to the other frames",
    LINES: "they have no line",
    NAMES: "they are truncated",
    TAGS: "their events have no phase",
    TIMES: "the events have no times, but their order is known",
    ANNOTATIONS: "they were skipped; steps may be missing",
    SETTINGS: "the default settings are assumed",
}

_WRONG = (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError)


class Oddities:
    """Counts what is odd, and bounds the text that is taken over.

    ``most_text``: characters of names. A pickle can refer to one long text many times, and so
    describe a thousand times what it holds.
    """

    def __init__(self, most_text: float) -> None:
        self.counts: Counter[str] = Counter()
        self._left = most_text

    def frame(self, plain: Any) -> Frame:
        """A frame; what is none is the unknown one. Raises SnapshotError for too much text."""
        try:
            filename, line, name = plain["filename"], plain["line"], plain["name"]
            if not isinstance(filename, str) or not isinstance(name, str):
                raise TypeError
        except _WRONG:
            self.counts[FRAMES] += 1
            return Frame("", 0, "")
        number = known_line(line)
        if number is None:
            self.counts[LINES] += 1
        return Frame(self.name(filename), number or 0, self.name(name))

    def name(self, text: str) -> str:
        """A text that is taken over, at most as long as names are."""
        short = shortened(text)
        if short is not text:
            self.counts[NAMES] += 1
        self._left -= len(short)
        if self._left < 0:
            raise SnapshotError(
                "the snapshot repeats the same text so often that it describes more than a file "
                "of its size can hold",
                hint="create one with torch.cuda.memory._dump_snapshot(path)",
            )
        return short

    def frames(self, listed: Any) -> Sequence[Any]:
        """A list of frames; what is none has no frames."""
        if isinstance(listed, (list, tuple)):
            return listed
        if listed is not None:
            self.counts[FRAMES] += 1
        return ()

    def tags(self, values: list[Any]) -> list[str | None]:
        """Phases; what is no text is none."""
        self.counts[TAGS] += sum(v is not None and not isinstance(v, str) for v in values)
        return [value if isinstance(value, str) else None for value in values]

    def times(self, values: list[Any]) -> array[int]:
        """Times in microseconds; what is none is 0."""
        good = [v.__class__ is int and 0 <= v <= NewestMicroseconds for v in values]
        self.counts[TIMES] += good.count(False)
        return array("q", [v if g else 0 for v, g in zip(values, good, strict=True)])

    def or_nothing(self, what: str, make: Callable[[], T]) -> T | None:
        """What ``make`` returns; None, and counted as ``what``, where the data is unfit for it."""
        try:
            return make()
        except SnapshotError:
            raise
        except _WRONG:
            self.counts[what] += 1
            return None
