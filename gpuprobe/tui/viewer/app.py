"""``gpuprobe view``: runs, recordings and snapshots, as an application of its own."""

from __future__ import annotations

from textual.screen import Screen

from gpuprobe.api.live import Followed
from gpuprobe.errors import GpuprobeError
from gpuprobe.tui.probe_app import ProbeApp
from gpuprobe.tui.runs import RunsScreen
from gpuprobe.tui.viewer.reading import ReadFailed
from gpuprobe.tui.viewer.screen import ViewScreen


class ViewApp(ProbeApp):
    """Shows a recording; or, without one, those that are being written on this machine.

    ``failure`` is why nothing could be shown at all; the app has ended then. ``demo`` names a
    fake fleet to ask for a GPU's other processes.
    """

    def __init__(
        self, followed: Followed | None = None, interval: float = 0.5, *, demo: str | None = None
    ) -> None:
        super().__init__()
        self.followed = followed
        self.interval = interval
        self.failure: GpuprobeError | None = None
        self._demo = demo

    def get_default_screen(self) -> Screen[None]:
        if self.followed is None:
            return RunsScreen(demo=self._demo)
        return ViewScreen(self.followed, self.interval, demo=self._demo)

    def on_read_failed(self, message: ReadFailed) -> None:
        if self.followed is not None and message.nothing_shown:
            self.failure = message.error
            self.exit()
