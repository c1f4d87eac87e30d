"""A fake ``libcuda.so.1``: the device queries, without contexts.

Enumerates the fleet's GPUs in the fleet's CUDA order, filtered by ``CUDA_VISIBLE_DEVICES`` and
``CUDA_DEVICE_ORDER`` as they are when ``cuInit`` is called. Functions that create a context are
absent: resolving one raises `UnexpectedCall`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from gpuprobe.testing.fake_nvml import CFunction, UnexpectedCall, number_of, target
from gpuprobe.testing.fleet import Facts, Fleet

__all__ = ["FakeCuda"]

_NO_DEVICE = 100
_INVALID_VALUE = 1
_NOT_INITIALIZED = 3

_ATTRIBUTES = {1: 1024, 8: 49152, 10: 32, 12: 65536, 40: 3, 41: 1, 83: 1, 95: 1, 102: 1, 115: 1}


def _partitioned(device: Facts) -> bool:
    mode = device.get("mig", {}).get("mode")
    return isinstance(mode, list) and bool(mode[0])


class FakeCuda:
    """The library object, for ``ctypes.CDLL``."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._visible: list[Facts] | None = None

    def __getattr__(self, name: str) -> CFunction:
        if not name.startswith("cu"):
            raise AttributeError(name)
        body = getattr(type(self), "c_" + name, None)
        if body is None:
            raise UnexpectedCall(f"the fake CUDA driver has no {name}")
        return CFunction(body.__get__(self))

    def c_cuInit(self, flags: object) -> int | None:
        self._visible = self._selection(os.environ)
        return None if self._visible else _NO_DEVICE

    def c_cuDriverGetVersion(self, out: object) -> None:
        target(out).value = self._fleet.driver["cuda"]

    def c_cuDeviceGetCount(self, out: object) -> int | None:
        if self._visible is None:
            return _NOT_INITIALIZED
        target(out).value = len(self._visible)
        return None

    def c_cuDeviceGet(self, out: object, ordinal: object) -> None:
        target(out).value = number_of(ordinal)

    def c_cuDeviceGetName(self, buffer: object, size: object, device: object) -> None:
        raw = self._device(device)["name"].encode("utf-8", "surrogateescape")
        target(buffer).value = raw[: number_of(size) - 1]

    def c_cuDeviceGetUuid_v2(self, out: object, device: object) -> None:
        raw = bytes.fromhex(self._device(device)["uuid"][4:].replace("-", ""))
        target(out)[:] = list(raw)

    def c_cuDeviceGetPCIBusId(self, buffer: object, size: object, device: object) -> None:
        # CUDA prints four digits of the domain, and capital letters.
        target(buffer).value = self._device(device)["pci"][4:].upper().encode()

    def c_cuDeviceTotalMem_v2(self, out: object, device: object) -> None:
        target(out).value = self._device(device)["cuda_total"]

    def c_cuDeviceGetAttribute(self, out: object, attribute: object, device: object) -> int | None:
        facts = self._device(device)
        number = number_of(attribute)
        values = {
            **_ATTRIBUTES,
            16: facts["sm_count"],
            75: facts["compute_capability"][0],
            76: facts["compute_capability"][1],
        }
        if number not in values:
            return _INVALID_VALUE
        target(out).value = values[number]
        return None

    def c_cuDeviceCanAccessPeer(self, out: object, device: object, peer: object) -> None:
        # nvml.h, nvmlGpuP2PStatus_t: 0 is "ok". Both ends must support it.
        both = (self._device(device), self._device(peer))
        target(out).value = int(all(facts.get("p2p", 0) == 0 for facts in both))

    def _device(self, device: object) -> Facts:
        if self._visible is None:
            raise UnexpectedCall("a device was queried before cuInit")
        return self._visible[number_of(device)]

    def _selection(self, environ: Mapping[str, str]) -> list[Facts]:
        devices = self._fleet.devices
        usable = [i for i, d in enumerate(devices) if not d.get("lost") and "handle" not in d]
        order = [i for i in self._fleet.cuda_order if i in usable]
        if environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
            order = sorted(usable, key=lambda i: devices[i]["pci"])
        setting = environ.get("CUDA_VISIBLE_DEVICES")
        if setting is None:
            chosen: list[Facts] = [devices[i] for i in order]
        else:
            chosen = self._named(setting.split(","), [devices[i] for i in order])
        whole: list[Facts] = []
        parts: list[Facts] = []
        for device in chosen:
            if device.get("is_instance"):
                parts.append(device)
            elif _partitioned(device):
                parts.extend(self._instances(device))
            else:
                whole.append(device)
        return parts[:1] if parts else whole

    def _instances(self, device: Facts) -> list[Facts]:
        return [
            {**device, **part, "is_instance": True, "cuda_total": part["memory"]["total"]}
            for part in device.get("mig", {}).get("instances", ())
        ]

    def _named(self, words: list[str], order: list[Facts]) -> list[Facts]:
        """The devices of the entries of ``CUDA_VISIBLE_DEVICES``, up to the first invalid entry."""
        chosen: list[Facts] = []
        for word in words:
            if word.isdecimal():
                matches = order[int(word) : int(word) + 1]
            elif word.startswith("MIG-"):
                matches = [
                    instance
                    for d in order
                    for instance in self._instances(d)
                    if instance["uuid"].startswith(word)
                ]
            else:
                matches = [d for d in order if word and d["uuid"].startswith(word)]
            if len(matches) != 1:
                break
            if matches[0] in chosen:
                return []
            chosen.append(matches[0])
        return chosen
