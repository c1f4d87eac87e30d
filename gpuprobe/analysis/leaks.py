"""Memory that outlives training steps, by line, with the steps that left it behind.

No slope is fitted. A block counts if it was allocated in a step, is still alive at the end, and has
outlived at least ``survive`` step boundaries. A line *leaks* if it left such blocks in several
steps, including late ones, and holds more at the end than half way. A cache that fills during
warm-up and then stops, or that frees as much as it allocates, does not leak. Memory that a line
allocates once, such as a library's workspace in its first step, is separate from what it leaves
behind repeatedly.

Conservation: the bytes of all lines (leaking or not) sum to the bytes of all such blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpuprobe.analysis.trace.categories import evidence_of, optimizer_steps
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.model.place import SourceLine
from gpuprobe.model.record import record
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.user_frames import Lines


@record(frozen=True, slots=True)
class Survivor:
    """A line whose blocks outlived steps. ``steps[i]`` left ``bytes_by_step[i]`` behind.

    ``per_step`` is the bytes left behind per step, over all steps with enough boundaries after
    them, rounded down. Memory that a line allocated once has a second row, which does not leak; its
    steps do not count for the other row if that has no part of them.
    """

    line: SourceLine
    bytes: int
    blocks: int
    steps: tuple[int, ...]
    bytes_by_step: tuple[int, ...]
    per_step: int
    leaking: bool


@record(frozen=True, slots=True)
class Leaks:
    """The survivors of one device. ``lines``: all of them, the most bytes first; `leaking`: those
    that keep growing.
    """

    device: str
    source: str  # of the step boundaries
    steps: int  # steps that were compared
    survive: int  # boundaries that a block has to outlive
    lines: tuple[Survivor, ...]

    @property
    def leaking(self) -> tuple[Survivor, ...]:
        return tuple(line for line in self.lines if line.leaking)


def step_boundaries(trace: MemoryTrace | Ledger) -> tuple[tuple[int, ...], str] | Unavailable:
    """The events before which a new step begins, and their source.

    The source is torch's annotations of ``Optimizer.step`` or, without any, stacks inside an
    optimizer. Steps of several optimizers without another allocation between them are one.
    """
    ledger = ledger_of(trace)
    ends = [end for _, end in optimizer_steps(ledger.trace)]
    source = "torch's annotations of Optimizer.step"
    runs = evidence_of(ledger).runs
    if not ends:
        source = "stacks inside an optimizer's step"
        ends = runs.ends_of("optimizer")
    if not ends:
        return Unavailable(
            "step boundaries are unknown: the trace has no Optimizer.step annotation and no "
            "stack inside an optimizer",
            ReadStatus.NOT_COLLECTED,
        )
    made = ledger.start[: ledger.made]
    merged: list[int] = []
    for end in ends:
        if merged and runs.only("optimizer", merged[-1], end, made):
            merged[-1] = end
        else:
            merged.append(end)
    return tuple(merged), source


def leaks(
    trace: MemoryTrace | Ledger,
    boundaries: Sequence[int] | None = None,
    *,
    survive: int = 2,
) -> Leaks | Unavailable:
    """The survivors of one trace that covers several steps.

    ``boundaries`` are the events before which a new step begins, by default those of
    `step_boundaries`. `Unavailable` if there are too few to distinguish growth from a one-time
    allocation.
    """
    ledger = ledger_of(trace)
    source = "given boundaries"
    if boundaries is None:
        found = step_boundaries(ledger)
        if isinstance(found, Unavailable):
            return found
        boundaries, source = found
    boundaries = sorted(boundaries)
    last = len(boundaries)
    lines = Lines(ledger.trace.stacks)
    tally = _Tally(range(last + 1), survive)
    freed = ledger.freed
    edges = [bisect_left(ledger.start, boundary, 0, ledger.made) for boundary in boundaries]
    # Rows are in the order of their start, so those of a step are contiguous.
    for step, (low, high) in enumerate(zip([0, *edges], edges, strict=False)):
        if last - step < survive:
            break
        outlives = boundaries[step + survive - 1]
        for row in [r for r, end in enumerate(freed[low:high], low) if end >= outlives]:
            alive = freed[row] >= ledger.events
            gone = last + 1 if alive else bisect_right(boundaries, freed[row])
            tally.add(lines.place(ledger.stack[row]), step, gone, ledger.size[row])
    return tally.result(ledger.trace.device, source)


def leaks_over_steps(
    traces: Iterable[MemoryTrace],
    *,
    survive: int = 2,
) -> Leaks | Unavailable:
    """The survivors of a recording: one trace per step of one device, in the order of steps.

    Blocks are followed from trace to trace by address, size and line. A step that several
    optimizers split has several traces. Steps in between may have no trace (the sampler keeps the
    first steps and those with a new peak): blocks allocated in one of them, or before the first
    trace, have no step and are left out. During such a gap the allocator may reuse addresses, so a
    block counts as the same only if no block of its line and size was ever freed.
    """
    follower = _Follower()
    for trace in traces:
        follower.add(trace)
    if not follower.numbers:
        return Unavailable("no step of this recording has a trace", ReadStatus.NOT_COLLECTED)
    last = follower.numbers[-1]
    tally = _Tally(follower.numbers, survive)
    for owner in follower.alive.values():
        tally.add(owner.line, owner.made, last + 1, owner.size)
    for owner, gone in follower.ended:
        tally.add(owner.line, owner.made, gone, owner.size)
    return tally.result(follower.device, "the recording's steps")


class _Owner(NamedTuple):
    """A block that is followed from trace to trace: its step, line and bytes."""

    made: int
    line: SourceLine
    size: int


class _Follower:
    """Follows blocks from trace to trace. ``alive``: by address; ``ended``: freed blocks with the
    step that freed them; ``numbers``: of the steps.
    """

    def __init__(self) -> None:
        # Line and size of blocks that were freed after their own trace.
        self._recycled: set[tuple[SourceLine, int]] = set()
        self.alive: dict[int, _Owner] = {}
        self.ended: list[tuple[_Owner, int]] = []
        self.numbers: list[int] = []
        self.device = ""
        self._traces = 0

    def add(self, trace: MemoryTrace) -> None:
        is_next = self._count(trace)
        ledger = ledger_of(trace)
        lines = Lines(trace.stacks)
        addresses = ledger.values("address", range(len(ledger)))
        # Part of a step may have no trace, so the number alone is not enough.
        is_next = is_next and self.alive.keys() <= set(addresses[ledger.made :])
        if not is_next:
            self._recycle_unknown(ledger, lines)
        before, self.alive = self.alive, {}
        carried = set()
        for row, address in enumerate(addresses):
            is_made = row < ledger.made
            stack = ledger.stack[row]
            owner = _Owner(self.numbers[-1], lines.place(stack), ledger.size[row])
            if not is_made:
                known = self._same(before.get(address), owner, stack, is_next=is_next)
                if known is None:
                    continue
                carried.add(address)
                owner = known
            if ledger.freed[row] >= ledger.events:
                self.alive[address] = owner
            elif not is_made:
                self._gone(owner)
        for address, owner in before.items():
            if address not in carried:  # freed between the traces
                self._gone(owner)

    def _count(self, trace: MemoryTrace) -> bool:
        """Add the number of the trace's step. Returns whether it directly follows the last one."""
        numbers = self.numbers
        number = self._traces if trace.step is None else trace.step
        if numbers and trace.step is None:
            number = max(number, numbers[-1] + 1)
        self._traces += 1
        is_next = not numbers or number <= numbers[-1] + 1
        if not numbers or number > numbers[-1]:
            numbers.append(number)
        self.device = trace.device
        return is_next

    def _recycle_unknown(self, ledger: Ledger, lines: Lines) -> None:
        """After a gap: blocks of earlier traces that this one frees may be from the gap."""
        self._recycled |= {
            (lines.place(ledger.stack[row]), ledger.size[row])
            for row in range(ledger.made, len(ledger))
            if ledger.freed[row] < ledger.events and ledger.stack[row]
        }

    def _same(
        self, known: _Owner | None, found: _Owner, stack: int, *, is_next: bool
    ) -> _Owner | None:
        """The block known at an address, if it is still the same; else None."""
        # Another size or line: another block has the address since.
        if known is None or known.size != found.size or (stack and known.line != found.line):
            return None
        return known if is_next or known[1:] not in self._recycled else None

    def _gone(self, owner: _Owner) -> None:
        self._recycled.add(owner[1:])
        self.ended.append((owner, self.numbers[-1]))


class _Survived(NamedTuple):
    """A block that was left behind: the step that allocated it, and its bytes."""

    made: int
    size: int


class _Tally:
    """Sums up blocks by line and step, and classifies each line.

    ``steps`` are the numbers of the compared steps, rising. Boundary *i* is after step *i*. A block
    that is freed (``gone``) in step g outlived the boundaries from its own step to g - 1; one that
    is alive at the end is gone in the step after the last.
    """

    def __init__(self, steps: Sequence[int], survive: int) -> None:
        self._steps = steps
        self._last = steps[-1]
        self._survive = max(1, survive)
        self._left: dict[SourceLine, list[_Survived]] = defaultdict(list)
        self._spans: dict[SourceLine, list[tuple[int, int, int]]] = defaultdict(list)

    def add(self, line: SourceLine, made: int, gone: int, size: int) -> None:
        if min(gone, self._last) - made < self._survive:
            return
        self._spans[line].append((made, gone, size))
        if gone > self._last:
            self._left[line].append(_Survived(made, size))

    def result(self, device: str, source: str) -> Leaks | Unavailable:
        # Steps with enough boundaries after them.
        counted = [step for step in self._steps if self._last - step >= self._survive]
        if len(counted) < 2:
            return Unavailable(
                f"not enough traced steps to detect growth: {len(self._steps)}; trace at least "
                f"{self._survive + 2}",
                ReadStatus.NOT_COLLECTED,
            )
        found = []
        for line, blocks in self._left.items():
            once = _made_once(blocks)
            apart = set(once)
            if once:
                found.append(self._survivor(line, once, (), counted))
                blocks = [block for block in blocks if block not in apart]
            found.append(self._survivor(line, blocks, once, counted))
        found.sort(key=lambda item: (not item.leaking, -item.bytes, str(item.line)))
        return Leaks(device, source, len(self._steps), self._survive, tuple(found))

    def _survivor(
        self,
        line: SourceLine,
        blocks: Sequence[_Survived],
        once: Sequence[_Survived],
        counted: Sequence[int],
    ) -> Survivor:
        """The row of ``blocks``, without those that the line allocated ``once``."""
        left: Counter[int] = Counter()
        for block in blocks:
            left[block.made] += block.size
        made = sorted(left)
        over = len(counted)
        apart = max((block.made for block in once), default=-1)
        if made and made[0] > apart >= 0:
            over = sum(step > apart for step in counted)
        total = left.total()
        return Survivor(
            line=line,
            bytes=total,
            blocks=len(blocks),
            steps=tuple(made),
            bytes_by_step=tuple(left[step] for step in made),
            per_step=total // over,
            leaking=self._is_leaking(line, made, once, counted),
        )

    def _is_leaking(
        self,
        line: SourceLine,
        made: Sequence[int],
        once: Sequence[_Survived],
        counted: Sequence[int],
    ) -> bool:
        """Whether blocks were left behind in at least two steps, one of them in the later half, and
        the line still grows.
        """
        late = len(counted) // 2
        if len(made) < 2 or made[-1] < counted[late]:
            return False

        def held(boundary: int) -> int:
            apart = sum(block.size for block in once if block.made <= boundary)
            return sum(s for b, gone, s in self._spans[line] if b <= boundary < gone) - apart

        return held(counted[-1]) > held(counted[late - 1])


_WARM_UP = 2
"""A line's first steps in which it may allocate what stays: a library its workspace, DDP the
buckets that it replaces after the first backward pass."""


def _made_once(blocks: Sequence[_Survived]) -> list[_Survived]:
    """The blocks that only one of a line's first steps left behind, by size. None if a later step
    left as much, unless later blocks repeat the same sizes: blocks of ever new sizes may leak too.
    """
    warm = min(block.made for block in blocks) + _WARM_UP
    later: Counter[int] = Counter()
    steps: dict[int, set[int]] = defaultdict(set)  # by size
    for block in blocks:
        steps[block.size].add(block.made)
        if block.made >= warm:
            later[block.made] += block.size
    if not later:
        return []
    once = [b for b in blocks if b.made < warm and len(steps[b.size]) == 1]
    if all(len(made) > 1 for made in steps.values() if max(made) >= warm):
        return once
    left: Counter[int] = Counter()
    for block in once:
        left[block.made] += block.size
    return [block for block in once if left[block.made] > max(later.values())]
