"""The state of the dashboard and its wording. Independent of Textual.

A `TopModel` takes readings in and returns lines; the screen adds keys, colours and places.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuprobe.model.io.document import header
from gpuprobe.model.machine.devices import Inventory
from gpuprobe.model.machine.monitor import HostLoad, Moment
from gpuprobe.model.machine.selection import Selection
from gpuprobe.model.text import human_bytes, visible
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable
from gpuprobe.reporters.text.info import device_names, error_lines, headline, missing
from gpuprobe.tui.monitor.device_panes import PLOTS, Panel, device_detail, device_table, no_gpu
from gpuprobe.tui.monitor.devices import DeviceRow, device_rows
from gpuprobe.tui.monitor.history import DeviceHistory, ProcessHistory
from gpuprobe.tui.monitor.process_panes import (
    ProcessColumns,
    process_heading,
    process_layout,
    process_line,
    process_page,
)
from gpuprobe.tui.monitor.processes import SORTS, Key, ListOptions, ProcessRow, process_rows
from gpuprobe.tui.widgets.plot import spark
from gpuprobe.tui.widgets.styled_text import Line, bar, fit, joined, level, line_width, right

if TYPE_CHECKING:
    from gpuprobe.model.machine.process import ProcessDetails
    from gpuprobe.model.run.totals import Run


def _errors_of(inventory: Inventory) -> list[str]:
    """The values that could not be read, in a sentence per device, status and reason."""
    lines = error_lines(inventory, device_names(inventory))
    return [line.strip().removeprefix("! ") for line in lines]


class PaneHeights(NamedTuple):
    """The lines of each pane, from the top; they sum to the height of the screen."""

    title: int
    host: int
    devices: int
    detail: int
    processes: int
    note: int
    footer: int


_DETAIL_LEAST = 7  # a heading, the memory, its legend, and a plot worth reading
_DETAIL_MOST = 20
_DETAIL_SPACIOUS = 44  # if the processes leave lines unused
_PROCESSES_LEAST = 5  # two lines of heading and three processes
_PROCESSES_STEP = 5  # so that the panes do not move with every new or ended process


def divide(
    height: int, devices: int, *, noted: bool, detail: bool = True, processes: int | None = None
) -> PaneHeights:
    """Divide the ``height`` lines of a terminal among the panes. ``noted``: there is a note to
    show. ``processes``: their number; lines that they do not need go to the plots. With
    ``2 * devices + 2`` lines, the table of GPUs has a second line for each, with the parts of its
    memory, and a legend.
    """
    footer = min(1, max(0, height - 1))
    title = min(1, height)
    host = 1 if height >= 12 else 0
    note = 1 if noted and height >= 10 else 0
    rest = max(0, height - title - footer - host - note)
    full_table = devices + 1  # with the heading
    table = min(full_table, max(4, rest // 2))
    table = min(table, max(0, rest - _PROCESSES_LEAST))
    rest -= table
    shown = 0
    if detail and devices and rest >= _DETAIL_LEAST + _PROCESSES_LEAST:
        shown = min(_DETAIL_MOST, max(_DETAIL_LEAST, rest // 2))
    rest -= shown
    if devices and table == full_table and rest >= devices + 1 + 2 * _PROCESSES_LEAST:
        table += devices + 1
        rest -= devices + 1
    if shown and processes is not None:
        full = -(-(processes + 1) // _PROCESSES_STEP) * _PROCESSES_STEP
        more = min(_DETAIL_SPACIOUS - shown, rest - max(_PROCESSES_LEAST, 2 + full))
        if more > 0:
            shown += more
            rest -= more
    return PaneHeights(title, host, table, shown, rest, note, footer)


EXPORT_SCHEMA = "gpuprobe.top"

EXPORT_VERSION = (2, 2)
"""(major, minor) of the document that ``e`` exports. A newer minor only adds keys."""


@dataclass(slots=True)
class TopModel:
    """The state of the dashboard. ``interval`` in seconds; ``plain``: a display without colour."""

    interval: float = 1.0
    plain: bool = False
    options: ListOptions = field(default_factory=ListOptions)
    moment: Moment | None = None
    devices: tuple[DeviceRow, ...] = ()
    processes: tuple[ProcessRow, ...] = ()
    chosen: str = ""  # the key of the selected GPU
    plot: int = 0
    paused: bool = False
    ended: bool = False
    replayed: str = ""  # the name of the replayed log
    failure: str = ""
    runs: tuple[Run, ...] = ()  # runs that are being recorded on this machine
    history: DeviceHistory = field(default_factory=DeviceHistory)
    process_history: ProcessHistory = field(default_factory=ProcessHistory)
    selection: Selection = field(default_factory=Selection)
    machine: Inventory | None = None  # the whole machine, before the selection
    tagged: frozenset[Key] = frozenset()

    # -- readings

    def add(self, moment: Moment) -> None:
        """Show a reading."""
        self.machine = moment.inventory
        if self.selection:
            moment = replace(moment, inventory=self.selection.of(moment.inventory))
        self.moment = moment
        self.failure = _failure(moment.inventory)
        self.history.add(moment)
        self.process_history.add(moment)
        # A driver that has been unloaded lists no device: the last ones stay on the screen.
        if moment.inventory.devices or not self.failure:
            self.devices = device_rows(moment)
        if self.chosen not in {row.key for row in self.devices}:
            self.chosen = self.devices[0].key if self.devices else ""
        self._forget_pins(moment)
        self.arrange()

    def arrange(self) -> None:
        """Sort and filter the processes again."""
        if self.moment is not None:
            self.processes = process_rows(self.moment, self.options)

    def _forget_pins(self, moment: Moment) -> None:
        """Drop the pins and tags of ended processes, so that the sets stay bounded."""
        running: set[Key] = {(load.pid, load.ticks) for load in moment.processes}
        running |= {(process.pid, 0) for process in moment.inventory.processes}
        if not self.options.pinned <= running:
            self.options = replace(self.options, pinned=self.options.pinned & running)
        self.tagged &= running

    # -- the user's choices

    def sort_by(self, name: str) -> None:
        """Sort by a column; if that is the sort order already, reverse it."""
        again = name == self.options.sort
        self.options = replace(self.options, sort=name, reverse=again and not self.options.reverse)
        self.arrange()

    def sort_next(self, by: int) -> None:
        """Sort by the column that is ``by`` places further in `SORTS`."""
        at = (SORTS.index(self.options.sort) + by) % len(SORTS)
        self.options = replace(self.options, sort=SORTS[at], reverse=False)
        self.arrange()

    def change(self, **options: Any) -> None:
        """Change options of the list: the filter, the order, the tree, pins."""
        self.options = replace(self.options, **options)
        self.arrange()

    def pin(self, row: ProcessRow) -> None:
        """Pin a process to the top, or unpin it."""
        self.change(pinned=self.options.pinned ^ {row.key})

    def tag(self, row: ProcessRow) -> None:
        """Tag a process, or untag it."""
        self.tagged ^= {row.key}

    @property
    def tagged_rows(self) -> list[ProcessRow]:
        """One row for each tagged process, unless a filter hides it."""
        rows = {row.key: row for row in self.processes if row.key in self.tagged}
        return list(rows.values())

    def choose(self, position: int) -> None:
        """Select the GPU in this row of the table."""
        if 0 <= position < len(self.devices):
            self.chosen = self.devices[position].key

    @property
    def chosen_row(self) -> DeviceRow | None:
        """The selected GPU."""
        return next((row for row in self.devices if row.key == self.chosen), None)

    @property
    def chosen_at(self) -> int:
        """The row number of the selected GPU."""
        return next((i for i, row in enumerate(self.devices) if row.key == self.chosen), 0)

    # -- lines

    def title(self, columns: int) -> Line:
        """The machine, and the state of the screen."""
        if self.moment is None:
            return fit(((" gpuprobe", "title"), ("  asking …", "dim")), columns)
        inventory = self.moment.inventory
        words = headline(inventory).partition(" · ")
        start: Line = (("", "section"), (f" {words[0]}", "title"), (f" · {words[2]}", ""))
        if columns >= 120 and inventory.host.hostname:
            start += ((f" · {visible(inventory.host.hostname)}", "dim"),)
        clock = time.strftime("%H:%M:%S", time.localtime(inventory.taken_at))
        marks: list[Line] = []
        if self.selection:
            marks.append(((f" only {visible(self.selection.text)} ", "badge"),))
        if self.replayed:
            marks.append(((f" {visible(self.replayed)} ", "badge"),))
        if self.ended:
            marks.append(((" end of the log ", "badge-warning"),))
        if self.paused:
            marks.append(((" paused ", "badge-warning"),))
        pace = f"every {self.interval:g} s  " if columns >= 80 else ""
        end: Line = ((" ", ""), *joined([*marks, ((f"{pace}{clock} ", "dim"),)]))
        free = columns - line_width(end)
        return fit((*fit(start, free), *end), columns) if free > 0 else fit(end, columns)

    def host(self, columns: int) -> Line:
        """CPU, memory and load of the machine."""
        if self.moment is None:
            return fit((), columns)
        load = self.moment.host
        count = self.moment.inventory.host.cpu_count
        parts: list[Line] = [_cpu(load, count, self.history, columns)]
        parts.append(_memory("RAM", load.memory_total, load.memory_available, columns))
        if isinstance(load.swap_total.value, int) and load.swap_total.value and columns >= 120:
            parts.append(_memory("swap", load.swap_total, load.swap_free, 0))
        average = load.load.value
        words = (
            missing(average)
            if isinstance(average, Unavailable)
            else "  ".join(f"{value:.2f}" for value in average)
        )
        parts.append((("load ", "head"), (words, "")))
        line = fit(((" ", ""), *joined(parts, "   ")), columns)
        if not self.runs:
            return line
        count = len(self.runs)
        shown = f"◉ {count} run{'' if count == 1 else 's'} recorded: R "
        return (*fit(line, max(0, columns - len(shown))), (shown, "accent"))

    def run_of(self, row: ProcessRow) -> Run | None:
        """The recording that this process is writing or, if it writes none, its parent."""
        for pid in (row.pid, row.parent):
            for run in self.runs:
                if pid > 1 and pid in run.pids:
                    return run
        return None

    def panel(self, columns: int, two_lines: bool) -> Panel:
        """The table of GPUs."""
        return device_table(
            self.devices,
            self.history,
            columns,
            chosen=self.chosen,
            two_lines=two_lines,
            plain=self.plain,
        )

    @property
    def has_gpus(self) -> bool:
        """Whether there are GPUs or processes to show, or no reading yet."""
        return bool(self.devices or self.processes) or self.machine is None

    def no_gpu(self, columns: int, height: int) -> list[Line]:
        """The explanation instead of the tables on a machine without a GPU."""
        assert self.machine is not None
        return no_gpu(self.machine, self.selection, len(self.runs), columns, height)

    def process_page(
        self, row: ProcessRow, details: ProcessDetails | None, columns: int
    ) -> list[Line]:
        """The page of one process, with its newest readings, or its last ones if it has ended."""
        rows: list[ProcessRow] = []
        if self.moment is not None:
            options = ListOptions(sort="gpu")
            rows = [one for one in process_rows(self.moment, options) if one.key == row.key]
        return process_page(
            rows or [row],
            details,
            self.process_history,
            self.run_of(row),
            columns,
            interval=self.interval,
            totals={device.key: device.total for device in self.devices},
            ended=not rows,
        )

    def detail(self, columns: int, height: int) -> list[Line]:
        """The selected GPU in detail."""
        row = self.chosen_row
        if row is None:
            return [fit((), columns) for _ in range(height)]
        return device_detail(
            row,
            self.history,
            columns,
            height,
            first=self.plot,
            interval=self.interval,
            plain=self.plain,
        )

    def next_plot(self) -> str:
        """Show the next plot first; returns its name."""
        self.plot = (self.plot + 1) % len(PLOTS)
        return PLOTS[self.plot][1]

    def process_headings(self, columns: int) -> tuple[ProcessColumns, list[Line]]:
        """The number of processes with the active options, and the names of the columns."""
        chosen = process_layout(columns)
        everything = 0 if self.moment is None else len(self.moment.inventory.processes)
        shown = sum(1 for row in self.processes if row.device)
        count = f" {shown} of {everything}" if shown != everything else f" {everything}"
        line: Line = (("", "section"), (" processes", "title"), (count, "bold"))
        if self.options.device:
            index = next((d.index for d in self.devices if d.key == self.options.device), "?")
            line += ((f"  on GPU {index}", "accent"),)
        if self.options.needle:
            line += (("  filter ", "dim"), (visible(self.options.needle), "match"))
        if self.options.pinned:
            line += ((f"  {len(self.options.pinned)} pinned", "pinned"),)
        if self.tagged:
            held = sum(r.memory or 0 for r in self.processes if r.key in self.tagged)
            line += ((f"  {len(self.tagged)} tagged, {human_bytes(held)}", "warning"),)
        if self.options.tree:
            line += (("  tree", "accent"),)
        words = f"by {self.options.sort}{', reversed' if self.options.reverse else ''} "
        free = columns - line_width(line)
        if free > len(words) + 2:
            line += ((right(words, free), "dim"),)
        return chosen, [fit(line, columns), process_heading(chosen, self.options)]

    def process_line(self, row: ProcessRow, columns: ProcessColumns) -> Line:
        """One process."""
        recorded = self.run_of(row) is not None
        return process_line(row, columns, recorded=recorded, tagged=row.key in self.tagged)

    def notes(self) -> list[str]:
        """Errors and unusual values, in sentences, the most severe first."""
        if self.moment is None:
            return [self.failure] if self.failure else []
        inventory = self.moment.inventory
        notes = [self.failure] if self.failure else _errors_of(inventory)
        for one in inventory.disagreements:
            if not one.expected:
                notes.append(visible(one.message))
        if isinstance(self.moment.xids, Unavailable) and (
            self.moment.xids.status is not ReadStatus.NOT_COLLECTED
        ):
            notes.append(f"Xid messages are unavailable: {visible(self.moment.xids.reason)}")
        return notes

    def note(self, columns: int) -> Line:
        """The first note, and the number of further ones."""
        found = self.notes()
        if not found:
            return fit((), columns)
        role = "badge-bad" if self.failure else "warning"
        more = f" (+{len(found) - 1}: n) " if len(found) > 1 else ""
        text = fit(((f" {found[0]}", role),), columns - len(more), role if self.failure else "")
        return (*text, (more, "dim"))

    # -- export

    def export(self) -> dict[str, object]:
        """The screen as JSON-ready data: devices, processes in their order, host, options."""
        if self.moment is None:
            return header(EXPORT_SCHEMA, EXPORT_VERSION)
        from gpuprobe.model.io.codec import to_plain  # 4 ms, for exports only

        inventory = self.moment.inventory
        by_place = {(p.pid, p.device, p.mig): p for p in inventory.processes}
        listed = []
        used: set[tuple[int, str, str]] = set()
        for row in self.processes:
            for place, process in by_place.items():
                if place[:2] == (row.pid, row.device) and place not in used:
                    used.add(place)
                    listed.append(to_plain(process))
                    break
        return {
            **header(EXPORT_SCHEMA, EXPORT_VERSION),
            "taken_at": inventory.taken_at,
            "demo": inventory.demo,
            "host": to_plain(self.moment.host),
            "driver": to_plain(inventory.driver),
            "devices": [to_plain(device) for device in inventory.devices],
            "waterfalls": [to_plain(fall) for fall in inventory.waterfalls],
            "links": [to_plain(rate) for rate in self.moment.links],
            "work": [to_plain(one) for one in self.moment.work],
            "xids": to_plain(self.moment.xids)
            if isinstance(self.moment.xids, Unavailable)
            else [to_plain(note) for note in self.moment.xids],
            "processes": listed,
            "shown": {
                "sort": self.options.sort,
                "reverse": self.options.reverse,
                "tree": self.options.tree,
                "filter": self.options.needle,
                "device": self.options.device,
                "selection": to_plain(self.selection),
                "tagged": sorted(pid for pid, _ in self.tagged),
                "notes": self.notes(),
            },
        }


def _failure(inventory: Inventory) -> str:
    """The reason why no GPU can be queried, or \"\"."""
    if any(source.available for source in inventory.sources):
        return ""
    reasons = "; ".join(source.reason for source in inventory.sources if not source.available)
    return f"no GPU is available: {visible(reasons)}"


def _cpu(load: HostLoad, count: int, history: DeviceHistory, columns: int) -> Line:
    value = load.cpu.value
    name = f"{count} CPUs " if count else "CPU "
    if isinstance(value, Unavailable):
        return ((name, "head"), (right(missing(value), 4), "dim"))
    wide = 20 if columns >= 120 else 8
    drawn = spark(history.host_cpu(), wide, 100)
    return ((name, "head"), (f"{value:3.0f}% ", level(value / 100)), (drawn, "plot"))


def _memory(name: str, total: Reading[Bytes], free: Reading[Bytes], columns: int) -> Line:
    whole, left = total.value, free.value
    if isinstance(whole, Unavailable):
        return ((f"{name} ", "head"), (missing(whole), "dim"))
    if isinstance(left, Unavailable) or not whole:
        return ((f"{name} ", "head"), (f"?/{human_bytes(whole)}", ""))
    used = whole - left
    share = used / whole
    text = f"{human_bytes(used)}/{human_bytes(whole)}"
    gauge = (*bar(share, 12, level(share)), (" ", "")) if columns >= 100 else ()
    return ((f"{name} ", "head"), *gauge, (text, ""))
