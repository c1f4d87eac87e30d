"""Calling nvidia-ml-py one value at a time, so that one failure costs one value."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

from gpuprobe.model.machine.devices import ProbeError
from gpuprobe.model.values import Reading, ReadStatus, Unavailable

T = TypeVar("T")

# NVML's return codes, from nvml.h (nvmlReturn_t). Read off the number, so that a code that
# this release of nvidia-ml-py has no class for is still told apart.
_STATUS = {
    2: ReadStatus.UNSUPPORTED,  # INVALID_ARGUMENT: this chip does not know the sensor or counter
    3: ReadStatus.UNSUPPORTED,  # NOT_SUPPORTED
    4: ReadStatus.DENIED,  # NO_PERMISSION
    6: ReadStatus.UNSUPPORTED,  # NOT_FOUND: no such fan, link or instance
    13: ReadStatus.UNSUPPORTED,  # FUNCTION_NOT_FOUND: the driver is older than the function
    15: ReadStatus.LOST,  # GPU_IS_LOST
    16: ReadStatus.LOST,  # RESET_REQUIRED: answers nothing until it is reset
    25: ReadStatus.UNSUPPORTED,  # ARGUMENT_VERSION_MISMATCH
    26: ReadStatus.UNSUPPORTED,  # DEPRECATED
}

_NOTHING_FOUND = (0, 6)
"""SUCCESS, which nvidia-ml-py raises where a list is empty, and NOT_FOUND."""

_NOTHING = (0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF)
"""What NVML puts in a field it has no value for (NVML_VALUE_NOT_AVAILABLE)."""


class Calls:
    """Guards calls into nvidia-ml-py and remembers what failed.

    A device that answered "lost" once is not asked again: every further call could block in
    the kernel driver for seconds.
    """

    def __init__(self, pynvml: Any) -> None:
        self.pynvml = pynvml
        self.errors: list[ProbeError] = []
        self._lost: dict[str, Unavailable] = {}
        # Raised, as well as NVMLError, by unversioned functions whose newest form the driver lacks.
        self._mismatch: Any = getattr(pynvml, "NVMLLibraryMismatchError", ())

    def attempt(
        self,
        device: str,
        name: str,
        *args: Any,
        convert: Callable[[Any], T] | None = None,
        none: Any = None,
    ) -> T | Any | Unavailable:
        """The result of ``nvml<name>(*args)``, or why there is none. ``none`` is the result
        where a list is asked for and NVML finds nothing to put on it.
        """
        lost = self._lost.get(device)
        if lost is not None:
            return lost
        function = getattr(self.pynvml, "nvml" + name, None)
        if function is None:
            return Unavailable(f"nvidia-ml-py has no nvml{name}", ReadStatus.UNSUPPORTED)
        try:
            value = function(*args)
            return value if convert is None else convert(value)
        except self.pynvml.NVMLError as error:
            if none is not None and error.value in _NOTHING_FOUND:
                return none
            status = _STATUS.get(error.value, ReadStatus.ERROR)
            missing = Unavailable(str(error), status)
        except self._mismatch:
            missing = Unavailable("the driver is older than the function", ReadStatus.UNSUPPORTED)
        except (ValueError, TypeError, LookupError, OSError, ctypes.ArgumentError) as error:
            # Text that is no text, a code without a meaning, a structure of another version.
            missing = Unavailable(f"{type(error).__name__}: {error}", ReadStatus.ERROR)
        self.note(device, name, missing)
        return missing

    def note(self, device: str, what: str, missing: Unavailable) -> None:
        """Remember a failure, unless it only says that the device has no such value."""
        if missing.status in (ReadStatus.UNSUPPORTED, ReadStatus.NOT_COLLECTED):
            return
        if missing.status is ReadStatus.LOST and device:
            self._lost[device] = missing
        error = ProbeError("nvml", missing.status, missing.reason, device, what)
        if error not in self.errors:  # one call may serve two values
            self.errors.append(error)

    def read(
        self, device: str, name: str, *args: Any, convert: Callable[[Any], T] | None = None
    ) -> Reading[Any]:
        """`attempt` as a `Reading`. A number that NVML uses for "no value" is unsupported."""
        value = self.attempt(device, name, *args, convert=convert)
        if type(value) is int and value in _NOTHING:
            value = Unavailable("the driver reports no value", ReadStatus.UNSUPPORTED)
        return Reading(value, "nvml")


def text(value: object) -> str:
    """Text from NVML, which returns bytes or str depending on the package's version."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return str(value)


def pci_bus_id(raw: object) -> str:
    """A PCI address as ``dddddddd:bb:dd.f`` in lower case.

    NVML prints eight digits of domain, CUDA and sysfs four, some tools capitals, pycuda and
    older drivers no domain at all. Raises ValueError for something else.
    """
    address = text(raw).strip().lower()
    head, _, function = address.partition(".")
    fields = head.split(":")
    if len(fields) == 2:
        fields = ["0", *fields]
    if len(fields) != 3:
        raise ValueError(f"not a PCI address: {address!r}")
    domain, bus, slot = (int(part, 16) for part in fields)
    return f"{domain:08x}:{bus:02x}:{slot:02x}.{int(function or '0', 16):x}"
