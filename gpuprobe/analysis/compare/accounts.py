"""Accounts of memory: an amount split by source line, small enough to be stored in a baseline.

An account's lines sum exactly to its total; so do its categories and its modules, if it has
them. Bytes that a trace does not explain get a separate line in brackets, they are never left out.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby, repeat
from typing import Final

from gpuprobe.analysis.peak.needs import need_of_each
from gpuprobe.analysis.peak.peaks import HighWater, Share, live_at
from gpuprobe.analysis.trace.categories import Marks, Runs
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.analysis.trace.parts import Traced, TracePoint, full_steps
from gpuprobe.model.actions import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP
from gpuprobe.model.memory import Category
from gpuprobe.model.place import Place, parse_place
from gpuprobe.model.trace import Frame
from gpuprobe.user_frames import (
    SITE_PACKAGES,
    Lines,
    Owner,
    is_cpp,
    is_user_frame,
    module_row,
    owner_of,
    package_path,
    short_name,
)


@dataclass(frozen=True, slots=True)
class Naming:
    """The names of files in accounts: relative to the project's folder ``root``. ``files``: the
    file of each name that was assigned.
    """

    root: str
    files: dict[str, str] = field(default_factory=dict)

    def file(self, name: str) -> str:
        """The name of a file: relative to the project, ``site-packages/...`` in an installed
        package, and else its last parts.
        """
        plain = name.replace("\\", "/")
        folder = self.root.replace("\\", "/").rstrip("/") + "/"
        inside = package_path(name)
        if inside is not None:
            found = f"{SITE_PACKAGES}{inside}"
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
        """A place (``file:line in function``) with the file's name in place of its path."""
        place = parse_place(text)
        if not isinstance(place, Place) or not place.file:
            return text
        return str(replace(place, file=self.file(place.file)))

    def is_package_frame(self, frame: Frame) -> bool:
        """Whether a frame is the Python of an installed package other than torch."""
        return owner_of(frame.filename) is Owner.LIBRARY and frame.filename.endswith(".py")


_OUTSIDE: Final = re.compile(
    r"/(gpuprobe/sampler/program\.py|_pytest/python\.py|pluggy/_callers\.py)$"
)


def inside(frames: Iterable[Frame]) -> Iterator[Frame]:
    """The frames of the program, without those of its launcher: from the innermost up to the module
    that calls them, or to pytest around a test.
    """
    for frame in frames:
        if _OUTSIDE.search(frame.filename.replace("\\", "/")) is not None:
            return
        yield frame
        if frame.name == "<module>":
            return


NOT_TRACED: Final = "(not in the trace)"
"""The row of the difference between a counter and the trace; it may be negative."""


@dataclass(frozen=True, slots=True)
class LineShare:
    """A line's part of an amount: ``bytes`` in ``blocks`` blocks (in counts: that many times).

    ``categories``: its bytes by category, the most first; ``needs``: by `Need`, empty if the uses
    of memory were not traced. ``calls``: the functions that the line called, innermost first,
    without repeats; they stay the same when lines shift. ``until``: ``backward`` if most of it is
    freed in the backward pass of its step, ``later`` if it outlives the step, else empty.
    ``paths``: the user's lines on the stack, innermost first, up to the one that calls the model,
    the optimizer or the autograd engine, each path with its bytes; not stored. ``call_paths``: the
    same with all Python lines except torch's and the standard library's.
    """

    key: str
    bytes: int
    blocks: int
    categories: tuple[tuple[str, int], ...] = ()
    until: str = ""
    calls: str = ""
    paths: tuple[tuple[tuple[str, ...], int], ...] = ()
    call_paths: tuple[tuple[tuple[str, ...], int], ...] = ()
    needs: tuple[tuple[str, int], ...] = ()

    @property
    def category(self) -> str:
        """The category with the most bytes; empty if none is known."""
        return self.categories[0][0] if self.categories else ""


@dataclass(frozen=True, slots=True)
class Account:
    """An amount and its parts. ``unit`` is ``bytes``, ``count`` or ``ns`` (then ``bytes`` of the
    lines are nanoseconds).
    """

    total: int
    lines: tuple[LineShare, ...] = ()
    categories: tuple[Share[str], ...] = ()
    modules: tuple[Share[str], ...] = ()
    unit: str = "bytes"


@dataclass(slots=True)
class _Row:
    """The sums of one line."""

    bytes: int = 0
    blocks: int = 0
    categories: Counter[str] = field(default_factory=Counter)
    until: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    paths: Counter[tuple[str, ...]] = field(default_factory=Counter)
    call_paths: Counter[tuple[str, ...]] = field(default_factory=Counter)
    needs: Counter[str] = field(default_factory=Counter)


class _ByLine:
    """Sums up blocks by line."""

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self._rows: dict[str, _Row] = defaultdict(_Row)
        self._call_paths: dict[tuple[Frame, ...], tuple[str, ...]] = {}

    def add(
        self,
        lines: Lines,
        frames: tuple[Frame, ...],
        stack: int,
        size: int,
        blocks: int = 1,
        *,
        before: bool = False,
        category: str = "",
        until: str = "",
        need: str = "",
    ) -> None:
        frame = lines.frame(stack)
        calls = ""
        path: tuple[str, ...] = ()
        naming = self._naming
        call_path = self._call_paths.get(frames)
        if call_path is None:
            call_path = self._call_paths[frames] = tuple(
                naming.line(f)
                for f in inside(frames)
                if not is_cpp(f) and (is_user_frame(f) or naming.is_package_frame(f))
            )
        if frame is None:
            key = lines.line(stack, before=before)
        else:
            key = naming.line(frame)
            inner = frames[: frames.index(frame)]
            calls = " ".join(name for name, _ in groupby(f.name for f in inner if not is_cpp(f)))
            mine = frames[: _entry(frames)]
            path = tuple(naming.line(f) for f in mine if is_user_frame(f)) or (key,)
        row = self._rows[key]
        row.bytes += size
        row.blocks += blocks
        row.categories[category] += size
        row.until[until] += size
        row.calls[calls] += size
        row.paths[path] += size
        row.call_paths[call_path] += size
        row.needs[need] += size

    def lines(self, total: int) -> tuple[LineShare, ...]:
        """All lines, the most bytes first, and one with the difference to ``total``."""
        found = [
            LineShare(
                key,
                row.bytes,
                row.blocks,
                _sorted(row.categories),
                most_bytes(row.until),
                most_bytes(row.calls),
                _most_first(row.paths),
                _most_first(row.call_paths),
                _sorted(row.needs),
            )
            for key, row in self._rows.items()
        ]
        rest = total - sum(line.bytes for line in found)
        if rest:
            found.append(LineShare(NOT_TRACED, rest, 0))
        return tuple(sorted(found, key=lambda line: (-line.bytes, line.key)))


_ENTRIES = (
    ("nn/modules/module.py", ("_call_impl", "_wrapped_call_impl")),
    ("torch/_tensor.py", ("backward",)),
    ("torch/autograd/__init__.py", ("backward", "grad")),
    ("torch/optim/optimizer.py", ("wrapper",)),
)
"""The functions of torch (2.6 to 2.13) through which a program's loop calls the model, the
autograd engine and the optimizer."""


def _entry(frames: tuple[Frame, ...]) -> int:
    """The index after the user's line that calls the outermost of `_ENTRIES`; if there is none,
    after the user's innermost line.
    """
    outermost = -1
    for index, frame in enumerate(frames):
        name = frame.filename.replace("\\", "/")
        if any(name.endswith(file) and frame.name in names for file, names in _ENTRIES):
            outermost = index
    user = (i for i, frame in enumerate(frames) if i > outermost and is_user_frame(frame))
    return next(user, len(frames) - 1) + 1


def _most_first(
    paths: Counter[tuple[str, ...]],
) -> tuple[tuple[tuple[str, ...], int], ...]:
    """The paths by bytes, the most first, then by name; empty ones are left out."""
    return tuple(
        sorted(((p, n) for p, n in paths.items() if p), key=lambda item: (-item[1], item[0]))
    )


def _sorted(counter: Counter[str]) -> tuple[tuple[str, int], ...]:
    """The keys by bytes, the most first, then by name; empty ones are left out."""
    named = ((key, size) for key, size in counter.items() if key)
    return tuple(sorted(named, key=lambda item: (-item[1], item[0])))


def most_bytes(counter: Counter[str]) -> str:
    """The key with the most bytes; of equals the smallest, so that runs agree."""
    return min(counter, key=lambda key: (-counter[key], key), default="")


def account_at(
    found: Traced, point: TracePoint, naming: Naming, total: int, *, whole: bool = False
) -> Account:
    """The account of the memory that was allocated at a point. ``total``: the allocator's counter.
    ``whole``: with categories, modules and needs.
    """
    ledger = ledger_of(found.trace(point.trace))
    mark = live_at(ledger, point.event)
    here = _Table(mark, naming)
    origins = _Origins(found, point.trace, naming)
    # Equal blocks together: a mark may have a million of them, from a hundred stacks.
    groups: dict[tuple[int, int, int, int, int, str, str], list[int]] = {}
    ends = zip(_ends(ledger, point.event), _needs(ledger, point.event, whole=whole), strict=False)
    for index, (until, need) in enumerate(ends):
        stack, before = mark.stack[index], mark.is_baseline[index]
        known = None
        if before and not stack:
            known = origins.of(mark.address[index], mark.size[index])
        if known is None:
            group = (0, stack, before, mark.category[index], mark.module[index], until, need)
        else:
            group = (1, *known, until, need)
        groups.setdefault(group, []).append(mark.size[index])
    by_line = _ByLine(naming)
    categories, modules = [], []
    for (earlier, stack, before, code, module, until, need), sizes in sorted(groups.items()):
        table = origins.table if earlier else here
        assert table is not None
        category = Category.from_code(code).value
        size, blocks = sum(sizes), len(sizes)
        by_line.add(
            table.lines,
            table.stacks.frames_of(stack),
            stack,
            size,
            blocks,
            before=bool(before),
            category=category,
            until=until,
            need=need,
        )
        name = module_row(table.stacks.strings[module], stack, before=bool(before))
        categories.append(Share(category, size, blocks))
        modules.append(Share(name, size, blocks))
    shares = by_line.lines(total)
    if not whole:
        return Account(total, shares)
    rest = [Share(NOT_TRACED, total - mark.allocated, 0)] if total != mark.allocated else []
    return Account(
        total, shares, merged_shares([*categories, *rest]), merged_shares([*modules, *rest])
    )


class _Table:
    """The stacks of one trace, and their lines."""

    def __init__(self, mark: HighWater, naming: Naming) -> None:
        self.stacks = mark.stacks
        self.lines = Lines(mark.stacks)


class _Origins:
    """The stacks of blocks that were alive before a trace: it has none for those that it frees. The
    trace before may have them among the blocks alive at its end.
    """

    def __init__(self, found: Traced, number: int, naming: Naming) -> None:
        self._found = found
        self._number = number
        self._naming = naming
        self._rows: dict[tuple[int, int], tuple[int, int, int, int]] | None = None
        self.table: _Table | None = None

    def of(self, address: int, size: int) -> tuple[int, int, int, int] | None:
        """(stack, is_baseline, category, module) in `table`."""
        if self._rows is None:
            self._rows = {}
            steps = self._found.steps
            number = self._number
            if number and steps[number].index - steps[number - 1].index <= 1:
                ledger = ledger_of(self._found.trace(number - 1))
                mark = live_at(ledger, ledger.events - 1)
                self.table = _Table(mark, self._naming)
                columns = (mark.stack, mark.is_baseline, mark.category, mark.module)
                keys = zip(mark.address, mark.size, strict=True)
                self._rows = dict(zip(keys, zip(*columns, strict=True), strict=True))
        return self._rows.get((address, size))


def _ends(ledger: Ledger, event: int) -> Iterator[str]:
    """`LineShare.until` of each block that is alive after ``event``, in `live_at`'s order."""
    runs = Runs(ledger, Marks(ledger.trace.stacks))
    for row in ledger.alive(event):
        freed = ledger.freed[row]
        if freed >= ledger.events or row >= ledger.made:  # of an earlier step
            yield "later"
        else:
            yield "backward" if runs.kind(runs.at(freed)) == "backward" else ""


def _needs(ledger: Ledger, event: int, *, whole: bool) -> Iterable[str]:
    """The `Need` of each block that is alive after ``event``, in `live_at`'s order; without end
    "", if they are unknown or not requested.
    """
    needs = need_of_each(ledger, event) if whole else None
    return (need.value for need in needs) if isinstance(needs, list) else repeat("")


def merged_shares(shares: Iterable[Share[str]]) -> tuple[Share[str], ...]:
    """Join the shares with the same name; the most bytes first."""
    found: dict[str, tuple[int, int]] = {}
    for share in shares:
        size, blocks = found.get(share.key, (0, 0))
        found[share.key] = (size + share.bytes, blocks + share.blocks)
    return tuple(
        Share(key, size, blocks)
        for key, (size, blocks) in sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    )


def growth(first: Account, last: Account) -> Account:
    """The differences of the lines between two accounts of one run, without unchanged lines."""
    before = {line.key: line for line in first.lines}
    nothing = LineShare("", 0, 0)
    found = []
    for line in last.lines:
        found.append(_minus(line, before.pop(line.key, nothing)))
    found += [
        _minus(replace(nothing, key=old.key, calls=old.calls), old) for old in before.values()
    ]
    lines = [line for line in found if line.bytes]
    lines.sort(key=lambda line: (-line.bytes, line.key))
    return Account(last.total - first.total, tuple(lines))


def _minus(line: LineShare, old: LineShare) -> LineShare:
    return replace(
        line,
        bytes=line.bytes - old.bytes,
        blocks=line.blocks - old.blocks,
        categories=changes_of(line.categories, old.categories),
    )


def changes_of(
    after: Iterable[tuple[str, int]], before: Iterable[tuple[str, int]]
) -> tuple[tuple[str, int], ...]:
    """The changes of amounts by name, the largest growth first; without equal ones."""
    sizes = Counter(dict(after))
    sizes.subtract(dict(before))
    return _sorted(Counter({key: size for key, size in sizes.items() if size}))


_SEGMENT_TAKEN = (SEGMENT_ALLOC, SEGMENT_MAP)
_SEGMENT_RETURNED = (SEGMENT_FREE, SEGMENT_UNMAP)


def device_allocs(found: Traced, warm_up: int, total: int, naming: Naming) -> Account:
    """Calls of cudaMalloc from step ``warm_up`` on, by the line that caused each."""
    by_line = _ByLine(naming)
    steps = {step.index for step in full_steps(found.site.rank.steps)}
    full = [number for number, step in enumerate(found.steps) if step.index in steps]
    for number in full[warm_up:]:
        trace = found.trace(number)
        events = trace.events
        lines = Lines(trace.stacks)
        for action, stack in zip(events.action, events.column("stack"), strict=True):
            if action in _SEGMENT_TAKEN:
                by_line.add(lines, trace.stacks.frames_of(stack), stack, 1)
    return Account(total, by_line.lines(total), unit="count")


def reserved_at(found: Traced, total: int, naming: Naming) -> Account:
    """The reserved memory at its highest, by the line that caused the allocation of each
    segment."""
    alive: dict[int, tuple[int, int, int]] = {}  # address -> trace, stack, size
    best: dict[int, tuple[int, int, int]] = {}
    most = now = 0
    tables = []
    for number in range(len(found.steps)):
        trace = found.trace(number)
        tables.append((trace.stacks, Lines(trace.stacks)))
        events = trace.events
        stacks = events.column("stack")
        for event, action in enumerate(events.action):
            address, size = events.address[event], events.size[event]
            if action in _SEGMENT_TAKEN:
                alive[address] = (number, stacks[event], size)
                now += size
                if now > most:
                    most, best = now, {}
            elif action in _SEGMENT_RETURNED and address in alive:
                if now == most and not best:
                    best = dict(alive)
                now -= alive.pop(address)[2]
    by_line = _ByLine(naming)
    for number, stack, size in (best or alive).values():
        table, lines = tables[number]
        by_line.add(lines, table.frames_of(stack), stack, size)
    return Account(total, by_line.lines(total))


def counted(places: Mapping[str, int], total: int, unit: str = "count") -> Account:
    """An account of things counted by place, or of nanoseconds."""
    lines = [LineShare(key, count, count) for key, count in places.items()]
    rest = total - sum(places.values())
    if rest:
        lines.append(LineShare(NOT_TRACED, rest, 0))
    return Account(total, tuple(sorted(lines, key=lambda line: (-line.bytes, line.key))), unit=unit)
