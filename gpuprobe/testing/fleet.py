"""Descriptions of machines with GPUs, and the context in which one of them is there.

A fleet is a JSON object:

* ``about``: one line. ``driver``: ``version``, ``nvml``, ``cuda`` (12080 is 12.8).
* ``devices``: in NVML order. Each is its ``chip`` from ``chips.json`` with the fields it
  overrides; nested objects are merged. Wherever a value stands, ``{"error": "no_permission"}``
  may stand instead: NVML then answers so. ``handle`` takes such an error for a GPU that NVML
  gives no handle for; ``lost: true`` is one that fell off the bus after that.
* ``links``: named lists of NVLinks, for devices whose ``nvlinks`` is such a name.
* ``cuda_order``: NVML indices in the order of the CUDA driver (``FASTEST_FIRST``).
* ``missing_functions``: C functions that the (older) driver does not have.
* ``init``: the NVML error that ``nvmlInit`` ends with.
* ``proc``: PID to what ``/proc`` shows of it; ``users``: uid to name; ``namespace``:
  ``first`` or ``container``; ``environ``: variables that are set unless the caller sets them.
* ``kernel_log``: the driver's lines of the kernel log.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuprobe.errors import DataError, UsageError

__all__ = ["NVML_ERRORS", "Fleet", "NvmlFailure", "fake_fleet", "fleets", "load_fleet"]

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

_MISSING = object()


class NvmlFailure(Exception):
    """The described answer is an NVML error. ``code`` is its number."""

    def __init__(self, code: int) -> None:
        super().__init__(f"NVML error {code}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Fleet:
    """One machine, described."""

    name: str
    about: str
    driver: dict[str, Any]
    devices: tuple[dict[str, Any], ...]
    cuda_order: tuple[int, ...]
    missing_functions: frozenset[str] = frozenset()
    init: str = ""
    proc: dict[str, dict[str, Any]] = field(default_factory=dict)
    users: dict[str, str] = field(default_factory=dict)
    namespace: str = "first"
    environ: dict[str, str] = field(default_factory=dict)
    kernel_log: tuple[str, ...] = ()

    def fact(self, index: int, *path: str) -> Any:
        """What device ``index`` answers. Raises NvmlFailure where it answers with an error;
        a fact that is not described is "not supported".
        """
        device = self.devices[index]
        if device.get("lost"):
            raise NvmlFailure(NVML_ERRORS["gpu_is_lost"])
        return described(device, *path)

    def work(self, index: int) -> list[tuple[int, int]]:
        """(PID, percent of the time that the SMs of device ``index`` are busy with it): the
        device's utilisation, shared as the memory is. Raises NvmlFailure as `fact` does; a
        device in MIG mode does not tell.
        """
        mode = self.devices[index].get("mig", {}).get("mode")
        if isinstance(mode, list) and mode[0]:
            raise NvmlFailure(NVML_ERRORS["not_supported"])
        busy = self.fact(index, "utilisation")[0]
        held = {p["pid"]: p.get("memory") or 0 for p in self.fact(index, "processes")}
        total = sum(held.values())
        return [(pid, busy * memory // total) for pid, memory in held.items() if memory]


def described(facts: Mapping[str, Any], *path: str) -> Any:
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
    """The fleets of this package: name to one line about each."""
    found = {}
    for path in sorted(_FOLDER.glob("*.json")):
        if path.stem != "chips":
            found[path.stem] = json.loads(path.read_text("utf-8"))["about"]
    return found


def load_fleet(name: str) -> Fleet:
    """A fleet by name, or from the path of a JSON file.

    Raises UsageError where there is no such fleet, DataError where the file is not a fleet.
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
            proc=raw.get("proc", {}),
            users=raw.get("users", {}),
            namespace=raw.get("namespace", "first"),
            environ=raw.get("environ", {}),
            kernel_log=tuple(raw.get("kernel_log", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path.name} does not describe a fleet: {error!r}") from error
    return fleet


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``base``; objects are merged, but an error replaces what it hits."""
    result = dict(base)
    for key, value in over.items():
        known = result.get(key)
        both = isinstance(value, Mapping) and isinstance(known, Mapping)
        if both and "error" not in value and "error" not in known:  # type: ignore[operator]
            result[key] = _merged(known, value)  # type: ignore[arg-type]
        else:
            result[key] = value
    return result


@contextmanager
def fake_fleet(name: str | Fleet) -> Iterator[Fleet]:
    """Inside, this machine has the fleet's GPUs and none of its own.

    Replaces the C library under ``pynvml``, ``libcuda`` for whoever opens it through
    ``ctypes.CDLL``, and ``/proc`` for gpuprobe; restores all three. Not reentrant, and not for
    programs in which another thread uses NVML meanwhile.
    """
    import pynvml  # 25 ms

    from gpuprobe.testing.fake_cuda import FakeCuda
    from gpuprobe.testing.fake_nvml import FakeNvml

    fleet = name if isinstance(name, Fleet) else load_fleet(name)
    with ExitStack() as stack:
        kept = (pynvml.nvmlLib, dict(pynvml._nvmlGetFunctionPointer_cache))
        kept_count = pynvml._nvmlLib_refcount

        def restore() -> None:
            pynvml.nvmlLib = kept[0]
            pynvml._nvmlGetFunctionPointer_cache.clear()
            pynvml._nvmlGetFunctionPointer_cache.update(kept[1])
            pynvml._nvmlLib_refcount = kept_count

        stack.callback(restore)
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml._nvmlLib_refcount = 0
        pynvml.nvmlLib = FakeNvml(fleet)

        real = ctypes.CDLL
        cuda = FakeCuda(fleet)

        def load(library: Any, *args: Any, **options: Any) -> Any:
            known = str(library).startswith("libcuda.so")
            return cuda if known else real(library, *args, **options)

        stack.callback(setattr, ctypes, "CDLL", real)
        ctypes.CDLL = load  # type: ignore[misc, assignment]

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuprobe-fleet-")))
        write_proc_tree(fleet, folder)
        changes = {"GPUPROBE_PROCFS": str(folder / "proc")}
        changes.update({k: v for k, v in fleet.environ.items() if k not in os.environ})
        for key, value in changes.items():
            before = os.environ.get(key)
            stack.callback(_put_back, key, before)
            os.environ[key] = value
        yield fleet


def _put_back(key: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(key, None)
    else:
        os.environ[key] = value


def write_proc_tree(fleet: Fleet, folder: Path) -> None:
    """Write ``folder/proc`` and ``folder/etc/passwd`` as the fleet's processes would have them."""
    proc = folder / "proc"
    (proc / "self" / "ns").mkdir(parents=True)
    inode = 4026531836 if fleet.namespace == "first" else 4026532201
    (proc / "self" / "ns" / "pid").symlink_to(f"pid:[{inode}]")
    (proc / "self" / "cgroup").write_text("0::/\n")
    (proc / "stat").write_text("cpu 0 0 0 0 0 0 0 0 0 0\nbtime 1700000000\n")
    (proc / "loadavg").write_text("9.61 8.80 7.95 12/2431 70001\n")
    (proc / "meminfo").write_text("MemTotal: 2113456789 kB\nMemAvailable: 1913456789 kB\n")
    if not fleet.init:
        (proc / "driver" / "nvidia").mkdir(parents=True)
        version = fleet.driver["version"]
        (proc / "driver" / "nvidia" / "version").write_text(
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"
        )
    for pid, facts in fleet.proc.items():
        home = proc / pid
        home.mkdir()
        name = facts.get("name", "python")
        # The kernel escapes newlines and backslashes of a name in status, not in stat.
        shown = name.replace("\\", "\\\\").replace("\n", "\\n")
        uid = facts.get("uid", 1000)
        _write(home / "status", f"Name:\t{shown}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        ticks = facts.get("started", 3600) * os.sysconf("SC_CLK_TCK")
        _write(
            home / "stat",
            f"{pid} ({name}) S {facts.get('parent', 1)}"
            + " 0" * 17
            + f" {ticks} 0 {facts.get('resident', 4 << 30) // 4096}\n",
        )
        _write(home / "cmdline", "".join(f"{arg}\0" for arg in facts.get("cmdline", [])))
        _write(home / "cgroup", facts.get("cgroup", "0::/user.slice") + "\n")
        environ = facts.get("environ", {})
        _write(home / "environ", "".join(f"{k}={v}\0" for k, v in environ.items()))
    (folder / "etc").mkdir()
    lines = [f"{name}:x:{uid}:{uid}::/home:/bin/sh\n" for uid, name in fleet.users.items()]
    _write(folder / "etc" / "passwd", "".join(lines))


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
