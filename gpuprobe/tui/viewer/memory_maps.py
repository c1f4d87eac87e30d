"""Memory at one position of a trace: a treemap of its blocks, and bars of its segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpuprobe.analysis.inspection.trace import Group, Kind, TraceState
from gpuprobe.model.memory import BlockState, Category, Segment
from gpuprobe.model.text import human_bytes, visible
from gpuprobe.tui.widgets.palette import letter
from gpuprobe.tui.widgets.styled_text import EIGHTHS, Line, Span, merged
from gpuprobe.tui.widgets.text_pane import TextPane


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle in cells; (0, 0) is at the top left. ``item``: the index of its size."""

    item: int
    x: int
    y: int
    width: int
    height: int


def tile(sizes: Sequence[int], width: int, height: int) -> list[Rect]:
    """Divide ``width`` × ``height`` cells in proportion to ``sizes`` (largest first), into
    rectangles that are nearly square with cells twice as high as wide. They cover each cell once.
    Sizes of 0, and items for which no cell is left, get none; the largest item always gets one.
    """
    items = [(index, size) for index, size in enumerate(sizes) if size > 0]
    if not items or width < 1 or height < 1:
        return []
    rects: list[Rect] = []
    _divide(items, 0, 0, width, height, rects)
    return rects


def _divide(
    items: list[tuple[int, int]], x: int, y: int, width: int, height: int, rects: list[Rect]
) -> None:
    while True:
        if len(items) == 1 or width * height == 1:
            rects.append(Rect(items[0][0], x, y, width, height))
            return
        across = width >= 2 * height if height > 1 else True
        length = width if across else height
        if length == 1:  # one cell wide: divide the other side
            across, length = not across, max(width, height)
        total = sum(size for _, size in items)
        half, count = items[0][1], 1
        while count < len(items) - 1 and abs(total - 2 * (half + items[count][1])) <= abs(
            total - 2 * half
        ):
            half += items[count][1]
            count += 1
        cut = min(length - 1, max(1, round(length * half / total)))
        if across:
            _divide(items[:count], x, y, cut, height, rects)
            x, width = x + cut, width - cut
        else:
            _divide(items[:count], x, y, width, cut, rects)
            y, height = y + cut, height - cut
        items = items[count:]


def treemap_lines(
    rects: Sequence[Rect],
    faces: Sequence[tuple[Kind, str, str]],
    width: int,
    height: int,
    *,
    chosen: int = -1,
    plain: bool = False,
) -> list[Line]:
    """Rectangles as lines of text. ``faces``: kind, name and size of each item; ``chosen``: the
    item under the cursor. ``plain``: letters instead of colours.
    """
    grid: list[list[Span]] = [[(" ", "")] * width for _ in range(height)]
    numbers: dict[Kind, int] = {}
    for rect in rects:
        kind, name, size = faces[rect.item]
        number = numbers[kind] = numbers.get(kind, -1) + 1
        marked = rect.item == chosen
        role = f"{'chosen' if marked else 'tile'} {number} {kind.value}"
        texts = [name, size] if rect.height > 1 else [f"{name} {size}"]
        for dy in range(rect.height):
            # The left edge separates neighbours of the same colour.
            text = texts[dy] if dy < len(texts) and rect.width > 3 else ""
            fill = letter(kind) if plain and not text else " "
            row = "▏" + text[: rect.width - 1].ljust(rect.width - 1, fill)
            if marked:
                row = _framed(row, dy, rect)
            for dx, char in enumerate(row[: rect.width]):
                grid[rect.y + dy][rect.x + dx] = (char, role)
    return [merged(row) for row in grid]


def _framed(row: str, dy: int, rect: Rect) -> str:
    """A row of the rectangle under the cursor, with its part of a heavy frame."""
    if rect.height < 3 or rect.width < 6:
        return "▌" + row[1:]
    if dy == 0:
        return "┏" + row[1:-1].rstrip().ljust(rect.width - 2, "━") + "┓"
    if dy == rect.height - 1:
        return "┗" + "━" * (rect.width - 2) + "┛"
    return "┃" + row[1:-1] + "┃"


_CELLS = 12
"""Least average number of cells per rectangle: three by four hold a name."""


_SHORTEST_NAME = 4
"""The fewest characters of a group's name."""


class MemoryTreemap(TextPane):
    """The memory at one position as rectangles, by category or need, then group. ``rects`` and
    ``groups`` have the same order.
    """

    DEFAULT_CSS = "MemoryTreemap { height: 1fr; padding: 0 1; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.rects: list[Rect] = []
        self.groups: list[Group] = []

    def paint(
        self, state: TraceState | None, cursor: Group | None, name: Callable[[str, int], str]
    ) -> None:
        """Draw a state. ``cursor``: the group under the cursor; ``name`` shortens a group's key."""
        width, height = self.size.width, self.size.height
        self.rects, self.groups = [], []
        if state is None or width < 4 or height < 2:
            self.show([])
            return
        faces: list[tuple[Kind, str, str]] = []
        chosen = -1
        sizes = [state.kinds[kind] for kind, _ in state.tree]
        for outer in tile(sizes, width, height):
            kind, groups = state.tree[outer.item]
            groups = _with_rest(groups, max(1, outer.width * outer.height // _CELLS))
            for one in tile([group.bytes for group in groups], outer.width, outer.height):
                group, number = groups[one.item], len(faces)
                if cursor is not None and chosen < 0 and same_memory(cursor, group):
                    chosen = number
                place = (outer.x + one.x, outer.y + one.y)
                self.rects.append(Rect(number, *place, one.width, one.height))
                self.groups.append(group)
                times = f" ×{len(group.members):,}" if group.members else ""
                room = one.width - 1
                if room - len(times) >= _SHORTEST_NAME:
                    label = name(group.key, room - len(times)) + times
                else:
                    label = name(group.key, max(_SHORTEST_NAME, room))
                faces.append((kind, label, human_bytes(group.bytes)))
        plain = self.painter.palette.plain
        self.show(treemap_lines(self.rects, faces, width, height, chosen=chosen, plain=plain))

    def at(self, x: int, y: int) -> Group | None:
        """The group at a position of the widget, counted with its padding."""
        x -= self.styles.padding.left
        for rect, group in zip(self.rects, self.groups, strict=True):
            if 0 <= x - rect.x < rect.width and 0 <= y - rect.y < rect.height:
                return group
        return None


def _with_rest(groups: tuple[Group, ...], most: int) -> tuple[Group, ...]:
    """At most ``most`` groups; the last one sums up those that are left out."""
    if len(groups) <= most:
        return groups
    rest = groups[most - 1 :]
    key = f"({len(rest):,} smaller)" if most > 1 else f"({len(rest):,} places)"
    size = sum(group.bytes for group in rest)
    return (*groups[: most - 1], Group(key, size, rest[0].category, rest[0].kind, rest[0].rows[:1]))


def same_memory(one: Group, other: Group) -> bool:
    """Whether two groups are the same, or one contains the other."""
    return one.key == other.key or other.rows[0] in one.rows or one.rows[0] in other.rows


FREE: Final = -1
PENDING: Final = -2


@dataclass(frozen=True, slots=True)
class Bar:
    """A segment: its ``label``, and runs of bytes of one kind, from its start to its end.

    ``runs`` are (kind, bytes): a category, a need, `FREE` or `PENDING`. They sum to ``total``.
    """

    address: int
    total: int
    free: int
    label: str
    runs: tuple[tuple[Kind | int, int], ...]


ORDERS: Mapping[str, Callable[[Bar], tuple[int, int]]] = {
    "address": lambda bar: (bar.address, 0),
    "most free first": lambda bar: (-bar.free, bar.address),
    "largest first": lambda bar: (-bar.total, bar.address),
}


def bars(
    segments: Sequence[Segment], kinds: Mapping[int, Kind], order: str = "address"
) -> list[Bar]:
    """One bar per segment. ``kinds``: address of an allocated block -> its category or need."""
    found = []
    for segment in segments:
        runs: list[tuple[Kind | int, int]] = []
        for block in segment.blocks:
            if block.state is BlockState.INACTIVE:
                kind: Kind | int = FREE
            elif block.state is BlockState.PENDING_FREE:
                kind = PENDING
            else:
                kind = kinds.get(block.address, Category.UNKNOWN)
            if runs and runs[-1][0] == kind:
                runs[-1] = (kind, runs[-1][1] + block.size)
            else:
                runs.append((kind, block.size))
        free = segment.cached_size
        about = [segment.segment_type]
        if segment.is_expandable:
            about.append("expandable")
        if segment.pool_id != (0, 0):
            about.append(f"pool {segment.pool_id[0]}.{segment.pool_id[1]}")
        if segment.stream:
            about.append(f"stream {segment.stream:#x}")
        share = f"{round(100 * free / segment.total_size):>3}% free" if segment.total_size else ""
        label = f"{human_bytes(segment.total_size):>10} {share}  {' '.join(about)}"
        found.append(Bar(segment.address, segment.total_size, free, label, tuple(runs)))
    found.sort(key=ORDERS[order])
    return found


def cells(bar: Bar, width: int) -> list[tuple[str, Kind | int]]:
    """The bar in ``width`` cells: (character, kind). A cell shows the used share of its bytes, and
    the most frequent kind of those; a free byte leaves a cell less than full.
    """
    found: list[tuple[str, Kind | int]] = []
    runs = iter(bar.runs)
    kind, left = next(runs, (FREE, 0))
    at = 0
    for column in range(width):
        end = (column + 1) * bar.total // width
        held: dict[Kind | int, int] = {}
        if end == at and left:  # fewer bytes than cells: the run continues
            held[kind] = 1
        while at < end and left:
            part = min(left, end - at)
            held[kind] = held.get(kind, 0) + part
            at, left = at + part, left - part
            if not left:
                kind, left = next(runs, (FREE, 0))
        size = sum(held.values())
        used = size - held.get(FREE, 0)
        if not used:
            found.append(("·", FREE))
            continue
        most = max((k for k in held if k != FREE), key=lambda k: held[k])
        level = 8 if used == size else max(1, min(7, round(8 * used / size)))
        found.append((EIGHTHS[level], most))
    return found


def map_line(bar: Bar, width: int, plain: bool) -> Line:
    """A segment as a line: its bar, then its label."""
    label = f" {bar.label}"
    shown = cells(bar, max(8, width - max(34, len(label)) - 1))
    return (*merged(_span(char, kind, plain) for char, kind in shown), (visible(label), "dim"))


def _span(char: str, kind: Kind | int, plain: bool) -> Span:
    if isinstance(kind, int):
        return ("·", "dim") if kind == FREE else ("~" if plain else "▒", "warning")
    if plain:
        mark = letter(kind)
        return mark if char == "█" else mark.lower(), ""
    return char, kind.value
