"""Memory that outlives training steps, by line, with the steps that left it behind.

No slope is fitted. A block counts when it was made in a step, is still alive at the end, and
at least ``survive`` step boundaries passed over it. A line *leaks* when it left such blocks in
several different steps, late ones among them, and holds more at the end than half way. A cache
that fills during warm-up and then stops, or that gives back as much as it takes, does not.
What a line makes once, such as a library's workspace in its first step, is set apart from what
it leaves behind again and again.

Conservation: the bytes of all lines (leaking or not) sum to the bytes of all such blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpuprobe.analysis.trace.categories import evidence_of, optimizer_steps
from gpuprobe.analysis.trace.frames import Lines, UserFrame, is_user_frame
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.model.place import SourceLine
from gpuprobe.model.record import record
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import ReadStatus, Unavailable


@record(frozen=True, slots=True)
class Survivor:
    """A line whose blocks outlived steps. ``steps[i]`` left ``bytes_by_step[i]`` behind.

    ``per_step`` is the bytes left behind per step, over all steps that could be counted (those
    with enough boundaries after them), rounded down. A line that made something once has a
    second row for it, which is not leaking; the step of it is then not counted for the first.
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
    """``lines`` are all survivors, most bytes first; `leaking` those that keep growing."""

    device: str
    source: str  # what the step boundaries were taken from
    steps: int  # steps looked at
    survive: int  # boundaries a block had to outlive
    lines: tuple[Survivor, ...]

    @property
    def leaking(self) -> tuple[Survivor, ...]:
        return tuple(line for line in self.lines if line.leaking)


def step_boundaries(trace: MemoryTrace | Ledger) -> tuple[tuple[int, ...], str] | Unavailable:
    """The events before which a new step begins, and what says so.

    Torch's annotations of ``Optimizer.step`` first; where there are none, stacks inside an
    optimizer. Steps of several optimizers with no other allocation between them are one.
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
    is_user: UserFrame = is_user_frame,
) -> Leaks | Unavailable:
    """Survivors of one trace that covers several steps.

    ``boundaries`` are the events before which a new step begins; found by `step_boundaries`
    where not given. `Unavailable` where there are too few of them to tell growth from a
    one-time allocation.
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
    lines = Lines(ledger.trace.stacks, is_user)
    tally = _Tally(range(last + 1), survive)
    freed = ledger.freed
    edges = [bisect_left(ledger.start, boundary, 0, ledger.made) for boundary in boundaries]
    # Step by step: rows are in order of their start, so each step's are next to each other.
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
    is_user: UserFrame = is_user_frame,
) -> Leaks | Unavailable:
    """Survivors over a recording: one trace per step of one device, in order of steps.

    Blocks are followed from trace to trace by address, size and line. A step that several
    optimizers divide has several traces, and is one step. Steps without a trace may lie between
    (the sampler keeps the first steps and those that set a new peak): what was made in one of
    them, or before the first trace, belongs to no step and is left out. Over such a gap an
    allocator gives the same addresses out again, so a block is taken for the same only where no
    block of its line and size was ever seen to go.
    """
    follower = _Follower(is_user)
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
    """A block as it is known from trace to trace: the step that made it, its line and bytes."""

    made: int
    line: SourceLine
    size: int


class _Follower:
    """The blocks of one trace after another. ``alive``: by address; ``ended``: with the step in
    which they went; ``numbers``: of the steps.
    """

    def __init__(self, is_user: UserFrame) -> None:
        self._is_user = is_user
        # Line and size of what went after its trace.
        self._recycled: set[tuple[SourceLine, int]] = set()
        self.alive: dict[int, _Owner] = {}
        self.ended: list[tuple[_Owner, int]] = []
        self.numbers: list[int] = []
        self.device = ""
        self._traces = 0

    def add(self, trace: MemoryTrace) -> None:
        is_next = self._count(trace)
        ledger = ledger_of(trace)
        lines = Lines(trace.stacks, self._is_user)
        addresses = ledger.values("address", range(len(ledger)))
        # Half of a step may have no trace, so that the number alone does not tell.
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
            if address not in carried:  # it went without a free that was seen: between the traces
                self._gone(owner)

    def _count(self, trace: MemoryTrace) -> bool:
        """Find the number of the trace's step. Whether it follows the last one."""
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
        """After a gap: what this trace frees of an earlier one may have been made in the gap."""
        self._recycled |= {
            (lines.place(ledger.stack[row]), ledger.size[row])
            for row in range(ledger.made, len(ledger))
            if ledger.freed[row] < ledger.events and ledger.stack[row]
        }

    def _same(
        self, known: _Owner | None, found: _Owner, stack: int, *, is_next: bool
    ) -> _Owner | None:
        """The block that was known at an address, where it is still the one that is there."""
        # Another size or line: another block got the address between the traces.
        if known is None or known.size != found.size or (stack and known.line != found.line):
            return None
        return known if is_next or known[1:] not in self._recycled else None

    def _gone(self, owner: _Owner) -> None:
        self._recycled.add(owner[1:])
        self.ended.append((owner, self.numbers[-1]))


class _Survived(NamedTuple):
    """A block that was left behind: the step that made it, and its bytes."""

    made: int
    size: int


class _Tally:
    """Blocks by line and by the step that made them, and the result for each line.

    ``steps`` are the numbers of the steps looked at, rising. Boundary *i* lies after step *i*.
    A block that is ``gone`` in step g outlived the boundaries from that step to g - 1; one that
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
        # Steps that enough boundaries follow.
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
        """The row of ``blocks``, next to what the line made ``once`` (in one step)."""
        left: Counter[int] = Counter()
        for block in blocks:
            left[block.made] += block.size
        made = sorted(left)
        over = len(counted)
        if once and once[0].made not in left:
            over = sum(step > once[0].made for step in counted)
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
        """Left behind in two steps or more, the later half among them, and still growing."""
        late = len(counted) // 2
        if len(made) < 2 or made[-1] < counted[late]:
            return False

        def held(boundary: int) -> int:
            apart = sum(block.size for block in once if block.made <= boundary)
            return sum(s for b, gone, s in self._spans[line] if b <= boundary < gone) - apart

        return held(counted[-1]) > held(counted[late - 1])


def _made_once(blocks: Sequence[_Survived]) -> list[_Survived]:
    """What the first of a line's steps left behind and no later one did, by size; only where it
    is more than any later step left in all, or what those left are the same sizes over and over:
    blocks of ever new sizes may leak too.
    """
    first = min(block.made for block in blocks)
    later: Counter[int] = Counter()
    steps: dict[int, set[int]] = defaultdict(set)  # by size
    for block in blocks:
        steps[block.size].add(block.made)
        if block.made > first:
            later[block.made] += block.size
    once = [b for b in blocks if b.made == first and len(steps[b.size]) == 1]
    if not later:
        return []
    is_regular = all(len(made) > 1 for made in steps.values() if max(made) > first)
    return once if is_regular or sum(b.size for b in once) > max(later.values()) else []
