"""The memory at a peak that is not needed, in groups with one holder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuprobe.analysis.peak.needs import Biographies
from gpuprobe.analysis.trace.categories import categories
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.run.holders import Holder, HolderRoot, Kept
from gpuprobe.model.trace import Frame, StackTable
from gpuprobe.user_frames import Lines, is_user_frame

LEAST = 0.125
"""The share of the tensors at the peak from which memory is worth a cause. In programs that need
all their memory, a tenth can be variables of the iteration before."""

LEAST_EFFECT = 0.05
"""The share of the tensors at the peak that a remedy has to save: other memory may be as high a
moment later. Memory to which no name leads, only objects in a cycle, is worth a cause from that on:
no program needs it. So are copies (`copied`)."""

LEAST_BYTES = 1 << 20
"""The bytes that a remedy has to save, in addition to `LEAST_EFFECT`: half a segment of small
blocks (``kSmallBuffer`` in c10/core/AllocatorConfig.h is 2 MiB), below which the memory that is
reserved is likely to stay the same."""

OF_A_MODEL = frozenset((Category.PARAMETER, Category.BUFFER))

_COPIED = 8
"""How many tensors of one line are more than variables of the iteration before."""


_OF_EVALUATIONS = (None, Kept.SAVED)
"""The key of what graphs of forward passes in eval mode keep."""

_NAMED = (HolderRoot.LOCAL, HolderRoot.GLOBAL, HolderRoot.CLASS)
_CONTAINERS = {"dict", "list", "tuple", "set", "deque", "cell"}


class ProgramStacks:
    """The lines of the program on stacks: what a library does between them may vary from call to
    call.
    """

    def __init__(self, table: StackTable) -> None:
        self._table = table
        self._known: dict[int, tuple[object, ...]] = {}

    def lines(self, stack: int) -> tuple[object, ...]:
        """The lines, innermost first; the stack itself if there is none."""
        found = self._known.get(stack)
        if found is None:
            frames = filter(is_user_frame, self._table.frames_of(stack))
            found = tuple((one.filename, one.line) for one in frames) or (stack,)
            self._known[stack] = found
        return found


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block at the peak: its row in the ledger, size in bytes, and life."""

    row: int
    bytes: int
    need: Need
    category: Category
    made_at: Place | NoPlace
    frames: tuple[Frame, ...]
    """Those that made it, innermost first."""
    last_use: Place | NoPlace | None
    by: str
    phase: str
    earlier: bool
    """Whether it was alive when the step began."""
    made_by: str
    """The operator that made it; empty if unknown."""
    uses: tuple[int, int]
    """The numbers of the first operator that used its values and of the last one, in the trace; 0
    if none did."""
    freed_in_backward: bool = False
    """Whether a backward pass frees it."""

    @property
    def file_names(self) -> list[str]:
        """The files of the frames."""
        return [frame.filename for frame in self.frames]


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """Blocks that one thing of the program holds; ``holder`` is that of the largest of those that
    the same part of it holds, the part with the most bytes."""

    blocks: tuple[HeldBlock, ...]
    holder: Holder | None
    tensors: int
    chosen: HeldBlock | None = None
    """The block whose line is named, if that is not one of the line that made the most."""
    several: bool = False
    """Whether several variables hold parts, and not the holder alone."""
    of_evaluations: bool = False
    """Whether it is all that graphs of forward passes in eval mode keep."""

    @property
    def bytes(self) -> int:
        return sum(block.bytes for block in self.blocks)

    def outside(self, rows: Collection[int]) -> int:
        """The bytes of the blocks that are not among some rows."""
        return sum(block.bytes for block in self.blocks if block.row not in rows)

    @property
    def share(self) -> float:
        """Of the memory of all tensors at the peak: libraries' workspaces are not the program's."""
        return self.bytes / self.tensors if self.tensors else 0.0

    @property
    def main(self) -> HeldBlock:
        """A block of the line that made the most, or the chosen one."""
        if self.chosen is not None:
            return self.chosen
        by_line: Counter[Place | NoPlace] = Counter()
        for block in self.blocks:
            by_line[block.made_at] += block.bytes
        line = by_line.most_common(1)[0][0]
        return max((b for b in self.blocks if b.made_at == line), key=lambda block: block.bytes)

    def mostly_made_by(self, names: Collection[str]) -> bool:
        """Whether these operators made most of the bytes."""
        return 2 * sum(b.bytes for b in self.blocks if b.made_by in names) > self.bytes

    def mostly(self, *found: Category) -> bool:
        """Whether most of it has one of these categories."""
        return 2 * sum(b.bytes for b in self.blocks if b.category in found) > self.bytes

    @property
    def never_used(self) -> bool:
        """Whether most of it is never used at all."""
        return 2 * sum(b.bytes for b in self.blocks if b.need is Need.NEVER) > self.bytes


def is_evaluation(phase: str) -> bool:
    """Whether a phase is one of forward passes in eval mode."""
    return phase.partition("/")[0] == "evaluation"


def blocks_at(lives: Biographies, event: int, *, failed: bool = False) -> list[HeldBlock]:
    """The blocks just after an event that are not needed then: never (again), or not yet.
    ``failed``: and those of which nothing is known, because the program failed.
    """
    needs = dict(lives.needs(event))
    unclear = {Need.NOT_YET, *([Need.OPEN] if failed else [])}
    needs.update(dict.fromkeys(_unread_gradients(lives, list(needs)), Need.NEVER))
    for row in _averages(lives, [row for row, need in needs.items() if need is Need.NOT_YET]):
        del needs[row]
    blocks = held_blocks(
        lives, {row: need for row, need in needs.items() if need.needless or need in unclear}
    )
    # DistributedDataParallel's reducer, in C++, keeps them for the next step.
    return [block for block in blocks if block.category is not Category.GRADIENT_BUCKET]


def held_blocks(lives: Biographies, needs: Mapping[int, Need]) -> list[HeldBlock]:
    """The blocks of some rows, with their states."""
    ledger, rows = lives.ledger, list(needs)
    stacks = ledger.trace.stacks
    lines, strings = Lines(stacks), stacks.strings
    names = ("last_stack", "last_name", "last_phase", "made_name")
    columns = [ledger.values(name, rows) for name in names]
    codes = categories(ledger, rows)
    return [
        HeldBlock(
            row=row,
            bytes=ledger.size[row],
            need=needs[row],
            category=Category.from_code(code),
            made_at=lines.place(ledger.stack[row], before=row >= ledger.made),
            frames=stacks.frames_of(ledger.stack[row]),
            last_use=lines.place(stack) if stack else None,
            by=strings[name],
            phase=strings[phase],
            earlier=row >= ledger.made,
            made_by=strings[made],
            uses=(lives.first[row], lives.last[row]),
            freed_in_backward=lives.freed_in_backward(row),
        )
        for row, code, stack, name, phase, made in zip(rows, codes, *columns, strict=True)
    ]


def _unread_gradients(lives: Biographies, rows: list[int]) -> Iterator[int]:
    """The gradients among these rows that only backward passes use, which add to them, in a trace
    in which an optimizer uses others.
    """
    ledger = lives.ledger
    strings = ledger.trace.stacks.strings
    everything = range(len(ledger))
    phases = [
        strings[phase].partition("/")[0]
        for phase in ledger.values("last_phase", everything if ledger.trace.events.operator else ())
    ]
    gradients = [
        row
        for row, code in zip(rows, categories(ledger, rows), strict=True)
        if code == Category.GRADIENT.code
    ]
    if not any(phases[row] == "optimizer" for row in gradients):
        return
    for row in gradients:
        if phases[row] in ("backward", "") and lives.survives(row):
            yield row


def _averages(lives: Biographies, rows: list[int]) -> Iterator[int]:
    """Copies of weights that were made before the first step of an optimizer, which does not use
    them, as an average of the weights is updated after each step: clones, and parameters in the
    sizes of those that are used.
    """
    ledger = lives.ledger
    rows = [row for row in rows if row < ledger.made and not lives.used_here(row)]
    if not rows or not lives.trains:
        return
    strings = ledger.trace.stacks.strings
    codes = categories(ledger, range(len(ledger)))
    models = {row for row, code in enumerate(codes) if Category.from_code(code) in OF_A_MODEL}
    used = {ledger.requested[row] for row in models if lives.used_here(row)}
    for row, name in zip(rows, ledger.values("made_name", rows), strict=True):
        if strings[name] == "clone" or (row in models and ledger.requested[row] in used):
            yield row


def groups_of(
    blocks: list[HeldBlock], holders: Mapping[int, Holder], tensors: int
) -> Iterator[HeldGroup]:
    """The groups that are large enough, the largest first. ``holders``: by row of the ledger; what
    nothing is known to hold is grouped by its line. ``tensors``: bytes of all tensors at the peak.
    """
    found: dict[tuple[object, ...], list[HeldBlock]] = {}
    for block in blocks:
        holder = holders.get(block.row)
        early = block.need if not block.need.needless else None
        if holder is None or holder.root is HolderRoot.OUTSIDE:
            key: tuple[object, ...] = (early, block.made_at)
            if holder is not None and holder.kept in (Kept.SAVED, Kept.VARIABLE, Kept.GRAD):
                key = (early, holder.root)  # graphs, and gradients that have some
        elif holder.kept is Kept.GRAD and holder.root in _NAMED:
            key = (early, Kept.GRAD)  # of all parameters
        elif holder.root is HolderRoot.EXCEPTION:
            key = (early, holder.root, holder.error)
        elif holder.root is HolderRoot.CYCLE:
            classes = {one.kind for one in holder.cycle} - _CONTAINERS
            key = (early, holder.root, frozenset(classes))
        else:
            name = holder.path[0].label if holder.path else ""
            graph = holder.kept in (Kept.SAVED, Kept.VARIABLE)
            weight = graph and block.category in OF_A_MODEL  # which keeps it as well
            key = (early, holder.root, *_frame(holder), name, weight)
            if graph and not (early or holder.container) and is_evaluation(block.phase):
                key = _OF_EVALUATIONS  # each variable may keep a part of one forward pass
        found.setdefault(key, []).append(block)
    groups = [
        HeldGroup(
            tuple(members),
            _main_holder(members, holders),
            tensors,
            several=key == _OF_EVALUATIONS and len({holders[b.row].owner for b in members}) > 1,
            of_evaluations=key == _OF_EVALUATIONS,
        )
        for key, members in found.items()
    ]
    groups = list(_joined(groups))
    for group in sorted(groups, key=lambda group: -group.bytes):
        cycle = group.holder is not None and group.holder.root is HolderRoot.CYCLE
        share = LEAST_EFFECT if cycle or _copies_alone(group) else LEAST
        if group.share >= share:
            yield group


def _frame(holder: Holder) -> tuple[object, ...]:
    """The frame of a local variable: several functions of a file may have one name."""
    local = holder.root is HolderRoot.LOCAL
    return (holder.function, *((holder.file, holder.line) if local else ()))


def _copies_alone(group: HeldGroup) -> bool:
    """Whether they are all that something keeps several tensors in."""
    holder = group.holder
    kept = holder is not None and holder.container is not None
    return kept and copied(group.blocks) == group.bytes


def copied(blocks: Iterable[HeldBlock]) -> int:
    """The bytes of tensors that one line made many of, in an earlier step, and nothing uses again,
    such as a copy of all weights; without gradients, which come back with the next step.
    """
    lines: dict[tuple[Frame, ...], list[int]] = {}
    for block in blocks:
        needless = block.earlier and block.need.needless
        if needless and block.category is not Category.GRADIENT:
            lines.setdefault(block.frames, []).append(block.bytes)
    return max((sum(sizes) for sizes in lines.values() if len(sizes) >= _COPIED), default=0)


def _main_holder(blocks: Sequence[HeldBlock], holders: Mapping[int, Holder]) -> Holder | None:
    """What holds the most of them, such as one list of an object that also has others."""
    parts: dict[tuple[str, ...], list[HeldBlock]] = {}
    for block in blocks:
        holder = holders.get(block.row)
        parts.setdefault(() if holder is None else _labels(holder), []).append(block)
    most = max(parts.values(), key=lambda part: sum(block.bytes for block in part))
    return holders.get(max(most, key=lambda block: block.bytes).row)


def _labels(holder: Holder) -> tuple[str, ...]:
    """The path to a tensor, with all elements of a list or tuple alike."""
    inner = [step.label for step in holder.path]
    return tuple("[]" if label[1:-1].isdigit() else label for label in inner)


def _joined(groups: Iterable[HeldGroup]) -> Iterator[HeldGroup]:
    """The groups; what a function builds, and what it built and returned in an earlier call, are
    one: containers of the same structure, of which the same lines made the tensors. The holder is
    that of the newest block: there the program stores them.
    """
    alike: dict[tuple[object, ...], list[HeldGroup]] = {}
    for group in groups:
        structure = _structure(group)
        if structure:
            lines = frozenset(block.made_at for block in group.blocks)
            alike.setdefault((structure, lines), []).append(group)
        else:
            yield group
    for members in alike.values():
        newest = max(members, key=lambda group: max(_age(block) for block in group.blocks))
        blocks = tuple(block for group in members for block in group.blocks)
        yield HeldGroup(blocks, newest.holder, newest.tensors)


def _age(block: HeldBlock) -> tuple[bool, int]:
    return (not block.earlier, block.row)


def _structure(group: HeldGroup) -> tuple[str, ...]:
    """What a variable's container consists of, down to the tensors; empty for other holders, and
    for memory that is used again.
    """
    holder = group.holder
    if holder is None or holder.root not in _NAMED or holder.kept is not Kept.TENSOR:
        return ()
    if holder.container is None or not all(block.need.needless for block in group.blocks):
        return ()
    return (holder.path[0].kind, *_labels(holder)[1:])
