"""Details of a snapshot that are not what torch writes: kept as unknown, counted, and noted.

A real snapshot is never refused for one of them. What the accounts of memory are made of (actions,
addresses, sizes, states of blocks) is refused where it is wrong: see `decode`.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gpuprobe.errors import SnapshotError
from gpuprobe.model.io.budget import LIMITS, MOST_FRAMES
from gpuprobe.model.text import shortened
from gpuprobe.model.trace import MOST_DEPTH, Frame, StackTable, known_line
from gpuprobe.model.values import NewestMicroseconds

T = TypeVar("T")

_HINT = "create one with torch.cuda.memory._dump_snapshot(path)"

_FREE_TEXT = 16 << 20
_TEXT_PER_BYTE = 16
"""Characters of names that a snapshot may have, and so many more for each byte of its file. Names
are shared in real ones: a frame of 120 characters takes 25 bytes and more."""

FRAMES = "invalid stack frames"
LINES = "stack frames with an impossible line number"
NAMES = "names of files and functions of more than 10,000 characters"
DEPTHS = f"stacks of more than {MOST_DEPTH:,} frames"
TAGS = "phases that are not text"
TIMES = "invalid event times"
ANNOTATIONS = "invalid annotations"
SETTINGS = "invalid allocator settings"

CONSEQUENCES = {
    FRAMES: "they were skipped: allocations are attributed to the other frames",
    LINES: "they have no line",
    NAMES: "they are truncated",
    DEPTHS: "their outermost frames are left out",
    TAGS: "their events have no phase",
    TIMES: "the events have no times, but their order is known",
    ANNOTATIONS: "they were skipped; steps may be missing",
    SETTINGS: "the default settings are assumed",
}

_WRONG = (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError)


class Irregularities:
    """Counts irregular details, and bounds the names and stacks that are copied from a file of
    ``size`` bytes; None: from this process, without bounds.

    A pickle can refer to one long text or list many times, and so describe a thousand times what it
    holds.
    """

    def __init__(self, size: int | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._left = self._frames_left = self._depth_left = math.inf
        if size is not None:
            self._left = _FREE_TEXT + _TEXT_PER_BYTE * size
            self._frames_left = MOST_FRAMES
            self._depth_left = LIMITS["frames of stacks"].free + size

    def frame(self, plain: Any) -> Frame:
        """A frame, or an unknown one if it is invalid. Raises SnapshotError for too much text."""
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
                hint=_HINT,
            )
        return short

    def index(self, table: StackTable, plain: object) -> int:
        """The index of a frame, added if new. Raises SnapshotError for too many."""
        known = len(table.frames)
        found = table.frame(self.frame(plain))
        self._frames_left -= len(table.frames) - known
        if self._frames_left < 0:
            raise SnapshotError(
                f"the snapshot has more than {MOST_FRAMES:,} different stack frames", hint=_HINT
            )
        return found

    def stack(self, depth: int) -> None:
        """Count a stack of so many frames, of which `MOST_DEPTH` are kept. Raises SnapshotError for
        too many in all stacks.
        """
        if depth > MOST_DEPTH:
            self.counts[DEPTHS] += 1
        self._depth_left -= depth
        if self._depth_left < 0:
            raise SnapshotError(
                "the snapshot repeats the same stack so often that it describes more than a file "
                "of its size can hold",
                hint=_HINT,
            )

    def frames(self, listed: object) -> Sequence[object]:
        """A list of frames; what is none has no frames."""
        if isinstance(listed, (list, tuple)):
            return listed
        if listed is not None:
            self.counts[FRAMES] += 1
        return ()

    def tags(self, values: list[object]) -> list[str | None]:
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
