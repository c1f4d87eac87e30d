"""What was allocated at one position of a trace, as rectangles of category, then group."""

from __future__ import annotations

from collections.abc import Callable

from gpuprobe.api.live import Group, TraceState
from gpuprobe.model.memory import Category
from gpuprobe.model.text import human_bytes
from gpuprobe.tui.widgets.text_pane import TextPane
from gpuprobe.tui.widgets.treemap import Rect, tile, treemap_lines

_CELLS = 12
"""Cells that a rectangle has on average, at least: three by four hold a name."""


class MemoryTreemap(TextPane):
    """``rects`` and ``groups``: what is where, in the same order."""

    DEFAULT_CSS = "MemoryTreemap { height: 1fr; padding: 0 1; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.rects: list[Rect] = []
        self.groups: list[Group] = []

    def paint(
        self, state: TraceState | None, cursor: Group | None, name: Callable[[str, int], str]
    ) -> None:
        """Draw a state. ``cursor``: the group to be marked; ``name`` shortens a group's key."""
        width, height = self.size.width, self.size.height
        self.rects, self.groups = [], []
        if state is None or width < 4 or height < 2:
            self.show([])
            return
        faces: list[tuple[Category, str, str]] = []
        chosen = -1
        sizes = [state.categories[category] for category, _ in state.tree]
        for outer in tile(sizes, width, height):
            category, groups = state.tree[outer.item]
            groups = _with_rest(groups, max(1, outer.width * outer.height // _CELLS))
            for one in tile([group.bytes for group in groups], outer.width, outer.height):
                group, number = groups[one.item], len(faces)
                if cursor is not None and chosen < 0 and same_memory(cursor, group):
                    chosen = number
                place = (outer.x + one.x, outer.y + one.y)
                self.rects.append(Rect(number, *place, one.width, one.height))
                self.groups.append(group)
                faces.append(
                    (category, name(group.key, max(4, one.width - 1)), human_bytes(group.bytes))
                )
        plain = self.painter.palette.plain
        self.show(treemap_lines(self.rects, faces, width, height, chosen=chosen, plain=plain))

    def at(self, x: int, y: int) -> Group | None:
        """The group that is shown at a place of the widget, its padding included."""
        x -= self.styles.padding.left
        for rect, group in zip(self.rects, self.groups, strict=True):
            if 0 <= x - rect.x < rect.width and 0 <= y - rect.y < rect.height:
                return group
        return None


def _with_rest(groups: tuple[Group, ...], most: int) -> tuple[Group, ...]:
    """At most ``most`` groups, the last of which stands for all that are left out."""
    if len(groups) <= most:
        return groups
    rest = groups[most - 1 :]
    key = f"({len(rest):,} smaller)" if most > 1 else f"({len(rest):,} places)"
    size = sum(group.bytes for group in rest)
    return (*groups[: most - 1], Group(key, size, rest[0].category, rest[0].rows[:1]))


def same_memory(one: Group, other: Group) -> bool:
    """Whether a row of the list and a rectangle stand for the same, or the one holds the other."""
    return one.key == other.key or other.rows[0] in one.rows or one.rows[0] in other.rows
