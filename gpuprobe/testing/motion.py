"""A fake fleet whose load moves, for the demo of a screen that is left open.

What moves is a function of the time that passed and of what the fleet describes: two runs look
alike. A GPU that is described as idle stays idle; memory stays as it is, so that it still
equals what the processes hold.
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

from gpuprobe.testing.fake_machine import host_stat, process_stat
from gpuprobe.testing.fleet import Fleet

__all__ = ["Motion"]


class Motion:
    """Changes the facts of ``fleet`` in place, and the CPU time in ``proc``, its ``/proc``."""

    def __init__(self, fleet: Fleet, proc: Path | None = None) -> None:
        self._fleet = fleet
        self._base = [copy.deepcopy(device) for device in fleet.devices]
        self._time = 0.0
        self._proc = proc
        self._booted = 0.0
        if proc is not None:
            match = re.search(r"btime (\d+)", (proc / "stat").read_text("ascii"))
            self._booted = float(match.group(1)) if match else 0.0

    def clock(self) -> float:
        """Seconds that passed on this machine."""
        return self._time

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._time += seconds
        for index, device in enumerate(self._fleet.devices):
            _move(device, self._base[index], self._time, index)
        if self._proc is not None:
            stat = host_stat(self._fleet, self._booted, self._time)
            (self._proc / "stat").write_text(stat, "ascii")
            for at, (pid, facts) in enumerate(self._fleet.proc.items()):
                # A little more in one second than in the next.
                busy = self._time + 0.12 * math.sin(self._time / 3 + at)
                line = process_stat(pid, facts, max(0.0, busy))
                (self._proc / pid / "stat").write_bytes(line.encode("utf-8", "surrogateescape"))


def _move(device: dict[str, Any], base: dict[str, Any], time: float, index: int) -> None:
    # A training step of some seconds: busy, then a dip for data; a slow tide over minutes.
    period = 7 + 3 * (index % 4)
    phase = (time + 2.7 * index) % period / period
    dip = 0.35 if phase > 0.8 else 1.0
    tide = 0.94 + 0.06 * math.sin(time / 40 + index)
    level = dip * tide
    busy = base.get("utilisation")
    if isinstance(busy, list):
        device["utilisation"] = [min(100, round(value * level)) for value in busy]
    power = base.get("power")
    idle = isinstance(busy, list) and not any(busy)
    if isinstance(power, dict) and isinstance(power.get("draw"), int) and not idle:
        device["power"] = {**power, "draw": round(power["draw"] * (0.45 + 0.55 * level))}
    if isinstance(base.get("temperature"), int) and not idle:
        device["temperature"] = round(base["temperature"] - 3 + 4 * tide + 1.5 * level)
    traffic = base.get("pcie_throughput")
    if isinstance(traffic, list) and not idle:
        burst = 4000 * (1.6 - level)
        device["pcie_throughput"] = [round(kilobytes * burst) for kilobytes in traffic]
    links = base.get("nvlinks")
    if isinstance(links, list) and not idle:
        # Counters of KiB: about 10 GB/s on each link of a GPU that is fully busy.
        share = busy[0] / 100 if isinstance(busy, list) else 0.0
        sent = round(share * 1e7 * (time + math.sin(time / 5 + index)))
        device["nvlinks"] = [
            {**link, "kib": [count + sent for count in link["kib"]]} if "kib" in link else link
            for link in links
        ]
