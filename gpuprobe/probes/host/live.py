"""The host and its processes for a monitor: what moves each time, the rest once.

Of a process only ``/proc/PID/stat`` is read each time. Its user, command, container and rank
are read when it appears, and again every `RENEW` seconds: a program may replace itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gpuprobe.model.machine.devices import GpuProcess
from gpuprobe.model.machine.monitor import HostLoad, ProcessLoad
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable
from gpuprobe.probes.host.describe import (
    ProcTree,
    add_facts,
    meminfo,
    process_facts,
)

RENEW = 30.0
"""Seconds after which what rarely changes of a process is read again."""

_FIRST = Unavailable("counted only since the last reading", ReadStatus.NOT_COLLECTED)


@dataclass(frozen=True, slots=True)
class Stat:
    """What is used of a ``/proc/PID/stat`` line (Linux, proc_pid_stat(5)).

    ``busy`` and ``start`` in clock ticks, ``resident`` in pages.
    """

    name: str
    state: str
    parent: int
    busy: int
    start: int
    resident: int


def parse_stat(line: str) -> Stat | Unavailable:
    """The name may hold anything, brackets too: it ends at the last one."""
    head, closed, tail = line.rpartition(")")
    fields = tail.split()
    if not closed or len(fields) < 20:
        return Unavailable("the stat line is incomplete")
    name = head.partition("(")[2]
    try:
        return Stat(
            name=name,
            state=fields[0],
            parent=int(fields[1]),
            busy=int(fields[11]) + int(fields[12]),
            start=int(fields[19]),
            resident=int(fields[21]) if len(fields) > 21 else 0,
        )
    except ValueError:
        return Unavailable("the stat line has invalid numbers")


@dataclass(slots=True)
class _Known:
    """What is kept of a process between readings."""

    start: int
    facts: dict[str, Any]
    read_at: float
    busy: int = -1
    busy_at: float = 0.0


class HostWatch:
    """One ``/proc``, read again and again. ``clock`` in seconds."""

    def __init__(
        self, tree: ProcTree | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tree = ProcTree() if tree is None else tree
        self._clock = clock
        self._known: dict[int, _Known] = {}
        self._cpu: tuple[int, int] | None = None
        self._hertz = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")

    # -- processes

    def processes(
        self, listed: Iterable[GpuProcess]
    ) -> tuple[tuple[GpuProcess, ...], tuple[ProcessLoad, ...]]:
        """The listed processes with what is known of each, and the load of each and of its
        parent. A process that ended meanwhile says so.
        """
        now = self._clock()
        described: list[GpuProcess] = []
        loads: dict[int, ProcessLoad] = {}
        facts: dict[int, dict[str, Any]] = {}
        for process in listed:
            if process.pid not in facts:
                facts[process.pid], load = self._read(process.pid, now)
                if load is not None:
                    loads[process.pid] = load
            described.append(add_facts(process, facts[process.pid]))
        for load in list(loads.values()):
            if load.parent > 1 and load.parent not in loads:
                _, parent = self._read(load.parent, now, described=False)
                if parent is not None:
                    loads[parent.pid] = parent
        self._known = {pid: known for pid, known in self._known.items() if pid in loads}
        return tuple(described), tuple(loads.values())

    def _read(
        self, pid: int, now: float, *, described: bool = True
    ) -> tuple[dict[str, Any], ProcessLoad | None]:
        line = self.tree.read(str(pid), "stat")
        stat = line if isinstance(line, Unavailable) else parse_stat(line)
        if isinstance(stat, Unavailable):
            self._known.pop(pid, None)
            return (process_facts(self.tree, pid) if described else {}), None
        known = self._known.get(pid)
        if known is None or known.start != stat.start:
            known = self._known[pid] = _Known(stat.start, {}, -RENEW)
        if described and (not known.facts or now - known.read_at >= RENEW):
            known.facts = process_facts(self.tree, pid)
            known.read_at = now
        cpu: Reading[float] = Reading(_FIRST, "host")
        if known.busy >= 0 and now > known.busy_at:
            ticks = max(0, stat.busy - known.busy)
            cpu = Reading(100 * ticks / self._hertz / (now - known.busy_at), "host")
        known.busy, known.busy_at = stat.busy, now
        return known.facts, ProcessLoad(
            pid=pid,
            parent=stat.parent,
            ticks=stat.start,
            name=stat.name,
            state=stat.state,
            cpu=cpu,
            memory=Reading(Bytes(stat.resident * self._page), "host"),
        )

    # -- the machine

    def load(self) -> HostLoad:
        """CPU, memory and load of the machine, as ``/proc`` has them."""
        memory = self.tree.read("meminfo")
        return HostLoad(
            cpu=self._busy(),
            load=_averages(self.tree.read("loadavg")),
            memory_total=meminfo(memory, "MemTotal"),
            memory_available=meminfo(memory, "MemAvailable"),
            swap_total=meminfo(memory, "SwapTotal"),
            swap_free=meminfo(memory, "SwapFree"),
        )

    def _busy(self) -> Reading[float]:
        text = self.tree.read("stat")
        if isinstance(text, Unavailable):
            return Reading(text, "host")
        fields = text.partition("\n")[0].split()[1:9]
        try:
            # user nice system idle iowait irq softirq steal (proc_stat(5)); guests are in user.
            counts = [int(field) for field in fields]
        except ValueError:
            counts = []
        if len(counts) < 5:
            return Reading(Unavailable("/proc/stat has no cpu line"), "host")
        total, idle = sum(counts), counts[3] + counts[4]
        before, self._cpu = self._cpu, (total, idle)
        if before is None or total <= before[0]:
            return Reading(_FIRST, "host")
        share = 1 - (idle - before[1]) / (total - before[0])
        return Reading(100 * min(1.0, max(0.0, share)), "host")


def _averages(text: str | Unavailable) -> Reading[tuple[float, float, float]]:
    if isinstance(text, Unavailable):
        return Reading(text, "host")
    try:
        one, five, fifteen = (float(field) for field in text.split()[:3])
    except ValueError:
        return Reading(Unavailable("/proc/loadavg is not three numbers"), "host")
    return Reading((one, five, fifteen), "host")
