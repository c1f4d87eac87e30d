"""Descriptions of machines with GPUs.

A fleet is a JSON object:

* ``about``: one line. ``driver``: ``version``, ``nvml``, ``cuda`` (12080 is 12.8).
* ``devices``: in NVML order. Each is its ``chip`` from ``chips.json`` with the fields it
  overrides; nested objects are merged. ``{"error": "no_permission"}`` in place of any value makes
  NVML return that error. ``handle`` takes such an error for a GPU without a handle; ``lost: true``
  is a GPU that fell off the bus later.
* ``links``: named lists of NVLinks, for devices whose ``nvlinks`` is such a name.
* ``cuda_order``: NVML indices in the order of the CUDA driver (``FASTEST_FIRST``).
* ``missing_functions``: C functions that the (older) driver lacks.
* ``init``: the NVML error that ``nvmlInit`` returns.
* ``host``: ``hostname``, number of ``cpus``, ``uptime`` in seconds when the fleet is opened.
* ``proc``: PID to its entry in ``/proc`` (``started``: seconds after the boot, ``cpu``: percent of
  one CPU, ``resident``: bytes, ``folder``: its working directory); ``users``: uid to name;
  ``namespace``: ``first`` or ``container``; ``environ``: variables that are set unless the caller
  sets them.
* ``kernel_log``: the driver's lines of the kernel log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuprobe.errors import DataError, UsageError

__all__ = ["NVML_ERRORS", "Facts", "Fleet", "NvmlFailure", "described", "fleets", "load_fleet"]

_FOLDER = Path(__file__).parent / "fleets"

# nvml.h, nvmlReturn_t.
NVML_ERRORS = {
    "uninitialized": 1,
    "invalid_argument": 2,
    "not_supported": 3,
    "no_permission": 4,
    "not_found": 6,
    "insufficient_size": 7,
    "driver_not_loaded": 9,
    "function_not_found": 13,
    "gpu_is_lost": 15,
    "lib_rm_version_mismatch": 18,
    "unknown": 999,
}

Facts = Mapping[str, Any]
"""A JSON object of a fleet's description: of a device, a process, a link."""

_MISSING = object()


class NvmlFailure(Exception):
    """The fleet describes an NVML error in place of a value. ``code`` is its number."""

    def __init__(self, code: int) -> None:
        super().__init__(f"NVML error {code}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Fleet:
    """The description of one machine."""

    name: str
    about: str
    driver: Facts
    devices: tuple[dict[str, Any], ...]
    cuda_order: tuple[int, ...]
    missing_functions: frozenset[str] = frozenset()
    init: str = ""
    host: Facts = field(default_factory=dict)
    proc: dict[str, Facts] = field(default_factory=dict)
    users: dict[str, str] = field(default_factory=dict)
    namespace: str = "first"
    environ: dict[str, str] = field(default_factory=dict)
    kernel_log: tuple[str, ...] = ()

    def fact(self, index: int, *path: str) -> Any:
        """The value at ``path`` in the description of device ``index``. Raises NvmlFailure for an
        error in its place; a missing value is "not supported".
        """
        device = self.devices[index]
        if device.get("lost"):
            raise NvmlFailure(NVML_ERRORS["gpu_is_lost"])
        return described(device, *path)

    def work(self, index: int) -> list[tuple[int, int]]:
        """(PID, percent of the time that the SMs of device ``index`` are busy with it): the
        device's utilisation, in proportion to the memory of each process. Raises NvmlFailure as
        `fact` does, and for a device in MIG mode.
        """
        mode = self.devices[index].get("mig", {}).get("mode")
        if isinstance(mode, list) and mode[0]:
            raise NvmlFailure(NVML_ERRORS["not_supported"])
        busy = self.fact(index, "utilisation")[0]
        held = {p["pid"]: p.get("memory") or 0 for p in self.fact(index, "processes")}
        total = sum(held.values())
        return [(pid, busy * memory // total) for pid, memory in held.items() if memory]


def described(facts: Facts, *path: str) -> Any:
    """The value at ``path``. Raises NvmlFailure as `Fleet.fact` does."""
    value: Any = facts
    for name in path:
        value = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is _MISSING:
            raise NvmlFailure(NVML_ERRORS["not_supported"])
        if isinstance(value, Mapping) and set(value) == {"error"}:
            raise NvmlFailure(NVML_ERRORS[value["error"]])
    return value


def fleets() -> dict[str, str]:
    """The names of the fleets of this package, with a line about each."""
    found = {}
    for path in sorted(_FOLDER.glob("*.json")):
        if path.stem != "chips":
            found[path.stem] = json.loads(path.read_text("utf-8"))["about"]
    return found


def load_fleet(name: str) -> Fleet:
    """A fleet by name, or from the path of a JSON file.

    Raises UsageError for an unknown fleet, DataError for a file in another format.
    """
    path = Path(name) if name.endswith(".json") else _FOLDER / f"{name}.json"
    if name == "chips" or not path.is_file():
        raise UsageError(f"no such fleet: {name}", hint=f"fleets: {', '.join(fleets())}")
    try:
        raw = json.loads(path.read_text("utf-8"))
        chips = json.loads((_FOLDER / "chips.json").read_text("utf-8"))
        devices = tuple(
            _merged(chips[device["chip"]] if "chip" in device else {}, device)
            for device in raw["devices"]
        )
        for device in devices:
            if isinstance(device.get("nvlinks"), str):
                device["nvlinks"] = raw["links"][device["nvlinks"]]
        fleet = Fleet(
            name=path.stem,
            about=raw["about"],
            driver=raw["driver"],
            devices=devices,
            cuda_order=tuple(raw.get("cuda_order", range(len(devices)))),
            missing_functions=frozenset(raw.get("missing_functions", ())),
            init=raw.get("init", ""),
            host=raw.get("host", {}),
            proc=raw.get("proc", {}),
            users=raw.get("users", {}),
            namespace=raw.get("namespace", "first"),
            environ=raw.get("environ", {}),
            kernel_log=tuple(raw.get("kernel_log", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path.name} does not describe a fleet: {error!r}") from error
    return fleet


def _merged(base: Facts, over: Facts) -> dict[str, Any]:
    """``base`` updated by ``over``; nested objects are merged, but an error replaces an object."""
    result = dict(base)
    for key, value in over.items():
        known = result.get(key)
        both = isinstance(value, Mapping) and isinstance(known, Mapping)
        if both and "error" not in value and "error" not in known:  # type: ignore[operator]
            result[key] = _merged(known, value)  # type: ignore[arg-type]
        else:
            result[key] = value
    return result
