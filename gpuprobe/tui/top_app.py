"""``gpuprobe top``: the GPUs of this machine, again and again."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.message import Message
from textual.widgets import DataTable, Footer, Static
from textual.worker import get_current_worker

from gpuprobe.api.devices import DeviceWatch
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.devices import Device, Inventory
from gpuprobe.model.text import human_bytes, visible
from gpuprobe.reporters.info_text import cells, headline
from gpuprobe.tui.base import ProbeApp, fill
from gpuprobe.tui.plot import draw

__all__ = ["HISTORY", "TopApp"]

HISTORY = 600
"""Readings kept for the plot of each GPU: ten minutes at one a second."""

_DEVICES = ("NVML", "cuda", "GPU", "memory used / total", "util", "temp", "power", "")
_PROCESSES = ("GPU", "pid", "user", "memory", "type", "command")


class TopApp(ProbeApp):
    """Devices, a plot of the chosen one, and processes. NVML is asked in a thread; a reading
    that fails leaves the last one on the screen, says so, and is tried again.
    """

    CSS = """
    #title { height: 1; padding: 0 1; background: $panel; }
    #problem { height: auto; padding: 0 1; background: $error; color: $text; display: none; }
    #problem.shown { display: block; }
    #devices { height: auto; max-height: 50%; }
    #plot { height: 9; padding: 0 1; color: $accent; }
    #processes { height: 1fr; }
    #notes { height: auto; max-height: 5; padding: 0 1; color: $warning; }
    .low #plot { display: none; }
    .low #notes { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "move(1)", "down", show=False),
        Binding("k", "move(-1)", "up", show=False),
        Binding("m", "plot", "memory/utilisation"),
        Binding("space", "pause", "pause"),
    ]
    HELP_TEXT = (
        "↑ ↓ j k choose a GPU   m plot its memory or utilisation   space pause\n"
        "d light or dark   s save the screen as SVG   q quit"
    )

    class Taken(Message):
        """A reading."""

        def __init__(self, inventory: Inventory) -> None:
            super().__init__()
            self.inventory = inventory

    class Failed(Message):
        """A reading that failed as a whole."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, demo: str | None = None, interval: float = 1.0) -> None:
        super().__init__()
        self.demo = demo
        self.interval = interval
        self.inventory: Inventory | None = None
        self.paused = False
        self._of_memory = True
        self._memory: dict[str, deque[int]] = {}
        self._utilisation: dict[str, deque[int]] = {}

    def compose(self) -> ComposeResult:
        # Kept, and not looked up: a message may still come while the screen is being taken down.
        self._title = Static("asking …", id="title", markup=False)
        self._problem = Static(id="problem", markup=False)
        self._devices: DataTable[Any] = DataTable(
            id="devices", cursor_type="row", zebra_stripes=True
        )
        self._plot = Static(id="plot", markup=False)
        self._processes: DataTable[Any] = DataTable(id="processes", cursor_type="row")
        self._notes = Static(id="notes", markup=False)
        yield self._title
        yield self._problem
        yield self._devices
        yield self._plot
        yield self._processes
        yield self._notes
        yield Footer()

    def on_mount(self) -> None:
        self._devices.add_columns(*_DEVICES)
        self._processes.add_columns(*_PROCESSES)
        self._devices.focus()
        self.run_worker(self._watch, thread=True, exclusive=True)

    # -- reading, in a thread

    def _watch(self) -> None:
        worker = get_current_worker()
        while not worker.is_cancelled:
            try:
                with DeviceWatch(("nvml",), self.demo, detail="table") as watch:
                    while not worker.is_cancelled:
                        if not self.paused:
                            found = watch.read()
                            self.post_message(self.Taken(found))
                            if not any(source.available for source in found.sources):
                                break  # start anew: a driver may come back
                        self._wait(worker)
            except GpuprobeError as error:
                self.post_message(self.Failed(str(error)))
            self._wait(worker)

    def _wait(self, worker: Any) -> None:
        until = time.monotonic() + self.interval
        while time.monotonic() < until and not worker.is_cancelled:
            time.sleep(min(0.05, self.interval))

    # -- showing

    def on_top_app_taken(self, message: Taken) -> None:
        found = self.inventory = message.inventory
        for device in found.devices:
            total, free = device.memory.total.value, device.memory.free.value
            if isinstance(total, int) and isinstance(free, int):
                self._kept(self._memory, device).append(total - free)
            utilisation = device.utilisation.gpu.value
            if isinstance(utilisation, int):
                self._kept(self._utilisation, device).append(utilisation)
        problem = "" if any(s.available for s in found.sources) else _reasons(found)
        self._say(problem)
        self._title.update(Text(headline(found), no_wrap=True))
        fill(self._devices, [self._cells(device) for device in found.devices])
        names = {device.key: cells(device).nvml for device in found.devices}
        fill(
            self._processes,
            [
                (
                    names.get(process.device, "?"),
                    str(process.pid),
                    _text(process.user.value),
                    _bytes(process.memory.value),
                    ", ".join(process.kinds),
                    _text(process.command.value),
                )
                for process in found.processes
            ],
        )
        notes = [f"! {one.message}" for one in found.disagreements if not one.expected]
        notes += [f"! {error.source}: {error.message}" for error in found.errors if not problem]
        self._notes.update(Text("\n".join(visible(n) for n in notes)))
        self._show_plot()

    def on_top_app_failed(self, message: Failed) -> None:
        self._say(message.text)

    def _say(self, text: str) -> None:
        self._problem.set_class(bool(text), "shown")
        self._problem.update(Text(visible(text)))

    def _kept(self, histories: dict[str, deque[int]], device: Device) -> deque[int]:
        return histories.setdefault(device.key, deque(maxlen=HISTORY))

    def _cells(self, device: Device) -> tuple[str, ...]:
        row = cells(device)
        return (*row[:7], " · ".join(row.remarks))

    def _show_plot(self) -> None:
        plot = self._plot
        found, row = self.inventory, self._devices.cursor_row
        if found is None or not 0 <= row < len(found.devices) or not plot.content_size.width:
            plot.update("")
            return
        device = found.devices[row]
        width, height = plot.content_size.width, plot.content_size.height - 1
        name = f"GPU {cells(device).nvml}"
        if self._of_memory:
            total = device.memory.total.value
            drawn = draw(
                list(self._memory.get(device.key, ())),
                width,
                max(2, height),
                highest=total if isinstance(total, int) else 0,
                axis="reading",
            )
            title = f"{name}: memory used"
        else:
            drawn = draw(
                list(self._utilisation.get(device.key, ())),
                width,
                max(2, height),
                label=lambda value: f"{value}%",
                highest=100,
                axis="reading",
            )
            title = f"{name}: utilisation"
        plot.update(Text("\n".join((title, *drawn.lines)), no_wrap=True))

    def on_data_table_row_highlighted(self) -> None:
        self._show_plot()

    def on_resize(self, event: Resize) -> None:
        self.screen.set_class(event.size.height < 24, "low")
        self.call_after_refresh(self._show_plot)

    # -- keys

    def action_move(self, by: int) -> None:
        table = self._devices
        table.move_cursor(row=max(0, min(table.row_count - 1, table.cursor_row + by)))

    def action_plot(self) -> None:
        self._of_memory = not self._of_memory
        self._show_plot()

    def action_pause(self) -> None:
        self.paused = not self.paused
        self.notify("paused" if self.paused else "going on", markup=False)


def _reasons(found: Inventory) -> str:
    reasons = "; ".join(source.reason for source in found.sources if not source.available)
    return f"no GPU can be asked: {reasons}"


def _text(value: object) -> str:
    return visible(value) if isinstance(value, str) else "-"


def _bytes(value: object) -> str:
    return human_bytes(value) if isinstance(value, int) else "-"
