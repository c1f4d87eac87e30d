"""What holds the memory of traces that later steps have not used: searched where a step, or the
program, ends.

A block that was alive when a trace ended is followed (`gpuprobe.sampler.tracing.uses`). If it is
still alive when a search takes place, and nothing has used it in a whole step, what holds it is
recorded with its rows in the traces. On hardware no uses are traced, so there is nothing to search.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Final, TypeAlias

from gpuprobe.model.memory import BlockState
from gpuprobe.model.run.holders import Holder
from gpuprobe.model.run.session import HeldRows
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Bytes
from gpuprobe.sampler.tracing.uses import Uses
from gpuprobe.torch_support.holding.objects import SearchLimits
from gpuprobe.torch_support.holding.search import holders_of

_LIMITS: Final = SearchLimits(500_000, 3.0)
_MOST_BLOCKS: Final = 20_000
_MOST_GROUPS: Final = 32

_Rows: TypeAlias = dict[str, tuple[list[int], list[int]]]
_Place: TypeAlias = tuple[str, int]  # device, address


class HeldMemory:
    """The holders of one recording's blocks."""

    def __init__(self, uses: Uses) -> None:
        self._uses = uses
        self._steps: dict[str, int] = {}  # by the name of a trace
        self._alive: dict[str, dict[int, int]] = {}  # by device: sizes by address
        self._sizes: dict[tuple[object, ...], dict[int, int]] = {}
        """By holder: the elements of its outermost container, by the number of steps."""
        self._found: dict[_Place, tuple[Holder, int, tuple[tuple[str, bool, int], ...]]] = {}

    def saved(self, trace: MemoryTrace, name: str) -> None:
        """A trace was written under this name."""
        self._steps[name] = 0 if trace.step is None else trace.step
        self._alive[trace.device] = {
            block.address: block.size
            for segment in trace.segments
            for block in segment.blocks
            if block.state is BlockState.ALLOCATED
        }
        for place, (holder, size, rows) in self._found.items():
            now = self._uses.rows_of(place[1])
            if now[: len(rows)] == rows:  # else it was used since, and another block may be there
                self._found[place] = holder, size, now

    def search(
        self,
        before: int,
        *,
        frames: Iterable[FrameType] = (),
        error: BaseException | None = None,
        ended: bool = False,
    ) -> None:
        """Search for what holds the blocks that nothing has used since a step before ``before``
        ended. ``frames``: the functions that run; ``error``: an exception whose frames are
        searched too. ``ended``: the program has ended, and an earlier search found what functions
        had that have returned; otherwise the search replaces earlier ones.
        """
        if not ended:
            self._found = {}
        followed = self._uses.followed(self._steps, before)
        sizes: dict[_Place, int] = {}
        for device, alive in self._alive.items():
            sizes.update(
                ((device, address), size) for address, size in alive.items() if address in followed
            )
        largest = sorted(sizes, key=lambda place: -sizes[place])[:_MOST_BLOCKS]
        if not largest:
            return
        found = holders_of(
            {place: sizes[place] for place in largest}, frames=frames, error=error, limits=_LIMITS
        )
        for place in largest:
            holder = found.get(place)
            if ended and place in self._found and (holder is None or not holder.name):
                continue  # of a function that has returned since
            if holder is not None:
                self._found[place] = holder, sizes[place], followed[place[1]]
                many = next((step.size for step in holder.path if step.size is not None), None)
                if many is not None:
                    self._sizes.setdefault(_key(holder), {})[before] = many

    def take(self) -> Iterator[HeldRows]:
        """What was found, in groups of one holder, the largest first."""
        groups: dict[tuple[object, ...], list[_Place]] = defaultdict(list)
        for place, (holder, _, _) in self._found.items():
            groups[_key(holder)].append(place)
        size = {
            key: sum(self._found[place][1] for place in places) for key, places in groups.items()
        }
        for key in sorted(groups, key=lambda key: -size[key])[:_MOST_GROUPS]:
            yield from self._records(groups[key], size[key])
        self._found = {}

    def _records(self, places: list[_Place], size: int) -> Iterator[HeldRows]:
        largest = max(places, key=lambda place: self._found[place][1])
        holders = [self._found[place][0] for place in places]
        holder = replace(
            self._found[largest][0],
            tensors=len(places),
            graphs=sum(one.graphs for one in holders),
            bytes=Bytes(size),
        )
        rows: _Rows = {}
        for place in places:
            for trace, baseline, row in self._found[place][2]:
                rows.setdefault(trace, ([], []))[baseline].append(row)
        for trace, (events, baseline_rows) in rows.items():
            yield HeldRows(
                trace,
                holder,
                tuple(sorted(events)),
                tuple(sorted(baseline_rows)),
                tuple(sorted(self._sizes.get(_key(holder), {}).items())),
            )


def _key(holder: Holder) -> tuple[object, ...]:
    """What blocks of one group have in common: the path to the outermost container, or the variable
    that it begins with: an object that keeps a list has other things, too.
    """
    sizes = [step.size is not None for step in holder.path]
    common = holder.path[: sizes.index(True) + 1 if any(sizes) else 1]
    cycle = frozenset(one.kind for one in holder.cycle)
    names = tuple(step.label for step in common)
    return holder.root, holder.function, names, holder.kept, holder.error, cycle


def frames_of(error: BaseException) -> list[FrameType]:
    """The functions that an exception ended, which hold what they had."""
    found: list[FrameType] = []
    at = error.__traceback__
    while at is not None:
        found.append(at.tb_frame)
        at = at.tb_next
    return found[::-1]
