"""The inventory as text (``gpuprobe info``): availability of CUDA, the table of GPUs, problems.

A GPU has at most two lines: its figures, then its problems and processes. `value_lines` adds every
value with its source and status (``-v``). Names are escaped with `visible` and cut by display
width.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import chain
from typing import Any, Final, NamedTuple, TextIO

from gpuprobe._version import __version__
from gpuprobe.catalogue.architectures import no_kernels
from gpuprobe.model.colour import uses_colour
from gpuprobe.model.machine.devices import (
    Container,
    Device,
    GpuProcess,
    Inventory,
    NvLink,
    TopologyMatrix,
)
from gpuprobe.model.text import cut, human_bytes, padded, plural, ranges, visible, width, wrapped
from gpuprobe.model.values import Reading, ReadStatus, Unavailable

WIDTH = 100
"""The width of lines if the stream has no width."""
LEAST_WIDTH = 48

_BAR = 10
_NAME = 25
_INDENT = 11  # the column of the name
_AMOUNTS = 17  # "70.2/79.6 GiB" and the like
_MISSING = {
    ReadStatus.UNSUPPORTED: "n/a",
    ReadStatus.DENIED: "denied",
    ReadStatus.LOST: "lost",
    ReadStatus.NOT_COLLECTED: "-",
    ReadStatus.ERROR: "error",
}

CALM_REASONS = ("idle", "application clocks setting", "sync boost", "display clock setting")
"""Throttle reasons that are harmless: settings, or an idle GPU."""


class _Paint(NamedTuple):
    """Escape sequences before each kind of text; empty without colour."""

    good: str = ""
    warning: str = ""
    bad: str = ""
    strong: str = ""
    end: str = ""

    def load(self, percent: float) -> str:
        """The colour of a fill level: good below 70 %, bad from 90 %."""
        return self.good if percent < 70 else self.warning if percent < 90 else self.bad

    def on(self, text: str, begin: str) -> str:
        return f"{begin}{text}{self.end}" if begin and text.strip() else text


_PLAIN: Final = _Paint()
_COLOURS: Final = _Paint("\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[1m", "\x1b[0m")


class _Columns(NamedTuple):
    """The columns of a table of some width: widths of the name and of the memory's bar, and whether
    temperature and power are shown.
    """

    width: int
    name: int
    bar: int
    temperature: bool
    power: bool

    @classmethod
    def of(cls, columns: int) -> _Columns:
        columns = max(LEAST_WIDTH, columns)
        least = _INDENT + _NAME + 1 + _AMOUNTS + 7  # with utilisation, without the rest
        more = max(0, columns - WIDTH)
        return cls(
            width=columns,
            name=max(8, min(_NAME, _NAME + columns - least)) + min(more, 20),
            bar=0 if columns < least + 30 else _BAR + min(20, max(0, more - 20)),
            temperature=columns >= least + 7,
            power=columns >= least + 19,
        )


def write(
    inventory: Inventory,
    stream: TextIO,
    *,
    columns: int = 0,
    colour: bool | None = None,
    full: bool = False,
) -> None:
    """Write the table and the notes, in lines of at most ``columns`` (`LEAST_WIDTH` or more; 0:
    `WIDTH`). ``colour`` is None for what the stream supports; ``full``: also every value.
    Characters that the stream cannot encode are replaced.
    """
    colour = uses_colour(stream) if colour is None else colour
    found = lines(inventory, columns=columns or WIDTH, colour=colour)
    if full:
        found = chain(found, value_lines(inventory))
    text = "".join(line + "\n" for line in found)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if not text.isascii():
        # "?" instead of an exception, for a terminal in the C locale.
        text = text.encode(encoding, "replace").decode(encoding)
    stream.write(text)


def lines(inventory: Inventory, *, columns: int = WIDTH, colour: bool = False) -> Iterator[str]:
    """The lines without line ends, at most ``columns`` wide."""
    table = _Columns.of(columns)
    paint = _COLOURS if colour else _PLAIN
    width = table.width
    yield cut(headline(inventory), width)
    available, sentence = verdict(inventory)
    for line in wrapped(sentence, "", width):
        yield paint.on(line, paint.good if available else paint.bad)
    if inventory.devices:
        yield ""
        yield paint.on(_heading(table), paint.strong)
        for device in inventory.devices:
            yield from _device_lines(device, inventory, table, paint)
        for text in _without_kernels(inventory):
            yield from wrapped(text, " ! ", width)
    names = device_names(inventory)
    if inventory.disagreements:
        yield ""
        yield "Differences between sources:"
        for one in inventory.disagreements:
            mark = "·" if one.expected else "!"
            yield from wrapped(_renamed(one.message, names), f" {mark} ", width)
    if inventory.errors:
        yield ""
        yield "Unavailable values:"
        yield from error_lines(inventory, names, width)


def _without_kernels(inventory: Inventory) -> Iterator[str]:
    """The GPUs that the installed torch has no kernels for, if torch was read."""
    version, archs = inventory.host.torch.value, inventory.host.torch_archs.value
    if isinstance(version, Unavailable) or isinstance(archs, Unavailable) or not archs:
        return
    names = device_names(inventory)
    for device in inventory.devices:
        capability = device.compute_capability.value
        if not isinstance(capability, Unavailable):
            text = no_kernels(version, archs, (capability[0], capability[1]))
            if text:
                yield f"{visible(text)}: {visible(names.get(device.key, device.key))}"


def verdict(inventory: Inventory) -> tuple[bool, str]:
    """Whether programs can use CUDA here, and a sentence about it."""
    no = "CUDA is not available"
    why = {s.name: s.reason for s in inventory.sources if not s.available and s.reason}
    count = len(inventory.devices)
    unfit = _torch_without_cuda(inventory)
    if not count:
        reasons = [why[name] for name in ("nvml", "cuda") if name in why]
        if len(reasons) == 2 and all("is not installed" in reason for reason in reasons):
            reasons = ["no NVIDIA driver is installed"]
        reason = reasons[0] if reasons else "this machine has no NVIDIA GPU"
        return False, f"{no}: {reason}" + (f"; {unfit}" if unfit else "")
    if "cuda" in why:
        return False, f"{no}: {why['cuda']}"
    numbers = [_cuda_index(device) for device in inventory.devices]
    usable = sum(number.isdecimal() for number in numbers)
    setting = inventory.visibility.setting
    hidden = "" if setting is None else f" (CUDA_VISIBLE_DEVICES={visible(setting)})"
    if not usable and "?" not in numbers:
        return False, f"{no}: none of {count} GPUs is visible{hidden}"
    if unfit:
        return False, f"{no} to torch: {unfit}"
    if usable == count or "?" in numbers:
        return True, "CUDA is available" + (f" on {count} GPUs" if count > 1 else "")
    return True, f"CUDA is available on {usable} of {count} GPUs{hidden}"


def _torch_without_cuda(inventory: Inventory) -> str:
    """A clause about a torch without CUDA; "" for other builds and for simulated fleets."""
    torch = inventory.host.torch.value
    if inventory.demo or not isinstance(torch, str) or not torch.endswith("+cpu"):
        return ""
    return f"torch {visible(torch)} is built without CUDA"


def headline(inventory: Inventory) -> str:
    """The first line: versions, and the number of GPUs."""
    parts = [f"gpuprobe {__version__}"]
    if inventory.demo:
        parts.append(f"demo: {visible(inventory.demo)}")
    driver = inventory.driver
    for label, reading in (
        ("driver", driver.version),
        ("CUDA", driver.cuda),
        ("torch", inventory.host.torch),
    ):
        value = reading.value
        if isinstance(value, str):
            parts.append(f"{label} {visible(value)}")
        elif label == "torch":
            parts.append("no torch")
    if inventory.host.sandbox:
        parts.append(f"in {visible(inventory.host.sandbox)}")
    count = len(inventory.devices)
    parts.append("1 GPU" if count == 1 else f"{count} GPUs")
    return " · ".join(parts)


def _heading(table: _Columns) -> str:
    memory = padded("memory used / total" if table.bar else "memory", _memory_width(table))
    return (
        f"{'NVML':>4} {'cuda':>4}  {padded('GPU', table.name)} {memory} {'util':>6}"
        + (f" {'temp':>6}" if table.temperature else "")
        + (f" {'power':>11}" if table.power else "")
    )


def _memory_width(table: _Columns) -> int:
    return _AMOUNTS + (table.bar + 1 if table.bar else 0)


class DeviceCells(NamedTuple):
    """The printable cells of one GPU."""

    nvml: str
    cuda: str
    name: str
    memory: str
    utilisation: str
    temperature: str
    power: str
    remarks: tuple[str, ...]


def cells(device: Device) -> DeviceCells:
    """The cells of one GPU, with a word for each missing value."""
    name = device.name.value
    if isinstance(name, Unavailable):
        name = f"({missing(name)}: {name.reason})"
    else:
        name = name.removeprefix("NVIDIA ")
    return DeviceCells(
        nvml=_index(device.identity.nvml_index),
        cuda=_cuda_index(device),
        name=visible(name),
        memory=_memory(device, _BAR),
        utilisation=with_unit(device.utilisation.gpu, "%"),
        temperature=with_unit(device.temperature.gpu, "°C"),
        power=_power(device),
        remarks=tuple(_remarks(device)),
    )


def _device_lines(
    device: Device, inventory: Inventory, table: _Columns, paint: _Paint
) -> Iterator[str]:
    row = cells(device)
    memory = padded(_memory(device, table.bar), _memory_width(table))
    rate = device.utilisation.gpu.value
    busy = paint.good if isinstance(rate, int) and rate else ""
    line = (
        f"{row.nvml:>4} {row.cuda:>4}  {paint.on(padded(row.name, table.name), paint.strong)}"
        f" {paint.on(memory, paint.load(_filled(device)))}"
        f" {paint.on(f'{row.utilisation:>6}', busy)}"
    )
    if table.temperature:
        line += f" {row.temperature:>6}"
    if table.power:
        line += f" {row.power:>11}"
    yield line.rstrip()
    mine = [p for p in inventory.processes if p.device == device.key]
    parts = list(row.remarks)
    if mine:
        more = f" (+{len(mine) - 1} more)" if len(mine) > 1 else ""
        taken = _INDENT + sum(width(part) + 3 for part in parts) + len(more)
        parts.append(_process(mine[0], max(20, table.width - taken)) + more)
    if parts:
        shown = cut(" " * _INDENT + " · ".join(parts), table.width)
        remarks = " · ".join(row.remarks)
        if remarks and shown[_INDENT:].startswith(remarks):
            end = _INDENT + len(remarks)
            shown = f"{shown[:_INDENT]}{paint.on(remarks, paint.warning)}{shown[end:]}"
        yield shown


def _index(value: int | Unavailable) -> str:
    return "-" if isinstance(value, Unavailable) else str(value)


def _cuda_index(device: Device) -> str:
    """The ordinal in CUDA, of the first MIG instance if CUDA shows those; ``-`` for a hidden
    GPU."""
    numbers = [device.identity.cuda_ordinal]
    numbers += [m.cuda_ordinal for m in device.identity.mig_instances]
    known = [n for n in numbers if not isinstance(n, Unavailable)]
    if known:
        return str(known[0])
    first = numbers[0]
    failed = isinstance(first, Unavailable) and first.status is ReadStatus.ERROR
    return "?" if failed else "-"


def missing(value: Unavailable) -> str:
    """A word for a missing value."""
    return _MISSING[value.status]


def with_unit(reading: Reading[int], unit: str) -> str:
    """The value with its unit, or a word for a missing value."""
    value = reading.value
    return missing(value) if isinstance(value, Unavailable) else f"{value}{unit}"


def _power(device: Device) -> str:
    draw, limit = device.power.draw.value, device.power.limit.value
    if isinstance(draw, Unavailable):
        return missing(draw)
    if isinstance(limit, Unavailable):
        return f"{draw / 1000:.0f} W"
    return f"{draw / 1000:.0f}/{limit / 1000:.0f} W"


def _filled(device: Device) -> float:
    """The fill level of its memory in percent; 0 if unknown."""
    total, free = device.memory.total.value, device.memory.free.value
    if isinstance(total, Unavailable) or isinstance(free, Unavailable) or not total:
        return 0.0
    return 100 * (total - free) / total


def _memory(device: Device, bar_cells: int) -> str:
    """Used and total memory, after a bar of ``bar_cells``."""
    total, free = device.memory.total.value, device.memory.free.value
    if device.unified_memory.value is True:
        return "shared with the host"
    if isinstance(total, Unavailable):
        return missing(total)
    if isinstance(free, Unavailable) or not total:
        return f"? / {human_bytes(total)}"
    used = total - free
    filled = round(bar_cells * used / total)
    bar = "█" * filled + "░" * (bar_cells - filled) + " " if bar_cells else ""
    amount, unit = human_bytes(total).split(" ")
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    return f"{bar}{used / scale:.1f}/{amount} {unit}"


def _remarks(device: Device) -> Iterator[str]:
    """Problems and modes of the device: throttling, errors, MIG."""
    reasons = device.throttling.value
    if not isinstance(reasons, Unavailable):
        trouble = [reason for reason in reasons if reason not in CALM_REASONS]
        if trouble:
            yield "throttled: " + ", ".join(map(visible, trouble))
    for label, reading in (
        ("uncorrected ECC error", device.ecc.uncorrected_volatile),
        ("retired page", device.retired.pages_double_bit),
    ):
        count = reading.value
        if isinstance(count, int) and count:
            yield plural(count, label)
    if device.retired.rows_failed.value is True:
        yield "row remap failed"
    if device.retired.rows_pending.value is True or device.retired.pages_pending.value is True:
        yield "reset pending"
    if device.mig.enabled.value is True:
        instances = device.identity.mig_instances
        names = ", ".join(visible(m.name) or "?" for m in instances) or "no instance"
        yield f"MIG: {names}"


def _process(process: GpuProcess, room: int) -> str:
    """One process in about ``room`` columns; the command is shortened, the rank is not."""
    memory = process.memory.value
    size = "? memory" if isinstance(memory, Unavailable) else human_bytes(memory)
    if process.hidden:
        return f"pid {process.pid} {size} (another PID namespace)"
    user, command = process.user.value, process.command.value
    if isinstance(user, Unavailable) and isinstance(command, Unavailable):
        return f"pid {process.pid} {size} ({user.reason})"
    owner = "?" if isinstance(user, Unavailable) else cut(visible(user), 16)
    rank = process.rank.value
    label = "" if isinstance(rank, Unavailable) else f" [rank {rank}]"
    start = f"pid {process.pid} {owner} {size} "
    if isinstance(command, Unavailable):
        return start.rstrip() + label
    return start + cut(visible(command), max(10, room - width(start) - len(label))) + label


def device_names(inventory: Inventory) -> dict[str, str]:
    """Device key -> ``GPU 3``, by the NVML index that the table shows."""
    names = {}
    for device in inventory.devices:
        index = device.identity.nvml_index
        if not isinstance(index, Unavailable):
            names[device.key] = f"GPU {index}"
    return names


def _renamed(text: str, names: dict[str, str]) -> str:
    for key, name in names.items():
        text = text.replace(key, name)
    return text


def error_lines(inventory: Inventory, names: dict[str, str], columns: int = WIDTH) -> Iterator[str]:
    """One line per device, status and reason: forty denied counters are one line."""
    grouped: dict[tuple[str, str, str, str], list[str]] = {}
    for error in inventory.errors:
        key = (error.source, error.device, error.status.value, error.message)
        grouped.setdefault(key, []).append(error.what)
    for (source, device, status, message), what in grouped.items():
        where = f"{names.get(device, device)}: " if device else ""
        named = [w.removeprefix("DeviceGet") for w in what if w]
        about = f" ({', '.join(named)})" if named else ""
        word = "" if status == "error" else f"{status}: "
        yield from wrapped(f"{source}: {where}{word}{message}{about}", " ! ", columns)


_UNITS = {
    "utilisation": "%",
    "temperature": "°C",
    "power": "mW",
    "clocks": "MHz",
    "fans": "%",
}
_BYTES = {"memory", "memory_total", "memory_used", "memory_free", "memory_available"}
_RATES = {"tx", "rx"}

# nvidia-smi's abbreviations of NVML's levels.
_LEVELS = {
    "internal": "INT",
    "single": "PIX",
    "multiple": "PXB",
    "hostbridge": "PHB",
    "node": "NODE",
    "system": "SYS",
}


def value_lines(inventory: Inventory) -> Iterator[str]:
    """Every value with its source and status, below the table: sources, host, devices, memory,
    processes, topology.
    """
    yield ""
    yield "Sources"
    for source in inventory.sources:
        state = "asked" if source.available else f"not available: {source.reason}"
        yield from wrapped(f"{source.name}: {state}", "  ", WIDTH)
    visibility = inventory.visibility
    setting = "not set" if visibility.setting is None else repr(visibility.setting)
    yield from wrapped(
        f"CUDA_VISIBLE_DEVICES {setting}, CUDA_DEVICE_ORDER {visibility.order}", "  ", WIDTH
    )
    for entry in visibility.entries:
        outcome = entry.device or f"nothing: {entry.reason}"
        yield from wrapped(f"{entry.text!r} selects {outcome}", "    ", WIDTH)
    for title, group in (("Driver", inventory.driver), ("Host", inventory.host)):
        yield ""
        yield title
        yield from _values(group, "  ", ())
    for device in inventory.devices:
        yield ""
        yield cut(f"Device {visible(device.key)}", WIDTH)
        yield from _values(device, "  ", ())
    yield from _waterfalls(inventory)
    yield from _processes(inventory)
    if inventory.topology is not None:
        yield from _topology(inventory.topology, inventory)


def _values(group: Any, indent: str, path: tuple[str, ...]) -> Iterator[str]:
    for f in fields(group):
        yield from _value(f.name, getattr(group, f.name), indent, path)


def _value(name: str, value: object, indent: str, path: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, Reading):
        known = value.value
        if isinstance(known, tuple) and known and isinstance(known[0], NvLink):
            yield _row(indent, name, f"{len(known)} links", value.source, "ok")
            for link in known:
                yield from _values(link, f"{indent}    ", (*path, name))
            return
        if isinstance(known, Unavailable):
            if known.status is ReadStatus.NOT_COLLECTED and not value.source:
                return  # not reported by any queried source
            yield _row(indent, name, known.reason, value.source, known.status.value)
        else:
            yield _row(indent, name, _shown(name, known, path), value.source, "ok")
    elif isinstance(value, Unavailable):
        yield _row(indent, name, value.reason, "", value.status.value)
    elif isinstance(value, dict):
        for key, item in sorted(value.items()):
            yield from _value(str(key), item, f"{indent}  ", (*path, name))
    elif is_dataclass(value) and not isinstance(value, type):
        yield f"{indent}{name}"
        yield from _values(value, indent + "  ", (*path, name))
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        for item in value:
            yield f"{indent}{name}"
            yield from _values(item, indent + "  ", (*path, name))
    else:
        yield _row(indent, name, _shown(name, value, path), "", "")


def _row(indent: str, name: str, text: str, source: str, status: str) -> str:
    left = padded(f"{indent}{name.replace('_', ' ')}", 34)
    right = f" {padded(source, 8)} {status}".rstrip()
    return (left + " " + padded(visible(text), 42) + right).rstrip()


def _shown(name: str, value: object, path: tuple[str, ...]) -> str:
    """A value in words; ``path``: the fields that lead to it, of which the last has its unit."""
    group = path[-1] if path else name
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, int):
        return _number(name, value, group)
    if isinstance(value, float) and name == "started_at":
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))
    if isinstance(value, Container):
        parts = (value.runtime, value.id[:12], value.pod and f"pod {value.pod}", value.job)
        return " ".join(part for part in parts if part)
    if isinstance(value, tuple):
        return _several(name, value)
    return str(value)


def _number(name: str, value: int, group: str) -> str:
    if group == "torch":
        return human_bytes(value)
    if name == "energy":
        return f"{value} mJ"
    if group in _UNITS:
        return f"{value} {_UNITS[group]}"
    if name in _RATES:
        return human_bytes(value) + ("/s" if group == "pcie" else "")
    return human_bytes(value) if group in _BYTES or name in _BYTES else str(value)


def _several(name: str, values: tuple[int, ...]) -> str:
    if name == "compute_capability":
        return ".".join(map(str, values))
    if name == "cpu_affinity":
        return ranges(values)
    return ", ".join(map(str, values)) or "none"


def _waterfalls(inventory: Inventory) -> Iterator[str]:
    for fall in inventory.waterfalls:
        yield ""
        yield cut(f"Memory of {visible(fall.device)}", WIDTH)
        if isinstance(fall.total, Unavailable):
            yield _row("  ", "total", fall.total.reason, "", fall.total.status.value)
            continue
        yield _row("  ", "total", human_bytes(fall.total), "", "")
        for part, value in fall.parts.items():
            if isinstance(value, Unavailable):
                yield _row("  ", part.value, value.reason, "", "not seen")
            else:
                yield _row("  ", part.value, human_bytes(value), "", "")
        for note in fall.notes:
            yield from wrapped(note, "  note: ", WIDTH)


def _processes(inventory: Inventory) -> Iterator[str]:
    for process in inventory.processes:
        yield ""
        yield cut(f"Process {process.pid} on {visible(process.device)}", WIDTH)
        for f in fields(process):
            if f.name not in ("pid", "device"):
                yield from _value(f.name, getattr(process, f.name), "  ", ("process",))


def _topology(topology: TopologyMatrix, inventory: Inventory) -> Iterator[str]:
    """The matrix: ``NV18`` is 18 NVLinks, otherwise nvidia-smi's abbreviation of the PCIe path."""
    yield ""
    yield "Topology (NVn: n NVLinks; PIX, PXB, PHB, NODE, SYS: as in nvidia-smi)"
    labels = []
    for key in topology.devices:
        device = inventory.device(key)
        index = device.identity.nvml_index if device is not None else key
        labels.append("?" if isinstance(index, Unavailable) else str(index))
    column = 7
    # As many columns as fit; the JSON document has the whole matrix.
    fit = (WIDTH - 6) // column
    yield "      " + "".join(f"{label:>{column}}" for label in labels[:fit])
    for label, row in zip(labels, topology.cells, strict=True):
        cells = []
        for cell in row[:fit]:
            if cell is None:
                cells.append("X")
            elif isinstance(cell.nvlinks.value, int) and cell.nvlinks.value:
                cells.append(f"NV{cell.nvlinks.value}")
            elif isinstance(cell.ancestor.value, str):
                cells.append(_LEVELS.get(cell.ancestor.value, "?"))
            else:
                cells.append("?")
        yield f"{label:>5} " + "".join(f"{text:>{column}}" for text in cells)
    if len(labels) > fit:
        yield f"      ({len(labels) - fit} more columns: gpuprobe info --json)"
    yield f"  {_peers(topology, labels)}"


def _peers(topology: TopologyMatrix, labels: list[str]) -> str:
    """Peer access between GPUs, in one sentence."""
    cells = [
        (f"{labels[i]}→{labels[j]}", cell.peer.value)
        for i, row in enumerate(topology.cells)
        for j, cell in enumerate(row)
        if cell is not None
    ]
    queried = [(pair, value) for pair, value in cells if isinstance(value, bool)]
    refused = [pair for pair, value in queried if not value]
    if not queried:
        return "peer access: unknown (the CUDA driver was not queried, or sees one GPU)"
    if not refused:
        return f"peer access: CUDA allows all {len(queried)} visible pairs"
    shown = ", ".join(refused[:8]) + (" …" if len(refused) > 8 else "")
    return f"peer access: CUDA refuses {len(refused)} of {len(queried)} pairs: {shown}"
