"""The findings of a rank: a list, and the chosen one in full."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical

from gpuprobe.model.findings import Finding
from gpuprobe.model.text import visible, wrapped
from gpuprobe.tui.viewer.run_model import short_line
from gpuprobe.tui.widgets.styled_text import Line
from gpuprobe.tui.widgets.table import ItemTable
from gpuprobe.tui.widgets.text_pane import TextPane

_ROLES = {"error": "bad", "warning": "warning", "note": "dim"}


class FindingsPane(Vertical):
    """Shows findings that are given to it."""

    DEFAULT_CSS = """
    FindingsPane #findings-detail { height: 9; padding: 0 1; border-top: solid $panel; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._findings: tuple[Finding, ...] = ()
        self._cwd = ""

    def compose(self) -> ComposeResult:
        self._table = ItemTable(id="finding-rows")
        self._detail = TextPane(id="findings-detail")
        yield self._table
        yield self._detail

    def show(self, findings: tuple[Finding, ...], cwd: str) -> None:
        """Show these findings; paths in ``cwd`` are shown without it."""
        self._findings, self._cwd = findings, cwd
        count = len(findings)
        head = f"{count} finding{'s' * (count != 1)}" if findings else "no findings"
        self._table.fill([(("", "section"), (head, "head"))], count, self._line)
        self._show_detail()

    def _line(self, index: int) -> list[Line]:
        finding = self._findings[index]
        level = finding.level.value
        text = f"{finding.rule} {visible(finding.message)}"
        return [((f"{level:>8} ", _ROLES[level]), (text, ""))]

    def _show_detail(self) -> None:
        index, columns = self._table.cursor, max(20, self._detail.size.width)
        lines: list[Line] = []
        if index < len(self._findings):
            for text in _finding_lines(self._findings[index], self._cwd):
                lines.extend(((part, ""),) for part in wrapped(text, "", columns))
        self._detail.show(lines)

    def on_item_table_moved(self, message: ItemTable.Moved) -> None:
        message.stop()
        self._show_detail()

    def on_resize(self) -> None:
        self.call_after_refresh(self._show_detail)


def _finding_lines(finding: Finding, cwd: str) -> list[str]:
    """A finding in full."""
    lines = [f"{finding.rule} {finding.kind}: {finding.message}"]
    if finding.location is not None:
        lines.append(f"at {short_line(str(finding.location), cwd)}")
    lines += [f"and {short_line(str(place), cwd)}" for place in finding.related]
    lines += [f"{name}: {value}" for name, value in finding.evidence]
    if finding.count > 1:
        lines.append(f"{finding.count} times")
    if finding.fix is not None:
        lines.append(f"fix: {finding.fix.text} {finding.fix.code}".rstrip())
    return lines
