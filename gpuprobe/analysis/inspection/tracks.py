"""The memory of a whole recording as curves to draw: one track per rank and device.

A track joins the traces of all traced steps. It is thinned to a number of points that a screen can
show, and all extremes stay: the highest and the lowest point of each curve in each thinned stretch
are points of the track with their exact values. The largest blocks are kept one by one
(`SingleBlocks`), so that each can be selected.

Conservation: at every point the bands of a track sum to its allocated bytes; so do those by need,
in the traces in which the uses of memory were traced.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress
from operator import ne
from typing import Final, NamedTuple, TypeVar

from gpuprobe.analysis.inspection.lives import BlockLife, Lives
from gpuprobe.analysis.trace.categories import Marks, Runs, categories
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.analysis.trace.timeline import Timeline, thin, timeline
from gpuprobe.errors import DataError
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need, use_in_words
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.trace import Frame
from gpuprobe.model.values import Unavailable
from gpuprobe.user_frames import is_plumbing, short_name

T = TypeVar("T")

POINTS = 60_000
"""Points of all tracks together. A screen is 1,000 to 4,000 points wide: a million events fill it
even if zoomed in about twenty times."""

MOST_TRACKS = 16
MOST_SPANS = 5_000


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a track, from position ``first`` up to, not including, ``end``."""

    first: int
    end: int
    name: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """The trace of one step in a track. Position ``first`` is before its first event, and
    ``first + i + 1`` after event *i*. ``step`` is None if the trace does not belong to one step.
    """

    step: int | None
    first: int
    events: int


MOST_BLOCKS = 20_000
"""Blocks of a track; torch's viewer draws 15,000."""

MOST_NODES = 30_000
"""Frames of all stacks together. Once they are used up, stacks only have their outermost frames."""


NEEDS: Final = tuple(Need)
"""The needs of `SingleBlocks.spells`, by their indices."""

_NUMBER: Final = {need: number for number, need in enumerate(NEEDS)}


class SingleLife(NamedTuple):
    """What is known of the uses of a block: see `SingleBlocks`."""

    made_by: int
    first_at: int
    first_by: int
    last_at: int
    last_by: int


_NO_LIFE: Final = SingleLife(0, -1, 0, -1, 0)


@dataclass(slots=True)
class SingleBlocks:
    """The largest blocks of a track: columns of equal length, sorted by ``start``.

    A block is allocated at position ``start`` of its track and no longer at position ``end``.
    ``size`` is in bytes, ``category`` a `Category.code`. ``total`` counts all blocks of the track.
    ``stack`` is a node of a tree of frames, which most stacks share, from the outermost inwards:
    each node has one of ``parents`` and of ``frames`` (an index of ``names``); node 0 is the empty
    stack. ``plumbing``: whether a name belongs to native code or PyTorch itself. ``module`` and
    ``phase`` are indices of ``strings``.

    ``life`` has what is known of the uses of each block: indices of ``strings`` for the operators
    that made it and used it first, and for its last use in words; positions of its first and last
    use, -1 for none. ``spells`` are its needs: (position, index of `NEEDS`), and empty if the uses
    of memory were not traced.
    """

    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    size: array[int] = field(default_factory=lambda: array("q"))
    category: array[int] = field(default_factory=lambda: array("q"))
    stack: array[int] = field(default_factory=lambda: array("q"))
    module: array[int] = field(default_factory=lambda: array("q"))
    phase: array[int] = field(default_factory=lambda: array("q"))
    life: list[SingleLife] = field(default_factory=list)
    spells: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    total: int = 0
    parents: list[int] = field(default_factory=lambda: [-1])
    frames: list[int] = field(default_factory=lambda: [0])
    names: list[str] = field(default_factory=lambda: [""])
    plumbing: list[bool] = field(default_factory=lambda: [False])
    strings: list[str] = field(default_factory=lambda: [""])
    _nodes: dict[tuple[int, int], int] = field(default_factory=dict)
    _names: dict[Frame, int] = field(default_factory=dict)
    _strings: dict[str, int] = field(default_factory=lambda: {"": 0})

    def __len__(self) -> int:
        return len(self.start)

    def add(self, ledger: Ledger, codes: Sequence[int], first: int, lives: Lives | None) -> None:
        """Append the blocks of a trace. ``codes``: the category of each of its rows; ``first``: the
        position of the track before its first event; ``lives``: if uses were traced.
        """
        alive = [
            row
            for row in range(len(ledger))
            # A pending row of the baseline is active, not allocated.
            if ledger.freed[row] > ledger.start[row]
        ]
        self.total += len(alive)
        size = ledger.size
        if len(alive) > MOST_BLOCKS:
            alive = heapq.nlargest(MOST_BLOCKS, alive, key=size.__getitem__)
        alive.sort(key=ledger.start.__getitem__)
        known: dict[int, int] = {}
        texts = ledger.trace.stacks.strings
        modules, phases = ledger.values("module", alive), ledger.values("phase", alive)
        for row, module, phase in zip(alive, modules, phases, strict=True):
            stack = ledger.stack[row]
            if stack not in known:
                known[stack] = self._node(ledger.trace.stacks.frames_of(stack))
            self.start.append(first + ledger.start[row] + 1)
            self.end.append(first + ledger.freed[row] + 1)
            self.size.append(size[row])
            self.category.append(codes[row])
            self.stack.append(known[stack])
            self.module.append(self._string(texts[module]))
            self.phase.append(self._string(texts[phase]))
            self.life.append(_NO_LIFE if lives is None else self._life(lives.life(row), first))
            spells = () if lives is None else lives.spells(row)
            self.spells.append(tuple((first + at + 1, _NUMBER[need]) for at, need in spells))

    def _life(self, life: BlockLife, first: int) -> SingleLife:
        first_use, last = life.first, life.last
        words = "by a later step" if life.later_step else ""
        if last is not None:
            place = "" if last.line is None else str(last.line)
            used = use_in_words(last.operator, place, last.phase)
            words = f"by {used}; again {words}" if words else f"by {used}"
        return SingleLife(
            self._string(life.made_by),
            -1 if first_use is None else first + first_use.position,
            0 if first_use is None else self._string(first_use.operator),
            -1 if last is None else first + last.position,
            self._string(words),
        )

    def largest(self, most: int) -> None:
        """Keep the ``most`` largest blocks."""
        if len(self) <= most:
            return
        keep = sorted(heapq.nlargest(most, range(len(self)), key=self.size.__getitem__))
        for name in ("start", "end", "size", "category", "stack", "module", "phase"):
            column = getattr(self, name)
            setattr(self, name, array("q", map(column.__getitem__, keep)))
        self.life = [self.life[at] for at in keep]
        self.spells = [self.spells[at] for at in keep]

    def frames_of(self, node: int) -> list[str]:
        """The frames of a stack, innermost first."""
        found = []
        while node > 0:
            found.append(self.names[self.frames[node]])
            node = self.parents[node]
        return found

    def _node(self, frames: Sequence[Frame]) -> int:
        node = 0
        for frame in reversed(frames):
            name = self._names.get(frame)
            if name is None:
                name = self._names[frame] = len(self.names)
                self.names.append(short_name(frame))
                self.plumbing.append(is_plumbing(frame))
            found = self._nodes.get((node, name))
            if found is None:
                if len(self.parents) >= MOST_NODES:
                    return node
                found = self._nodes[node, name] = len(self.parents)
                self.parents.append(node)
                self.frames.append(name)
            node = found
        return node

    def _string(self, text: str) -> int:
        found = self._strings.get(text)
        if found is None:
            found = self._strings[text] = len(self.strings)
            self.strings.append(text)
        return found


@dataclass(slots=True)
class Track:
    """Curves of one rank and device: columns of equal length, bytes.

    ``at[i]`` is the position of a point, counted in events over all chunks; ``time_us[i]`` its
    time since the Unix epoch, 0 if unknown. ``bands``: allocated bytes by category; ``needs``: by
    need, empty if the uses of memory were not traced, and 0 in traces in which they were not.
    ``phases_from``: the source of ``phases``: ``"recorded"``, ``"stacks"`` (derived from stacks) or
    empty if there is none. ``problems``: traces that could not be read.
    """

    rank: int
    device: str
    at: array[int] = field(default_factory=lambda: array("q"))
    time_us: array[int] = field(default_factory=lambda: array("q"))
    allocated: array[int] = field(default_factory=lambda: array("q"))
    active: array[int] = field(default_factory=lambda: array("q"))
    reserved: array[int] | Unavailable = field(default_factory=lambda: array("q"))
    bands: dict[Category, array[int]] = field(default_factory=dict)
    needs: dict[Need, array[int]] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    phases: list[Span] = field(default_factory=list)
    phases_from: str = ""
    events: int = 0
    blocks: SingleBlocks = field(default_factory=SingleBlocks)
    problems: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.at)

    @property
    def complete(self) -> bool:
        """Whether each event has a point: nothing was thinned."""
        return len(self.at) == self.events + len(self.chunks)

    def add(self, ledger: Ledger, points: int) -> None:
        """Append a trace. Raises DataError if it is damaged."""
        line = thin(timeline(ledger), points)
        first = self.chunks[-1].first + self.chunks[-1].events + 1 if self.chunks else 0
        self.chunks.append(Chunk(ledger.trace.step, first, ledger.events))
        self.events += ledger.events
        before = len(self)
        self.at.extend(event + 1 + first for event in line.event)
        self.time_us.extend(line.time_us)
        self.allocated.extend(line.allocated)
        self.active.extend(line.active)
        if isinstance(line.reserved, Unavailable):
            self.reserved = line.reserved
        elif not isinstance(self.reserved, Unavailable):
            self.reserved.extend(line.reserved)
        codes = categories(ledger, range(len(ledger)))
        lives = Lives(ledger) if ledger.trace.events.operator else None
        if lives is not None and not lives.traced:
            lives = None
        self.blocks.add(ledger, codes, first, lives)
        if len(self.blocks) > 2 * MOST_BLOCKS:
            self.blocks.largest(MOST_BLOCKS)
        _extend(self.bands, bands(ledger, line.event, codes), before, len(line))
        positions = [event + 1 for event in line.event]
        needs = {} if lives is None else lives.bands(range(len(ledger)), positions)
        _extend(self.needs, needs, before, len(line))
        phases, source = spans(ledger)
        self.phases.extend(Span(s.first + first, s.end + first, s.name) for s in phases)
        self.phases_from = self.phases_from or source

    def thinned(self, points: int) -> None:
        """Keep at most ``points`` of the points, all extremes included."""
        if len(self) <= points:
            return
        whole = Timeline(
            self.device,
            range(len(self)),
            self.time_us,
            self.allocated,
            self.active,
            self.reserved,
        )
        keep = thin(whole, points).event
        for name in ("at", "time_us", "allocated", "active", "reserved"):
            column = getattr(self, name)
            if not isinstance(column, Unavailable):
                setattr(self, name, array("q", map(column.__getitem__, keep)))
        for category, column in self.bands.items():
            self.bands[category] = array("q", map(column.__getitem__, keep))
        for need, column in self.needs.items():
            self.needs[need] = array("q", map(column.__getitem__, keep))


def _extend(
    all_bands: dict[T, array[int]], more: dict[T, array[int]], before: int, points: int
) -> None:
    """Append the bands of ``points`` more points to those of ``before`` points, with 0 for what one
    side does not have.
    """
    for key in more.keys() - all_bands.keys():
        all_bands[key] = array("q", bytes(8 * before))
    nothing = array("q", bytes(8 * points))
    for key, column in all_bands.items():
        column.extend(more.get(key, nothing))


def tracks(recording: Recording, *, most: int = MOST_TRACKS) -> tuple[list[Track], list[str]]:
    """The tracks, and messages about what was left out. Reads all traces, one at a time."""
    found: dict[tuple[int, str], Track] = {}
    left_out: dict[tuple[int, str], None] = {}
    problems: list[str] = []
    for rank in recording.ranks:
        for ledger in _ledgers(rank, problems):
            key = (rank.session.rank, ledger.trace.device)
            track = found.get(key)
            if track is None:
                if len(found) >= most:
                    left_out[key] = None
                    continue
                track = found[key] = Track(*key)
            track.add(ledger, POINTS)
            if len(track) > 2 * POINTS:
                track.thinned(POINTS)
    total = sum(len(track) for track in found.values())
    for track in found.values():
        if total > POINTS:
            track.thinned(max(500, POINTS * len(track) // total))
        track.blocks.largest(MOST_BLOCKS // len(found))
        track.phases = _reduced(track.phases)
        if not all(chunk.events for chunk in track.chunks):
            track.chunks = [chunk for chunk in track.chunks if chunk.events] or track.chunks[:1]
    if left_out:
        names = ", ".join(f"rank {rank} {device}" for rank, device in list(left_out)[:8])
        more = f" and {len(left_out) - 8} more" if len(left_out) > 8 else ""
        problems.append(f"too many to draw: {names}{more}")
    return list(found.values()), problems


def _ledgers(rank: RankRecording, problems: list[str]) -> Iterator[Ledger]:
    """The traces of a rank in the order of its steps. Errors are appended to ``problems``."""
    if not rank.steps:
        for trace in rank.traces:
            yield ledger_of(trace)
        return
    for step in rank.steps:
        try:
            for trace in rank.traces.of(step):
                yield ledger_of(trace)
        except DataError as error:
            problems.append(f"rank {rank.session.rank}, step {step.index}: {error}")


def bands(
    ledger: Ledger, events: Sequence[int], codes: Sequence[int] | None = None
) -> dict[Category, array[int]]:
    """Allocated bytes by category just after each of ``events`` (rising; -1: before the first).

    At each of them the bands sum to the allocated bytes. ``codes``: the category of each row of the
    ledger, if already computed.
    """
    if codes is None:
        codes = categories(ledger, range(len(ledger)))
    # place[e + 1]: the index of the first of ``events`` that is not before event e.
    place = array("q", [0]) * (ledger.events + 2)
    count = len(events)
    low = -1
    for index, event in enumerate(events):
        place[low + 1 : event + 2] = array("q", [index]) * (event + 1 - low)
        low = event + 1
    place[low + 1 :] = array("q", [count]) * (ledger.events + 1 - low)
    deltas: dict[int, list[int]] = {code: [0] * (count + 1) for code in set(codes)}
    for code, start, freed, size in zip(
        codes, ledger.start, ledger.freed, ledger.size, strict=True
    ):
        delta = deltas[code]
        delta[place[start + 1]] += size
        delta[place[freed + 1]] -= size
    return {
        Category.from_code(code): array("q", list(accumulate(deltas[code]))[:count])
        for code in sorted(deltas)
    }


def spans(ledger: Ledger) -> tuple[list[Span], str]:
    """The phases of a trace, and their source (`Track.phases_from`).

    They are recorded with the events, or else derived from stacks: forward, backward, optimizer and
    data.
    """
    column = ledger.trace.events.phase
    if len(column) == ledger.events and any(column):
        strings = ledger.trace.stacks.strings
        starts = [0, *compress(range(1, ledger.events), map(ne, column, column[1:]))]
        ends = [*starts[1:], ledger.events]
        found = [
            Span(first + 1, end + 1, strings[column[first]])
            for first, end in zip(starts, ends, strict=True)
            if column[first]
        ]
        return found, "recorded"
    runs = Runs(ledger, Marks(ledger.trace.stacks))
    if not runs.known:
        return [], ""
    return [
        Span(first + 1, end + 1, kind) for first, end, kind in _stretches(ledger, runs)
    ], "stacks"


def _stretches(ledger: Ledger, runs: Runs) -> Iterator[tuple[int, int, str]]:
    """(first event, end, kind) of each stretch of work."""
    starts = ledger.start[: ledger.made]
    event = 0
    while event < ledger.events:
        run = runs.at(event)
        if run + 1 >= len(runs):
            end = ledger.events
        else:
            # The next stretch begins with its first allocation.
            end = starts[bisect_left(starts, run + 1, key=runs.at)]
        if run >= 0:
            yield event, end, runs.kind(run)
        event = end


def _reduced(phases: list[Span]) -> list[Span]:
    """Reduce phases to at most `MOST_SPANS`: join nested ones, then keep the longest."""
    if len(phases) <= MOST_SPANS:
        return phases
    joined: list[Span] = []
    for span in phases:
        name = span.name.partition("/")[0]
        last = joined[-1] if joined else None
        if last is not None and last.name == name and last.end == span.first:
            joined[-1] = Span(last.first, span.end, name)
        else:
            joined.append(Span(span.first, span.end, name))
    if len(joined) > MOST_SPANS:
        joined.sort(key=lambda span: span.first - span.end)
        joined = sorted(joined[:MOST_SPANS], key=lambda span: span.first)
    return joined
