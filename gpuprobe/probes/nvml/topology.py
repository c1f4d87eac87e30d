"""How the GPUs reach each other: NVLink, PCIe, peer access."""

from __future__ import annotations

from typing import Any

from gpuprobe.model.machine.devices import Device, TopologyCell, TopologyMatrix
from gpuprobe.model.values import Reading, ReadStatus, Unavailable
from gpuprobe.probes.nvml.calls import Calls

# nvml.h, nvmlGpuTopologyLevel_t.
_ANCESTORS = {
    0: "internal",
    10: "single",
    20: "multiple",
    30: "hostbridge",
    40: "node",
    50: "system",
}

# nvml.h, nvmlGpuP2PStatus_t.
_P2P = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "PCIe topology not supported",
    4: "disabled by a driver setting",
    5: "not supported",
    6: "unknown",
}

_P2P_READ = 0  # NVML_P2P_CAPS_INDEX_READ


def read_topology(calls: Calls, devices: list[Device], handles: dict[str, Any]) -> TopologyMatrix:
    """The matrix over all devices. A device without a handle has unavailable cells."""
    rows = []
    for a in devices:
        row: list[TopologyCell | None] = []
        for b in devices:
            if a.key == b.key:
                row.append(None)
                continue
            row.append(_cell(calls, a, b, handles))
        rows.append(tuple(row))
    return TopologyMatrix(tuple(d.key for d in devices), tuple(rows))


def _cell(calls: Calls, a: Device, b: Device, handles: dict[str, Any]) -> TopologyCell:
    gone = next((d for d in (a, b) if d.key not in handles), None)
    if gone is not None:
        missing: Reading[Any] = Reading(
            Unavailable(f"{gone.key} does not answer", ReadStatus.LOST), "nvml"
        )
        return TopologyCell(missing, missing, missing)
    first, second = handles[a.key], handles[b.key]
    return TopologyCell(
        nvlinks=_links_between(a, b),
        ancestor=calls.read(
            a.key,
            "DeviceGetTopologyCommonAncestor",
            first,
            second,
            convert=lambda level: _ANCESTORS.get(level, f"level {level}"),
        ),
        p2p=calls.read(
            a.key,
            "DeviceGetP2PStatus",
            first,
            second,
            _P2P_READ,
            convert=lambda status: _P2P.get(status, f"status {status}"),
        ),
    )


def _links_between(a: Device, b: Device) -> Reading[int]:
    """Active links from ``a`` that end at ``b``, or at a switch that ``b`` is linked to too.

    Behind switches every GPU reaches every other with all its links, so the number is the
    smaller of the two sides' links to switches.
    """
    if isinstance(a.nvlinks.value, Unavailable):
        return Reading(a.nvlinks.value, "nvml")
    if isinstance(b.nvlinks.value, Unavailable):
        return Reading(b.nvlinks.value, "nvml")
    active = [link for link in a.nvlinks.value if link.active.value is True]
    direct = sum(
        1
        for link in active
        if link.remote_kind.value != "switch" and link.remote.value == b.identity.pci_bus_id
    )
    switched = min(
        sum(1 for link in active if link.remote_kind.value == "switch"),
        sum(
            1
            for link in b.nvlinks.value
            if link.active.value is True and link.remote_kind.value == "switch"
        ),
    )
    return Reading(direct + switched, "nvml")
