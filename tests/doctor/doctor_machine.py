"""A healthy machine, to be broken one thing at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpuprobe.model.findings import Finding
from gpuprobe.model.machine.devices import Device, Inventory, Visibility
from gpuprobe.model.values import Bytes, Reading
from gpuprobe.probes.health import CHECKS
from gpuprobe.probes.health.base import (
    LibraryFile,
    MachineFacts,
    Outcome,
    SharedMemory,
    TorchFacts,
    examine,
)

GIB = 1024**3

TORCH = TorchFacts(
    version="2.13.0+cu126",
    cuda="12.6",
    archs=("sm_80", "sm_90", "compute_90"),
    nccl_built="2.27.5",
    nccl_loaded="2.27.5",
)


def read(value: Any) -> Reading[Any]:
    """What a source would have read."""
    return Reading(value, "nvml")


class Machine:
    """Facts of a machine where every rule passes; `but` gives one with something changed."""

    def __init__(self, found: Inventory) -> None:
        self.facts = MachineFacts(
            inventory=found,
            environ={"HOME": "/home/ada"},
            torch=TORCH,
            shared_memory=SharedMemory(Bytes(32 * GIB), Bytes(30 * GIB)),
            memlock=-1,
            kernel_log=(),
            packages={"torch": "2.13.0+cu126"},
            pycuda_cuda="12.4",
            libraries=(LibraryFile("libcuda.so.1", "/usr/lib/libcuda.so.1", False),),
            in_container=False,
            uid=1000,
            rdma_devices=("mlx5_0",),
        )

    def but(self, **changes: Any) -> MachineFacts:
        return replace(self.facts, **changes)

    def with_inventory(self, **changes: Any) -> MachineFacts:
        assert isinstance(self.facts.inventory, Inventory)
        return self.but(inventory=replace(self.facts.inventory, **changes))

    def with_first(self, **changes: Any) -> MachineFacts:
        """The first GPU changed."""
        assert isinstance(self.facts.inventory, Inventory)
        first, *others = self.facts.inventory.devices
        return self.with_inventory(devices=(replace(first, **changes), *others))

    @property
    def first(self) -> Device:
        assert isinstance(self.facts.inventory, Inventory)
        return self.facts.inventory.devices[0]


def healthy(found: Inventory) -> Machine:
    """A machine of one's own: the fleet's GPUs without its processes, and without MIG."""
    quiet = tuple(
        replace(device, memory=replace(device.memory, used=read(Bytes(0))))
        for device in found.devices
        if device.mig.enabled.value is not True
    )
    sees = Visibility(devices=tuple(device.key for device in quiet))
    return Machine(
        replace(found, processes=(), devices=quiet, visibility=sees, disagreements=(), errors=())
    )


def outcome(facts: MachineFacts) -> Outcome:
    return examine(CHECKS, facts)


def of(rule: str, facts: MachineFacts) -> list[Finding]:
    """The findings of one rule."""
    return [finding for finding in outcome(facts).findings if finding.rule == rule]


def only(rule: str, facts: MachineFacts) -> Finding:
    """The one finding there is, which must be of this rule."""
    found = outcome(facts).findings
    assert [finding.rule for finding in found] == [rule], found
    return found[0]


def reasons(rule: str, facts: MachineFacts) -> list[str]:
    """Why a rule was not checked."""
    return [entry.reason for entry in outcome(facts).not_checked if entry.rule.id == rule]


def passed(rule: str, facts: MachineFacts) -> bool:
    return rule in [info.id for info in outcome(facts).passed]
