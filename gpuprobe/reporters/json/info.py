"""``gpuprobe info --json``: the inventory as one JSON document.

Every reading is ``{"value": …, "source": …, "status": "ok"}``, or, where it could not be read,
``{"value": null, "source": …, "status": …, "reason": …}``. The shape is in
``schemas/info-2.json``; a minor version adds keys, a major one may change them.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import IO, Any

from gpuprobe.model.io.document import header
from gpuprobe.model.io.document import write as write_document
from gpuprobe.model.machine.devices import Inventory
from gpuprobe.model.values import Reading, Unavailable

INFO_SCHEMA_VERSION = (2, 0)
"""(major, minor).

History:
* 1.0: first version.
* 2.0: with all documents; nothing changed in this one.
"""


def document(inventory: Inventory) -> dict[str, Any]:
    """The inventory as plain data: objects, arrays, text, numbers."""
    return {
        **header("gpuprobe.info", INFO_SCHEMA_VERSION),
        **_plain(inventory),
        "devices": [{"key": device.key, **_plain(device)} for device in inventory.devices],
    }


def write(inventory: Inventory, stream: IO[str]) -> None:
    """Write one JSON document, ASCII only."""
    write_document(document(inventory), stream)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Unavailable):
        return {"value": None, "status": value.status.value, "reason": _text(value.reason)}
    if isinstance(value, Reading):
        known = value.value
        if isinstance(known, Unavailable):
            missing = _plain(known)
            return {"value": None, "source": value.source, **missing}
        return {"value": _plain(known), "source": value.source, "status": "ok"}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    raise TypeError(f"not a model value: {type(value).__qualname__}")


def _text(text: str) -> str:
    """Bytes that were no UTF-8 are shown as ``\\xff``: JSON has no lone surrogates."""
    if text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text):
        return text
    return "".join(_escaped(c) if "\ud800" <= c <= "\udfff" else c for c in text)


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"
