"""``gpuprobe info --json``: the inventory as one JSON document.

Every reading is ``{"value": …, "source": …, "status": "ok"}``, or, where it could not be read,
``{"value": null, "source": …, "status": …, "reason": …}``. The shape is in
``schemas/info-2.json``; a minor version adds keys, a major one may change them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Final, Generic, Literal

from gpuprobe.model.io.encoder import keys
from gpuprobe.model.machine.devices import Device, Inventory
from gpuprobe.model.record import record
from gpuprobe.model.values import OneOf, Reading, ReadStatus, T, Unavailable
from gpuprobe.reporters.json.documents import Document

_Failed = Annotated[
    str, OneOf(tuple(status.value for status in ReadStatus if status is not ReadStatus.OK))
]


@dataclass(frozen=True)
class KnownReading(Generic[T]):
    """A value that was read, and its source."""

    value: T
    source: str
    status: Literal["ok"] = "ok"


@record(frozen=True)
class MissingReading:
    """A value that could not be read, and why."""

    value: None
    source: str | None
    status: _Failed
    reason: str


def _reading(reading: Reading[T]) -> KnownReading[T] | MissingReading:
    value = reading.value
    if isinstance(value, Unavailable):
        return MissingReading(None, reading.source, value.status.value, value.reason)
    return KnownReading(value, reading.source)


def _missing(value: Unavailable) -> MissingReading:
    return MissingReading(None, None, value.status.value, value.reason)


def _text(text: str) -> str:
    """Bytes that were no UTF-8 are shown as ``\\xff``: JSON has no lone surrogates."""
    if text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text):
        return text
    return "".join(_escaped(c) if "\ud800" <= c <= "\udfff" else c for c in text)


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


DOCUMENT: Final = Document(
    "gpuprobe.info",
    (2, 0),
    Inventory,
    "Devices, processes and the sources that describe them. Bytes, percent, degrees Celsius, "
    "milliwatts, megahertz. A minor version adds keys.",
    shapes={
        Device: keys("key " + " ".join(field.name for field in fields(Device))),
        MissingReading: {"value": "value", "source?": "source", **keys("status reason")},
        Reading: _reading,
        Unavailable: _missing,
        str: _text,
    },
)

document = DOCUMENT.plain
