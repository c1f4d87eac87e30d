"""Segments as bars of cells: what is used by what, and the holes. Knows nothing of Textual."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpuprobe.model.memory import BlockState, Category, Segment
from gpuprobe.model.text import human_bytes, visible
from gpuprobe.tui.widgets.palette import LETTERS
from gpuprobe.tui.widgets.styled_text import EIGHTHS, Line, Span, merged

FREE = -1
PENDING = -2


@dataclass(frozen=True, slots=True)
class Bar:
    """A segment: its ``label``, and its runs of bytes from its start to its end.

    ``runs`` are (kind, bytes): a `Category.code`, `FREE` or `PENDING`. They sum to ``total``.
    """

    address: int
    total: int
    free: int
    label: str
    runs: tuple[tuple[int, int], ...]


ORDERS: Mapping[str, Callable[[Bar], tuple[int, int]]] = {
    "address": lambda bar: (bar.address, 0),
    "most free first": lambda bar: (-bar.free, bar.address),
    "largest first": lambda bar: (-bar.total, bar.address),
}


def bars(
    segments: Sequence[Segment], codes: Mapping[int, int], order: str = "address"
) -> list[Bar]:
    """One bar per segment. ``codes``: address of an allocated block -> its `Category.code`."""
    unknown = Category.UNKNOWN.code
    found = []
    for segment in segments:
        runs: list[tuple[int, int]] = []
        for block in segment.blocks:
            if block.state is BlockState.INACTIVE:
                kind = FREE
            elif block.state is BlockState.PENDING_FREE:
                kind = PENDING
            else:
                kind = codes.get(block.address, unknown)
            if runs and runs[-1][0] == kind:
                runs[-1] = (kind, runs[-1][1] + block.size)
            else:
                runs.append((kind, block.size))
        free = segment.cached_size
        kinds = [segment.segment_type]
        if segment.is_expandable:
            kinds.append("expandable")
        if segment.pool_id != (0, 0):
            kinds.append(f"pool {segment.pool_id[0]}.{segment.pool_id[1]}")
        if segment.stream:
            kinds.append(f"stream {segment.stream:#x}")
        share = f"{round(100 * free / segment.total_size):>3}% free" if segment.total_size else ""
        label = f"{human_bytes(segment.total_size):>10} {share}  {' '.join(kinds)}"
        found.append(Bar(segment.address, segment.total_size, free, label, tuple(runs)))
    found.sort(key=ORDERS[order])
    return found


def cells(bar: Bar, width: int) -> list[tuple[str, int]]:
    """The bar in ``width`` cells: (character, kind). A cell is as full as its bytes are used, and
    shows the kind that most of the used ones are; any free byte leaves a cell less than full.
    """
    found = []
    runs = iter(bar.runs)
    kind, left = next(runs, (FREE, 0))
    at = 0
    for column in range(width):
        end = (column + 1) * bar.total // width
        held: dict[int, int] = {}
        if end == at and left:  # fewer bytes than cells: the run goes on
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
    """A segment: its bar, then its label."""
    label = f" {bar.label}"
    shown = cells(bar, max(8, width - max(34, len(label)) - 1))
    return (*merged(_span(char, kind, plain) for char, kind in shown), (visible(label), "dim"))


def _span(char: str, kind: int, plain: bool) -> Span:
    if kind == FREE:
        return "·", "dim"
    if kind == PENDING:
        return "~" if plain else "▒", "warning"
    category = Category.from_code(kind)
    if plain:
        letter = LETTERS[category]
        return letter if char == "█" else letter.lower(), ""
    return char, category.value
