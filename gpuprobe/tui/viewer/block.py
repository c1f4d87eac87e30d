"""One block of memory: the stack that allocated it, and the source of the selected frame."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from gpuprobe.analysis.inspection.lives import BlockLife
from gpuprobe.analysis.inspection.trace import BlockInfo
from gpuprobe.model.needs import Need, use_in_words
from gpuprobe.model.run.session import Session
from gpuprobe.model.text import human_bytes, visible
from gpuprobe.model.trace import Frame
from gpuprobe.model.values import Unavailable
from gpuprobe.recording.reader import excerpt
from gpuprobe.tui.viewer.run_model import short_line
from gpuprobe.tui.widgets.keymap import Key, bindings
from gpuprobe.tui.widgets.styled_text import Line
from gpuprobe.tui.widgets.table import ItemTable
from gpuprobe.tui.widgets.text_pane import TextPane
from gpuprobe.user_frames import is_plumbing, is_user_frame, short_name

_WIDTH = 0.92
"""The part of the screen's width that the card takes."""

FOLD_KEY = Key("c", "all frames", {"c": "fold"})


class BlockScreen(ModalScreen[None]):
    """One block, over the screen that opened it."""

    KEYS = (FOLD_KEY, Key("Esc", "back", {"escape,q,enter": "dismiss"}))
    DEFAULT_CSS = """
    BlockScreen { align: center middle; }
    BlockScreen #box { width: 92%; height: 90%; border: round $primary; padding: 0 1;
                       background: $background; }
    BlockScreen #block { height: auto; margin-bottom: 1; }
    BlockScreen #frames { height: 2fr; }
    BlockScreen #source { height: 9; border-top: solid $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings(KEYS)

    def __init__(self, block: BlockInfo, session: Session) -> None:
        super().__init__()
        self._block = block
        self._session = session
        self._folded = True
        self._rows: list[int | None] = []  # the frame of each row; None: a gap of folded frames

    def compose(self) -> ComposeResult:
        self._about = TextPane(id="block")
        self._table = ItemTable(id="frames")
        self._source = TextPane(id="source")
        with Vertical(id="box"):
            yield self._about
            yield self._table
            yield self._source

    def on_mount(self) -> None:
        columns = int(self.app.size.width * _WIDTH) - 4  # the border, and a column next to it
        lines = block_lines(self._block, self._session.cwd, columns)
        self._about.show([((line, ""),) for line in lines])
        self._fill()
        self._table.focus()
        self._show_source()

    def _fill(self) -> None:
        frames = self._block.frames
        rows = self._rows = stack_rows(frames, folded=self._folded)
        hidden = len(frames) - sum(row is not None for row in rows)

        def line(index: int) -> list[Line]:
            at = rows[index]
            if at is None:
                return [(("  ⋮", "dim"),)]
            name = short_line(short_name(frames[at]), self._session.cwd)
            return [((name, "" if is_user_frame(frames[at]) else "dim"),)]

        head = "allocated by, innermost first" if frames else "no stack was recorded"
        heading: Line = (("", "section"), (head, "head"))
        if hidden:
            heading += (("   c", "key"), (f": {hidden} more, of PyTorch and native", "dim"))
        elif frames and not self._folded:
            heading += (("   c", "key"), (": fold those of PyTorch and native", "dim"))
        mine = (i for i, at in enumerate(rows) if at is not None and is_user_frame(frames[at]))
        self._table.fill([heading], len(rows), line, cursor=next(mine, 0))

    def action_fold(self) -> None:
        """Show all frames, or only the user's."""
        self._folded = not self._folded
        self._fill()
        self._show_source()

    def _show_source(self) -> None:
        at = self._rows[self._table.cursor] if self._rows else None
        lines = [] if at is None else source_lines(self._block.frames[at], self._session)
        self._source.show([((line, "bold" if marked else "dim"),) for marked, line in lines])

    def on_item_table_moved(self, message: ItemTable.Moved) -> None:
        message.stop()
        self._show_source()

    def on_item_table_chosen(self, message: ItemTable.Chosen) -> None:
        message.stop()
        self.dismiss()


def stack_rows(frames: Sequence[Frame], *, folded: bool) -> list[int | None]:
    """The indices of the listed frames, innermost first; None is a gap. Folded, the list begins
    with the user's line and leaves out native code and PyTorch's own frames, unless the stack has
    no other frame.
    """
    everything: list[int | None] = list(range(len(frames)))
    informative = [i for i, frame in enumerate(frames) if not is_plumbing(frame)]
    if not folded or not informative:
        return everything
    first = next((i for i in informative if is_user_frame(frames[i])), informative[0])
    rows: list[int | None] = []
    before = first
    for at in informative:
        if at < first:
            continue
        if at > before + 1:
            rows.append(None)
        rows.append(at)
        before = at
    return rows


def block_lines(block: BlockInfo, cwd: str, columns: int) -> list[str]:
    """A block in a few lines of ``columns`` columns: size, category, life, phase and module. Places
    are shown relative to ``cwd``.
    """
    size = f"{human_bytes(block.bytes)} at {block.address:#x}"
    if block.requested != block.bytes:
        size += f" ({human_bytes(block.requested)} requested)"
    parts = [size, block.category.words]
    if block.stream:
        parts.append(f"stream {block.stream:#x}")
    allocation = f"event {block.allocated_at:,}" if block.allocated_at else "before the trace"
    if isinstance(block.life, BlockLife) and block.life.made_by:
        allocation += f" by {visible(block.life.made_by)}"
    where = [f"phase {block.phase}" if block.phase else "", block.module]
    named = [visible(part) for part in where if part]
    freed = "not in this trace"
    if block.freed_at is not None:
        freed = f"event {block.freed_at:,}"
        if block.freed_in:
            freed += f" · phase {visible(block.freed_in)}"
    rows = [("allocated", " · ".join([allocation, *named]))]
    if isinstance(block.life, Unavailable):
        rows.append(("used", f"unknown: {block.life.reason}"))
    elif block.need is not Need.UNTRACED:
        rows += _uses(block.life, cwd)
    rows.append(("freed", freed))
    if isinstance(block.need, Need):
        rows.append(("at cursor", block.need.label))
    wrapped = (
        textwrap.wrap(f"{name + ':':<11}{text}", columns, subsequent_indent=" " * 11)
        for name, text in rows
    )
    return [" · ".join(parts), *chain.from_iterable(wrapped)]


def _uses(life: BlockLife, cwd: str) -> Iterator[tuple[str, str]]:
    """The first and the last use of a block."""
    later = "by a later step" if life.later_step else ""
    if life.last is None:
        yield "used", f"not in this step, but {later}" if later else "not in this step"
        return
    if life.first is not None:
        by = f" by {visible(life.first.operator)}" if life.first.operator else ""
        yield "first use", f"event {life.first.position:,}{by}"
    place = "" if life.last.line is None else short_line(str(life.last.line), cwd)
    by = visible(use_in_words(life.last.operator, place, life.last.phase))
    again = f"; again {later}" if later else ""
    yield "last use", f"event {life.last.position:,} by {by}{again}"


def source_lines(frame: Frame, session: Session) -> list[tuple[bool, str]]:
    """The source around a frame: (whether it is the frame's line, text)."""
    found = excerpt(frame, cwd=session.cwd, since=session.started_at)
    if isinstance(found, Unavailable):
        place = short_line(short_name(frame), session.cwd)
        return [(True, place), (False, f"its source is not available: {visible(found.reason)}")]
    lines = [
        (number == found.line, f"{number:>6}  {visible(text.expandtabs(4))}")
        for number, text in found.lines
    ]
    if found.changed:
        lines.append((False, "        (the file is newer than the recording)"))
    return lines
