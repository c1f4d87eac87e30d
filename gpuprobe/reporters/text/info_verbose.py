"""``gpuprobe info -v``: every value with its source and its status."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import IO, Any

from gpuprobe.model.machine.devices import Container, Inventory, NvLink, TopologyMatrix
from gpuprobe.model.text import cut, human_bytes, padded, ranges, visible, wrapped
from gpuprobe.model.values import Reading, ReadStatus, Unavailable
from gpuprobe.reporters.text.info import WIDTH

_UNITS = {
    "utilisation": "%",
    "temperature": "°C",
    "power": "mW",
    "clocks": "MHz",
    "fans": "%",
}
_BYTES = {"memory", "memory_total", "memory_used", "memory_free", "memory_available"}
_RATES = {"tx", "rx"}

# nvidia-smi's letters for NVML's levels, which its users know.
_LEVELS = {
    "internal": "INT",
    "single": "PIX",
    "multiple": "PXB",
    "hostbridge": "PHB",
    "node": "NODE",
    "system": "SYS",
}


def write(inventory: Inventory, stream: IO[str]) -> None:
    """Write all sections after the table."""
    text = "".join(line + "\n" for line in lines(inventory))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))


def lines(inventory: Inventory) -> Iterator[str]:
    """Sections: sources, host, devices, memory, processes, topology."""
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


def _value(name: str, value: Any, indent: str, path: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, Reading):
        known = value.value
        if isinstance(known, tuple) and known and isinstance(known[0], NvLink):
            yield _row(indent, name, f"{len(known)} links", value.source, "ok")
            for link in known:
                yield from _values(link, f"{indent}    ", (*path, name))
            return
        if isinstance(known, Unavailable):
            if known.status is ReadStatus.NOT_COLLECTED and not value.source:
                return  # no source that was asked has it
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


def _shown(name: str, value: Any, path: tuple[str, ...]) -> str:
    group = path[-1] if path else name
    if group == "torch" and isinstance(value, int) and not isinstance(value, bool):
        return human_bytes(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return str(value.value)
    if name == "compute_capability" and isinstance(value, tuple):
        return ".".join(map(str, value))
    if isinstance(value, Container):
        parts = (value.runtime, value.id[:12], value.pod and f"pod {value.pod}", value.job)
        return " ".join(part for part in parts if part)
    if isinstance(value, int):
        if name == "energy":
            return f"{value} mJ"
        if group in _UNITS:
            return f"{value} {_UNITS[group]}"
        if name in _RATES:
            return human_bytes(value) + ("/s" if group == "pcie" else "")
        return human_bytes(value) if group in _BYTES or name in _BYTES else str(value)
    if name == "started_at" and isinstance(value, float):
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))
    if isinstance(value, tuple):
        if name == "cpu_affinity":
            return ranges(value)
        return ", ".join(map(str, value)) or "none"
    return str(value)


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
    """The matrix: ``NV18`` is 18 NVLinks, else nvidia-smi's word for the PCIe path."""
    yield ""
    yield "Topology (NVn: n NVLinks; PIX, PXB, PHB, NODE, SYS: as in nvidia-smi)"
    labels = []
    for key in topology.devices:
        device = inventory.device(key)
        index = device.identity.nvml_index if device is not None else key
        labels.append("?" if isinstance(index, Unavailable) else str(index))
    column = 7
    # As many columns as fit; a machine with more GPUs than that has its matrix in the JSON.
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
    """Which GPUs may read one another's memory, in one sentence."""
    cells = [
        (f"{labels[i]}→{labels[j]}", cell.peer.value)
        for i, row in enumerate(topology.cells)
        for j, cell in enumerate(row)
        if cell is not None
    ]
    asked = [(pair, value) for pair, value in cells if isinstance(value, bool)]
    refused = [pair for pair, value in asked if not value]
    if not asked:
        return "peer access: unknown (the CUDA driver was not queried, or sees one GPU)"
    if not refused:
        return f"peer access: CUDA allows all {len(asked)} visible pairs"
    shown = ", ".join(refused[:8]) + (" …" if len(refused) > 8 else "")
    return f"peer access: CUDA refuses {len(refused)} of {len(asked)} pairs: {shown}"
