"""The processes on the GPUs: sorted, filtered and pinned, as a list or a tree.

Independent of Textual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gpuprobe.model.machine.devices import Container, GpuProcess
from gpuprobe.model.machine.monitor import GpuWork, Moment, ProcessLoad
from gpuprobe.model.record import record
from gpuprobe.model.text import human_bytes, visible
from gpuprobe.model.values import Bytes, Reading, Unavailable
from gpuprobe.reporters.text.info import missing

Key = tuple[int, int]
"""PID and start in clock ticks since boot: unique, although PIDs are reused."""

SORTS: tuple[str, ...] = ("memory", "gpu", "pid", "user", "sm", "cpu", "resident", "age", "command")


@record(frozen=True, slots=True)
class ListOptions:
    """The filter and the order of the list. ``needle``: words that must all match; one after
    ``user:``, ``pid:``, ``gpu:`` or ``job:`` must match there. ``device``: the key of the only
    listed device, or empty.
    """

    sort: str = "memory"
    reverse: bool = False
    tree: bool = False
    needle: str = ""
    device: str = ""
    pinned: frozenset[Key] = frozenset()


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process on one GPU; or, with an empty ``device``, a parent process in the tree.

    ``memory`` and ``resident`` in bytes, ``cpu`` in percent of one CPU, ``age`` in seconds, ``sm``
    in percent of the time that the GPU's multiprocessors were busy with the process. None: missing;
    the text is then the reason. All text is safe to print.
    """

    pid: int
    command: str
    ticks: int = 0  # 0: the process is not visible from here
    device: str = ""
    gpu: str = ""
    user: str = ""
    place: str = ""  # rank, job, container
    kinds: str = ""
    memory: int | None = None
    memory_text: str = "-"
    sm: int | None = None
    sm_text: str = "-"
    cpu: float | None = None
    cpu_text: str = "-"
    resident: int | None = None
    resident_text: str = "-"
    age: float | None = None
    age_text: str = ""
    parent: int = 0
    own: bool = False
    hidden: bool = False
    pinned: bool = False
    branch: str = ""  # the lines of the tree before the command

    @property
    def key(self) -> Key:
        """The process."""
        return (self.pid, self.ticks)

    @property
    def identity(self) -> tuple[int, int, str, str]:
        """A key that is unique among the rows of a reading."""
        return (self.pid, self.ticks, self.device, self.gpu)


def age_text(seconds: float) -> str:
    """``42 s``, ``12:05``, ``3:12:05``, ``5d 03h``, ``120 days``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    if hours >= 24:
        days = hours // 24
        return f"{days} days" if days >= 100 else f"{days}d {hours % 24:02}h"
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def process_rows(moment: Moment, options: ListOptions) -> tuple[ProcessRow, ...]:
    """The rows in the order of the screen: pinned ones first."""
    loads = {load.pid: load for load in moment.processes}
    names = {}
    for device in moment.inventory.devices:
        index = device.identity.nvml_index
        names[device.key] = "?" if isinstance(index, Unavailable) else str(index)
        for at, instance in enumerate(device.identity.mig_instances):
            names[instance.uuid] = f"{names[device.key]}.{at}"
    work = {found.device: found for found in moment.work}
    rows = [
        _row(
            process,
            names,
            loads.get(process.pid),
            work.get(process.device),
            moment.inventory.taken_at,
            options.pinned,
        )
        for process in moment.inventory.processes
    ]
    matches = matcher(options)
    rows = [row for row in rows if matches(row)]
    if options.tree:
        return tuple(_Tree(rows, loads, options).rows())
    return tuple(_sorted(rows, options))


def _row(
    process: GpuProcess,
    names: Mapping[str, str],
    load: ProcessLoad | None,
    work: GpuWork | None,
    now: float,
    pinned: frozenset[Key],
) -> ProcessRow:
    memory, memory_text = _formatted(process.memory, human_bytes)
    started = process.started_at.value
    age = None if isinstance(started, Unavailable) else max(0.0, now - started)
    sm, sm_text = _busy(process, work)
    row = ProcessRow(
        process.pid,
        _command(process),
        device=process.device,
        gpu=names.get(process.mig, "") or names.get(process.device, "?"),
        user=_text(process.user),
        place=_place(process),
        kinds="".join(kind[0].upper() for kind in process.kinds),
        memory=memory,
        memory_text=memory_text,
        sm=sm,
        sm_text=sm_text,
        age=age,
        age_text="-" if age is None else age_text(age),
        own=process.own,
        hidden=process.hidden,
    )
    return _with_load(row, load, pinned)


def _busy(process: GpuProcess, work: GpuWork | None) -> tuple[int | None, str]:
    if work is None:
        return None, "-"
    found = work.processes.value
    if isinstance(found, Unavailable):
        return None, missing(found)
    busy = next((one.sm for one in found if one.pid == process.pid), 0)
    return busy, f"{busy}%"


_T = TypeVar("_T", Bytes, float)


def _formatted(reading: Reading[_T], text: Callable[[_T], str]) -> tuple[_T | None, str]:
    """The value and its text; None and the reason in one word if it is missing."""
    value = reading.value
    return (None, missing(value)) if isinstance(value, Unavailable) else (value, text(value))


def _with_load(row: ProcessRow, load: ProcessLoad | None, pinned: frozenset[Key]) -> ProcessRow:
    """The row with the host's values of its process."""
    if load is None:
        return replace(row, pinned=(row.pid, 0) in pinned)
    cpu, cpu_text = _formatted(load.cpu, "{:.0f}%".format)
    resident, resident_text = _formatted(load.memory, human_bytes)
    return replace(
        row,
        ticks=load.ticks,
        parent=load.parent,
        cpu=cpu,
        cpu_text=cpu_text,
        resident=resident,
        resident_text=resident_text,
        pinned=(load.pid, load.ticks) in pinned,
    )


def _text(reading: Reading[str]) -> str:
    value = reading.value
    return missing(value) if isinstance(value, Unavailable) else visible(value)


def _command(process: GpuProcess) -> str:
    value = process.command.value
    return f"({visible(value.reason)})" if isinstance(value, Unavailable) else visible(value)


def _place(process: GpuProcess) -> str:
    """Rank, job, pod and container. Rank first: it is short, and what users search for."""
    parts = []
    if not isinstance(process.rank.value, Unavailable):
        parts.append(f"rank {process.rank.value}")
    container: Container | Unavailable = process.container.value
    if not isinstance(container, Unavailable):
        if container.job:
            parts.append(f"job {visible(container.job)}")
        if container.pod:
            parts.append(f"pod {visible(container.pod[:8])}")
        elif container.id:
            parts.append(f"{visible(container.runtime)} {visible(container.id[:12])}")
    return " ".join(parts)


# -- filter and order


def matcher(options: ListOptions) -> Callable[[ProcessRow], bool]:
    """A function that returns whether a row matches the filter."""
    terms = [_term(word) for word in options.needle.lower().split()]

    def matches(row: ProcessRow) -> bool:
        if options.device and row.device != options.device:
            return False
        return all(any(needle in hay for hay in texts(row)) for needle, texts in terms)

    return matches


def _term(word: str) -> tuple[str, Callable[[ProcessRow], Sequence[str]]]:
    where, colon, needle = word.partition(":")
    fields: dict[str, Callable[[ProcessRow], Sequence[str]]] = {
        "user": lambda row: (row.user.lower(),),
        "pid": lambda row: (str(row.pid),),
        "gpu": lambda row: (row.gpu,),
        "job": lambda row: (row.place.lower(),),
    }
    if colon and where in fields:
        return needle, fields[where]
    return word, lambda row: (
        row.command.lower(),
        row.user.lower(),
        row.place.lower(),
        str(row.pid),
    )


def _sorted(rows: Iterable[ProcessRow], options: ListOptions) -> list[ProcessRow]:
    """Numbers from the largest, names from A; rows without a value last in both directions."""
    ordered = sorted(rows, key=lambda row: (row.gpu, row.pid))  # stable order of ties
    value = _VALUES[options.sort]
    descending = (options.sort in _LARGEST_FIRST) is not options.reverse
    known = [row for row in ordered if value(row) is not None]
    known.sort(key=value, reverse=descending)  # type: ignore[arg-type]
    unknown = [row for row in ordered if value(row) is None]
    return sorted(known + unknown, key=lambda row: not row.pinned)


_LARGEST_FIRST = ("memory", "sm", "cpu", "resident", "age")
_VALUES: dict[str, Callable[[ProcessRow], float | int | str | tuple[int, ...] | None]] = {
    "memory": lambda row: row.memory,
    "gpu": lambda row: _numbers(row.gpu),
    "pid": lambda row: row.pid,
    "user": lambda row: row.user.lower(),
    "sm": lambda row: row.sm,
    "cpu": lambda row: row.cpu,
    "resident": lambda row: row.resident,
    "age": lambda row: row.age,
    "command": lambda row: row.command.lower(),
}


def _numbers(gpu: str) -> tuple[int, ...] | None:
    """The numbers of a GPU and its instance: ``10.2`` sorts after ``9``."""
    parts = gpu.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else None


# -- the tree


class _Tree:
    """Rows under the row of their parent process. A parent that is on no GPU gets a row too, with
    the memory of its children. A process on several GPUs is one family: several rows of one PID.
    """

    def __init__(
        self, rows: Iterable[ProcessRow], loads: Mapping[int, ProcessLoad], options: ListOptions
    ) -> None:
        self._options = options
        self._families = _families(rows, loads, options.pinned)
        self._children: dict[int, list[int]] = {}
        self._roots: list[int] = []
        self._totals: dict[int, ProcessRow] = {}
        for pid, family in self._families.items():
            parent = family[0].parent
            # PID namespaces and reused PIDs can form a cycle: its processes become roots.
            if parent in self._families and not _in_cycle(pid, self._families):
                self._children.setdefault(parent, []).append(pid)
            else:
                self._roots.append(pid)

    def _total(self, pid: int) -> ProcessRow:
        """A row with the sums of the whole branch, by which branches are sorted."""
        if pid not in self._totals:
            family = self._families[pid]
            branches = (self._total(child) for child in self._children.get(pid, ()))
            self._totals[pid] = _summed(family[0], [*family, *branches])
        return self._totals[pid]

    def rows(self) -> Iterator[ProcessRow]:
        """All rows from the top, each with the lines of its branch."""
        return self._walk(self._roots, "", top=True)

    def _walk(self, pids: Iterable[int], indent: str, *, top: bool = False) -> Iterator[ProcessRow]:
        ordered = [row.pid for row in _sorted(map(self._total, pids), self._options)]
        for pid in ordered:
            last = pid == ordered[-1]
            mark = "" if top else ("└─ " if last else "├─ ")
            below = "" if top else ("   " if last else "│  ")
            family = _sorted(self._families[pid], replace(self._options, pinned=frozenset()))
            for number, row in enumerate(family):
                branch = indent + (below if number else mark)
                if row.device:
                    yield replace(row, branch=branch)
                else:
                    total = self._total(pid)
                    row = replace(row, memory=total.memory, memory_text=total.memory_text)
                    yield replace(row, branch=branch)
            yield from self._walk(self._children.get(pid, ()), indent + below)


def _families(
    rows: Iterable[ProcessRow], loads: Mapping[int, ProcessLoad], pinned: frozenset[Key]
) -> dict[int, list[ProcessRow]]:
    """The rows of each PID, with one for each parent process that is on no GPU."""
    families: dict[int, list[ProcessRow]] = {}
    for row in rows:
        families.setdefault(row.pid, []).append(row)
    for pid in list(families):
        parent = families[pid][0].parent
        if parent > 1 and parent not in families and parent in loads:
            families[parent] = [_parent_row(loads[parent], pinned)]
    return families


def _in_cycle(pid: int, families: Mapping[int, Sequence[ProcessRow]]) -> bool:
    """Whether a process is its own ancestor."""
    visited = {pid}
    ancestor = families[pid][0].parent
    while ancestor in families:
        if ancestor in visited:
            return ancestor == pid
        visited.add(ancestor)
        ancestor = families[ancestor][0].parent
    return False


def _summed(row: ProcessRow, rows: Sequence[ProcessRow]) -> ProcessRow:
    def add(values: Sequence[float | int | None]) -> float | int | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    memory, busy = add([r.memory for r in rows]), add([r.sm for r in rows])
    # A process on two GPUs has two rows, but one CPU time and one resident memory.
    once = list({r.pid: r for r in rows}.values())
    return replace(
        row,
        memory=None if memory is None else int(memory),
        memory_text="-" if memory is None else human_bytes(int(memory)),
        sm=None if busy is None else int(busy),
        cpu=add([r.cpu for r in once]),
        resident=row.resident,
        pinned=any(r.pinned for r in rows),
    )


def _parent_row(load: ProcessLoad, pinned: frozenset[Key]) -> ProcessRow:
    return _with_load(ProcessRow(load.pid, visible(load.name)), load, pinned)
