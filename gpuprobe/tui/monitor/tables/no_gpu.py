"""What the dashboard shows of a machine without a GPU: why, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from gpuprobe.model.machine.devices import Inventory
from gpuprobe.model.machine.selection import Selection
from gpuprobe.model.text import visible, wrapped
from gpuprobe.tui.widgets.styled_text import Line, fit, left, line_width

_WIDEST = 76


def no_gpu(
    inventory: Inventory, selection: Selection, runs: int, columns: int, height: int
) -> list[Line]:
    """An explanation in the middle of ``columns`` × ``height`` cells. ``inventory`` is all of this
    machine, before the ``selection``; ``runs``: recordings that are being written on it.
    """
    wide = min(_WIDEST, columns - 4)
    body = _body(inventory, selection, runs, wide)
    body = body[:height]
    block = max(map(line_width, body), default=0)
    indent = max(0, (columns - block) // 2)
    above = max(0, (height - len(body)) // 3)
    lines: list[Line] = [() for _ in range(above)]
    lines += [((" " * indent, ""), *line) for line in body]
    lines += [() for _ in range(height - len(lines))]
    return [fit(line, columns) for line in lines]


def _body(inventory: Inventory, selection: Selection, runs: int, wide: int) -> list[Line]:
    available = any(source.available for source in inventory.sources)
    if available and selection.gpus:
        names = [
            f"{index} {visible(str(device.name.value)).removeprefix('NVIDIA ')}"
            for device in inventory.devices
            if isinstance(index := device.identity.nvml_index, int)
        ]
        has = f"It has {', '.join(names)}." if names else "It has none."
        wanted = ",".join(map(visible, selection.gpus))
        return _head(
            "No GPU is selected",
            f"No GPU of this machine matches --only {wanted}. {has} "
            "--only takes the numbers of this list, UUIDs and PCI addresses.",
            wide,
        )
    if available:
        reason = "The driver is loaded, and lists no GPU."
        checks = [
            ("lspci | grep -i nvidia", "is there a GPU on the PCI bus?"),
            ("docker run --gpus all …", "in a container: pass the GPUs to it"),
        ]
    else:
        reasons = "; ".join(s.reason for s in inventory.sources if not s.available)
        reason = f"NVML: {visible(reasons)}"
        checks = [
            ("nvidia-smi", "is the driver installed and loaded?"),
            ("lspci | grep -i nvidia", "is there a GPU in this machine?"),
            ("docker run --gpus all …", "in a container: pass the GPUs to it"),
        ]
    lines = _head("No GPU is available", reason, wide)
    recorded = f" ({runs} now)" if runs else ""
    lines += _table(
        "Here",
        [
            ("D", "doctor: what is missing on this machine, and how to fix it"),
            ("R", f"training runs being recorded here, on the CPU too{recorded}"),
        ],
        4,
        wide,
        "key",
    )
    lines += _table("In a shell", checks, 28, wide, "accent")
    lines += _table(
        "Without a GPU",
        [
            ("gpuprobe top --demo", "this screen, with 8 simulated GPUs"),
            ("gpuprobe estimate train.py", "does it fit on an H100?"),
        ],
        28,
        wide,
        "accent",
    )
    return lines


def _head(title: str, reason: str, wide: int) -> list[Line]:
    words: list[Line] = [((text, ""),) for text in wrapped(reason, "", wide)]
    return [((title, "warning"),), (), *words, ()]


def _table(
    title: str, rows: Sequence[tuple[str, str]], first: int, wide: int, role: str
) -> list[Line]:
    lines: list[Line] = [((title, "title"),)]
    room = wide - first - 2
    for name, does in rows:
        if len(name) <= first and room >= 24:
            for at, text in enumerate(wrapped(does, "", room)):
                lines.append(((f" {left('' if at else name, first)} ", role), (text, "")))
        else:  # the explanation gets lines of its own
            lines += [((f" {name}", role),), *(((t, "dim"),) for t in wrapped(does, "   ", wide))]
    return [*lines, ()]
