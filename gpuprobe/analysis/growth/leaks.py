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
from dataclasses import dataclass
from typing import NamedTuple

from gpuprobe.analysis.trace.evidence import Marks, Runs, optimizer_steps
from gpuprobe.analysis.trace.frames import Lines, UserFrame, is_user_frame
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.model.place import SourceLine
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import ReadStatus, Unavailable

__all__ = ["Leaks", "Survivor", "leaks", "leaks_over_steps", "step_boundaries"]


@dataclass(frozen=True, slots=True)
class Survivor:
    """A line whose blocks outlived steps. ``steps[i]`` left ``bytes_by_step[i]`` behind.

    ``per_step`` is the bytes left behind per step, over all steps that could be judged (those
    with enough boundaries after them), rounded down. A line that made something once has a
    second row for it, which is not leaking; the step of it is then not judged for the first.
    """

    line: SourceLine
    bytes: int
    blocks: int
    steps: tuple[int, ...]
    bytes_by_step: tuple[int, ...]
    per_step: int
    leaking: bool


@dataclass(frozen=True, slots=True)
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
    runs = Runs(ledger, Marks(ledger.trace.stacks))
    if not ends:
        source = "stacks inside an optimizer's step"
        ends = runs.ends_of("optimizer")
    if not ends:
        return Unavailable(
            "nothing in this trace says where a step ends: no Optimizer.step annotation and "
            "no stack inside an optimizer",
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
    judged = _Tally(range(last + 1), survive)
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
            judged.add(lines.place(ledger.stack[row]), step, gone, ledger.size[row])
    return judged.result(ledger.trace.device, source)


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
    them, or before the first trace, has no birth step and is left out. Over such a gap an
    allocator gives the same addresses out again, so a block is taken for the same only where no
    block of its line and size was ever seen to go.
    """
    alive: dict[int, tuple[int, SourceLine, int]] = {}  # address -> (step of birth, line, size)
    ended: list[tuple[int, int, SourceLine, int]] = []  # born, gone, line, size
    recycled: set[tuple[SourceLine, int]] = (
        set()
    )  # (line, size) of blocks that went after their trace
    device = ""
    numbers: list[int] = []
    for position, trace in enumerate(traces):
        number = position if trace.step is None else trace.step
        if numbers and trace.step is None and number <= numbers[-1]:
            number = numbers[-1] + 1
        is_next = not numbers or number <= numbers[-1] + 1
        if not numbers or number > numbers[-1]:
            numbers.append(number)
        number = numbers[-1]
        device = trace.device
        ledger = ledger_of(trace)
        lines = Lines(trace.stacks, is_user)
        addresses = ledger.values("address", range(len(ledger)))
        # Half of a step may have no trace, so that the number alone does not tell.
        is_next = is_next and alive.keys() <= set(addresses[ledger.made :])
        if not is_next:
            stack, freed = ledger.stack, ledger.freed
            recycled |= {
                (lines.place(stack[row]), ledger.size[row])
                for row in range(ledger.made, len(ledger))
                if freed[row] < ledger.events and stack[row]
            }
        following: dict[int, tuple[int, SourceLine, int]] = {}
        carried = set()
        for row, address in enumerate(addresses):
            is_made = row < ledger.made
            line = lines.place(ledger.stack[row])
            born = (number, line, ledger.size[row])
            is_alive = ledger.freed[row] >= ledger.events
            if not is_made:
                # Another size or line: another block got the address while nobody looked.
                known = alive.get(address)
                if known is None or known[2] != born[2] or (ledger.stack[row] and known[1] != line):
                    continue
                if not is_next and known[1:] in recycled:
                    continue
                carried.add(address)
                born = known
            if is_alive:
                following[address] = born
            elif not is_made:
                recycled.add(born[1:])
                ended.append((born[0], number, born[1], born[2]))
        # Gone without a free that was seen: between the traces.
        for address, born in alive.items():
            if address not in carried:
                recycled.add(born[1:])
                ended.append((born[0], number, born[1], born[2]))
        alive = following
    if not numbers:
        return Unavailable("no step of this recording has a trace", ReadStatus.NOT_COLLECTED)
    judged = _Tally(numbers, survive)
    for born_in, line, size in alive.values():
        judged.add(line, born_in, numbers[-1] + 1, size)
    for born_in, gone, line, size in ended:
        judged.add(line, born_in, gone, size)
    return judged.result(device, "the recording's steps")


class _Block(NamedTuple):
    """A block that was left behind: its step of birth, and its bytes."""

    born: int
    size: int


class _Tally:
    """Blocks by line and step of birth, and the verdict on each line.

    ``steps`` are the numbers of the steps looked at, rising. Boundary *i* lies after step *i*.
    A block that is ``gone`` in step g outlived the boundaries from its birth to g - 1; one that
    is alive at the end is gone in the step after the last.
    """

    def __init__(self, steps: Sequence[int], survive: int) -> None:
        self._steps = steps
        self._last = steps[-1]
        self._survive = max(1, survive)
        self._left: dict[SourceLine, list[_Block]] = defaultdict(list)
        self._spans: dict[SourceLine, list[tuple[int, int, int]]] = defaultdict(list)

    def add(self, line: SourceLine, born: int, gone: int, size: int) -> None:
        if min(gone, self._last) - born < self._survive:
            return
        self._spans[line].append((born, gone, size))
        if gone > self._last:
            self._left[line].append(_Block(born, size))

    def result(self, device: str, source: str) -> Leaks | Unavailable:
        # Steps that enough boundaries follow.
        judged = [step for step in self._steps if self._last - step >= self._survive]
        if len(judged) < 2:
            return Unavailable(
                f"{len(self._steps)} traced steps are too few: growth shows from two that "
                f"{self._survive} boundaries follow",
                ReadStatus.NOT_COLLECTED,
            )
        found = []
        for line, blocks in self._left.items():
            once = _made_once(blocks)
            apart = set(once)
            if once:
                found.append(self._survivor(line, once, (), judged))
                blocks = [block for block in blocks if block not in apart]
            found.append(self._survivor(line, blocks, once, judged))
        found.sort(key=lambda item: (not item.leaking, -item.bytes, str(item.line)))
        return Leaks(device, source, len(self._steps), self._survive, tuple(found))

    def _survivor(
        self,
        line: SourceLine,
        blocks: Sequence[_Block],
        once: Sequence[_Block],
        judged: Sequence[int],
    ) -> Survivor:
        """The row of ``blocks``, next to what the line made ``once`` (in one step)."""
        left: Counter[int] = Counter()
        for block in blocks:
            left[block.born] += block.size
        born = sorted(left)
        over = len(judged)
        if once and once[0].born not in left:
            over = sum(step > once[0].born for step in judged)
        total = left.total()
        return Survivor(
            line=line,
            bytes=total,
            blocks=len(blocks),
            steps=tuple(born),
            bytes_by_step=tuple(left[step] for step in born),
            per_step=total // over,
            leaking=self._is_leaking(line, born, once, judged),
        )

    def _is_leaking(
        self, line: SourceLine, born: Sequence[int], once: Sequence[_Block], judged: Sequence[int]
    ) -> bool:
        """Left behind in two steps or more, the later half among them, and still growing."""
        late = len(judged) // 2
        if len(born) < 2 or born[-1] < judged[late]:
            return False

        def held(boundary: int) -> int:
            apart = sum(block.size for block in once if block.born <= boundary)
            return sum(s for b, gone, s in self._spans[line] if b <= boundary < gone) - apart

        return held(judged[-1]) > held(judged[late - 1])


def _made_once(blocks: Sequence[_Block]) -> list[_Block]:
    """What the first of a line's steps left behind and no later one did, by size; only where it
    is more than any later step left in all, or what those left are the same sizes over and over:
    blocks of ever new sizes may leak too.
    """
    first = min(block.born for block in blocks)
    later: Counter[int] = Counter()
    steps: dict[int, set[int]] = defaultdict(set)  # by size
    for block in blocks:
        steps[block.size].add(block.born)
        if block.born > first:
            later[block.born] += block.size
    once = [b for b in blocks if b.born == first and len(steps[b.size]) == 1]
    if not later:
        return []
    is_regular = all(len(born) > 1 for born in steps.values() if max(born) > first)
    return once if is_regular or sum(b.size for b in once) > max(later.values()) else []
