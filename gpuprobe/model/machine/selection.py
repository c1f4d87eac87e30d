"""Which GPUs and processes a user wants to see."""

from __future__ import annotations

from dataclasses import replace

from gpuprobe.model.machine.devices import Device, GpuProcess, Inventory
from gpuprobe.model.record import record


@record(frozen=True, slots=True)
class Selection:
    """``users``: names or numeric ids. ``pids``: process ids. ``gpus``: NVML indices, UUIDs (or
    their beginnings), or PCI addresses. What is empty selects everything.
    """

    users: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.users or self.pids or self.gpus)

    @property
    def text(self) -> str:
        """The selection as a user writes it."""
        parts = [f"user {name}" for name in self.users]
        parts += [f"pid {pid}" for pid in self.pids]
        parts += [f"GPU {name}" for name in self.gpus]
        return ", ".join(parts)

    def unknown_gpus(self, inventory: Inventory) -> tuple[str, ...]:
        """The GPUs of the selection that this machine does not have."""
        return tuple(
            name
            for name in self.gpus
            if not any(_is_called(device, name) for device in inventory.devices)
        )

    def of(self, inventory: Inventory) -> Inventory:
        """The inventory with the selected GPUs, and their selected processes, only."""
        if not self:
            return inventory
        devices = tuple(
            device
            for device in inventory.devices
            if not self.gpus or any(_is_called(device, name) for name in self.gpus)
        )
        keys = {device.key for device in devices}
        return replace(
            inventory,
            devices=devices,
            processes=tuple(
                process
                for process in inventory.processes
                if process.device in keys and self._has(process)
            ),
            waterfalls=tuple(fall for fall in inventory.waterfalls if fall.device in keys),
            errors=tuple(e for e in inventory.errors if not e.device or e.device in keys),
        )

    def _has(self, process: GpuProcess) -> bool:
        if self.pids and process.pid not in self.pids:
            return False
        owner = {str(process.user.value), str(process.uid.value)}
        return not self.users or not owner.isdisjoint(self.users)


def _is_called(device: Device, name: str) -> bool:
    identity = device.identity
    if name.isdecimal():
        return identity.nvml_index == int(name)
    prefix = name.lower()
    uuid, place = str(identity.uuid).lower(), str(identity.pci_bus_id).lower()
    # NVML writes the PCI domain with eight digits, lspci with four or none.
    return uuid.startswith(prefix) or (":" in prefix and place.endswith(prefix))
