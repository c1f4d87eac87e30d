"""Rules about GPUs, on fake fleets and on a healthy machine with one thing broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from doctor_machine import GIB, Machine, of, only, outcome, passed, read, reasons

from gpuprobe.api.devices import inventory
from gpuprobe.model.findings import Level
from gpuprobe.model.machine.devices import (
    Disagreement,
    GpuProcess,
    Inventory,
    ProbeError,
    Visibility,
    VisibleEntry,
)
from gpuprobe.model.values import Bytes, ReadStatus, Unavailable
from gpuprobe.probes.health.base import KernelMessage, MachineFacts
from gpuprobe.probes.health.xid import XIDS, parse_xids

DENIED = Unavailable("Insufficient Permissions", ReadStatus.DENIED)
UNSUPPORTED = Unavailable("Not Supported", ReadStatus.UNSUPPORTED)


def fleet_facts(machine: Machine, name: str, **environ: str) -> MachineFacts:
    return machine.but(inventory=inventory(("nvml",), name, environ=environ), pycuda_cuda="9.0")


# -- which GPUs are seen


def test_a_selection_that_names_nothing(machine: Machine) -> None:
    facts = fleet_facts(machine, "8xh100", CUDA_VISIBLE_DEVICES="0,9,1")
    (found,) = of("GP110", facts)
    assert found.level is Level.WARNING
    assert "CUDA sees 1 of 8" in found.message
    assert any("'9'" in name for name, _ in found.evidence)
    (hidden,) = of("GP111", facts)
    assert hidden.message.startswith("7 of 8 GPUs are hidden")


def test_a_selection_that_leaves_nothing_is_an_error(machine: Machine) -> None:
    facts = fleet_facts(machine, "8xh100", CUDA_VISIBLE_DEVICES="99")
    assert [f.level for f in of("GP110", facts)] == [Level.ERROR]


def test_an_empty_selection_hides_all_and_is_not_invalid(machine: Machine) -> None:
    facts = fleet_facts(machine, "8xh100", CUDA_VISIBLE_DEVICES="")
    assert of("GP110", facts) == []
    (found,) = of("GP111", facts)
    assert found.level is Level.WARNING
    assert found.message.startswith("all GPUs")


def test_a_good_selection_hides_on_purpose(machine: Machine) -> None:
    facts = fleet_facts(machine, "8xh100", CUDA_VISIBLE_DEVICES="0,1,2")
    assert of("GP110", facts) == []
    assert [f.level for f in of("GP111", facts)] == [Level.NOTE]


def test_a_gpu_in_mig_mode_hides_the_others(machine: Machine) -> None:
    (found,) = of("GP111", fleet_facts(machine, "8xh100"))
    assert found.level is Level.WARNING
    assert "not set" in found.message


def test_order_cannot_be_known_among_different_models(machine: Machine) -> None:
    assert [f.level for f in of("GP112", fleet_facts(machine, "reordered"))] == [Level.WARNING]
    by_bus = fleet_facts(machine, "reordered", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert of("GP112", by_bus) == []


def test_an_expected_renumbering_is_a_note(machine: Machine) -> None:
    expected = Disagreement("order", "cuda:0 is NVML 3", ("GPU-x",), expected=True)
    assert only("GP112", machine.with_inventory(disagreements=(expected,))).level is Level.NOTE


def test_an_unknown_order_without_a_disagreement_is_not_checked(machine: Machine) -> None:
    unknown = Visibility(devices=Unavailable("only CUDA knows the order"))
    assert reasons("GP112", machine.with_inventory(visibility=unknown)) == [
        "only CUDA knows the order"
    ]
    assert reasons("GP111", machine.with_inventory(visibility=unknown)) == []
    selected = replace(unknown, setting="0")
    assert reasons("GP111", machine.with_inventory(visibility=selected)) == [
        "only CUDA knows the order"
    ]


def test_problems_of_an_unset_selection_are_not_its_fault(machine: Machine) -> None:
    sees = Visibility(devices=("GPU-x",), problems=("one MIG instance only",))
    assert of("GP110", machine.with_inventory(visibility=sees)) == []
    named = Visibility("GPU-x,7", entries=(VisibleEntry("7", reason="no such GPU"),), devices=())
    assert [f.level for f in of("GP110", machine.with_inventory(visibility=named))] == [Level.ERROR]


# -- health


def test_throttling_fleet(machine: Machine) -> None:
    found = of("GP120", fleet_facts(machine, "throttled"))
    assert [f.level for f in found] == [Level.WARNING, Level.WARNING, Level.NOTE]
    assert "high temperature" in found[0].message
    assert dict(found[0].evidence)["temperature"] == "88 °C"
    assert "power supply" in found[1].message


@pytest.mark.parametrize("reasons_now", [(), ("idle",), ("sync boost", "display clock setting")])
def test_harmless_clock_reasons(machine: Machine, reasons_now: tuple[str, ...]) -> None:
    assert passed("GP120", machine.with_first(throttling=read(reasons_now)))


def test_fixed_clocks_are_a_note(machine: Machine) -> None:
    facts = machine.with_first(throttling=read(("application clocks setting",)))
    assert only("GP120", facts).level is Level.NOTE


def test_pcie_under_load_only(machine: Machine) -> None:
    slow = replace(machine.first.pcie, generation=read(1), width=read(4))
    busy = replace(machine.first.utilisation, gpu=read(95))
    idle = replace(machine.first.utilisation, gpu=read(3))
    found = of("GP121", machine.with_first(pcie=slow, utilisation=busy))
    assert [f.message.partition(": ")[2] for f in found] == [
        "PCIe generation 1 of 5 under load",
        "PCIe lanes 4 of 16 under load",
    ]
    assert passed("GP121", machine.with_first(pcie=slow, utilisation=idle))
    full = replace(slow, generation=slow.max_generation, width=slow.max_width)
    assert passed("GP121", machine.with_first(pcie=full, utilisation=busy))
    unknown = replace(slow, generation=read(DENIED), width=read(UNSUPPORTED))
    facts = machine.with_first(pcie=unknown, utilisation=busy)
    assert of("GP121", facts) == []
    assert len(reasons("GP121", facts)) == 1  # denied is a gap, unsupported is not


def test_ecc_fleet(machine: Machine) -> None:
    facts = fleet_facts(machine, "ecc", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert [(f.level, f.message.partition(" (")[0]) for f in of("GP122", facts)] == [
        (Level.ERROR, "GPU 0"),
        (Level.WARNING, "GPU 1"),
        (Level.WARNING, "GPU 2"),
        (Level.NOTE, "GPU 3"),
    ]
    assert [f.level for f in of("GP123", facts)] == [Level.ERROR, Level.WARNING, Level.WARNING]


def test_corrected_errors_are_what_ecc_is_for(machine: Machine) -> None:
    ecc = replace(machine.first.ecc, corrected_volatile=read(5000), corrected_aggregate=read(9000))
    assert passed("GP122", machine.with_first(ecc=ecc))


def test_lost_gpus_are_named_once_and_hide_no_other(machine: Machine) -> None:
    facts = fleet_facts(machine, "lost-gpu")
    found = of("GP125", facts)
    assert [f.message.partition(" ")[0] + f.message.split()[1] for f in found] == ["GPU1", "GPU2"]
    assert all("does not answer" in reason for reason in reasons("GP120", facts))
    assert len(reasons("GP120", facts)) == 2


def test_a_refused_value_is_not_a_lost_gpu(machine: Machine) -> None:
    error = ProbeError("nvml", ReadStatus.DENIED, "Insufficient Permissions", machine.first.key)
    assert passed("GP125", machine.with_inventory(errors=(error,)))


def test_denied_values_are_not_checked_and_not_passed(machine: Machine) -> None:
    result = outcome(fleet_facts(machine, "denied"))
    unchecked = {entry.rule.id for entry in result.not_checked}
    assert {"GP120", "GP122", "GP130"} <= unchecked
    assert not {"GP120", "GP122", "GP130"} & {info.id for info in result.passed}


def test_mig_half_configured(machine: Machine) -> None:
    waiting = replace(machine.first.mig, enabled=read(False), pending=read(True))
    assert only("GP126", machine.with_first(mig=waiting)).level is Level.WARNING
    bare = replace(machine.first.mig, enabled=read(True), pending=read(True))
    assert only("GP126", machine.with_first(mig=bare)).level is Level.ERROR
    whole = inventory(("nvml",), "8xh100", environ={})
    assert of("GP126", machine.but(inventory=whole)) == []  # its last GPU has instances
    absent = replace(bare, enabled=read(UNSUPPORTED), pending=read(UNSUPPORTED))
    assert passed("GP126", machine.with_first(mig=absent))


# -- processes


def process(machine: Machine, **changes: Any) -> GpuProcess:
    base = GpuProcess(
        4242,
        machine.first.key,
        ("compute",),
        memory=read(Bytes(GIB)),
        user=read("ada"),
        uid=read(1000),
    )
    return replace(base, **changes)


def test_memory_of_a_process_that_is_gone(machine: Machine) -> None:
    gone = read(Unavailable("no such process: it ended but still holds memory"))
    zombie = process(machine, user=gone, uid=gone)
    found = only("GP130", machine.with_inventory(processes=(zombie,)))
    assert dict(found.evidence)["memory"] == "1.0 GiB"
    assert passed("GP130", machine.with_inventory(processes=(process(machine),)))


def test_memory_in_use_without_a_listed_process(machine: Machine) -> None:
    used = replace(machine.first.memory, used=read(Bytes(20 * GIB)))
    facts = machine.with_first(memory=used)
    assert "no process is listed" in only("GP130", facts).message
    inside = replace(facts, in_container=True)
    assert of("GP130", inside) == []
    assert reasons("GP130", inside)


def test_a_lost_gpu_hides_no_memory_in_use_on_the_next(machine: Machine) -> None:
    found = fleet_facts(machine, "lost-gpu")
    assert isinstance(found.inventory, Inventory)
    devices = found.inventory.devices
    used = replace(devices[-1].memory, used=read(Bytes(20 * GIB)))
    last = replace(devices[-1], memory=used)
    facts = replace(
        found, inventory=replace(found.inventory, devices=(*devices[:-1], last), processes=())
    )
    assert last.key in {finding.subject for finding in of("GP130", facts)}


def test_memory_in_use_begins_at_a_gibibyte(machine: Machine) -> None:
    for used, found in ((GIB - 1, 0), (GIB, 1)):
        memory = replace(machine.first.memory, used=read(Bytes(used)))
        assert len(of("GP130", machine.with_first(memory=memory))) == found


def test_memory_in_use_on_a_gpu_in_mig_mode_belongs_to_its_instances(machine: Machine) -> None:
    """NVML lists the processes of a GPU in MIG mode under its instances, if at all."""
    used = replace(machine.first.memory, used=read(Bytes(20 * GIB)))
    for enabled, found in ((True, 0), (False, 1)):
        mig = replace(machine.first.mig, enabled=read(enabled))
        assert len(of("GP130", machine.with_first(memory=used, mig=mig))) == found


def test_hidden_processes_are_a_gap(machine: Machine) -> None:
    hidden = read(Unavailable("hidden by the PID namespace", ReadStatus.DENIED))
    facts = machine.with_inventory(
        processes=(process(machine, hidden=True, user=hidden, uid=hidden),)
    )
    assert of("GP130", facts) == of("GP131", facts) == []
    assert reasons("GP130", facts)
    assert reasons("GP131", facts)


def test_other_users(machine: Machine) -> None:
    hers = process(machine, user=read("grace"), uid=read(1001))
    assert only("GP131", machine.with_inventory(processes=(hers,))).level is Level.WARNING
    assert passed("GP131", machine.with_inventory(processes=(process(machine),)))
    screen = replace(hers, kinds=("graphics",))
    assert passed("GP131", machine.with_inventory(processes=(screen,)))
    elsewhere = Visibility("1", devices=("GPU-other",))
    hidden = machine.with_inventory(processes=(hers,), visibility=elsewhere)
    assert [f.level for f in of("GP131", hidden)] == [Level.NOTE]


# -- Xid

LOG = (
    KernelMessage(10.0, "nvidia: loading out-of-tree module taints kernel."),
    KernelMessage(81.5, "NVRM: Xid (PCI:0000:18:00): 31, pid=7, name=python, Ch 00000008, MMU"),
    KernelMessage(82.5, "NVRM: Xid (PCI:0000:18:00): 31, pid=8, name=python, Ch 00000008, MMU"),
    KernelMessage(90.0, "NVRM: Xid (PCI:0000:FF:00): 79, pid='<unknown>', GPU has fallen off"),
    KernelMessage(95.0, "NVRM: Xid (0000:03:00): 45, Ch 00000001"),
    KernelMessage(99.0, "NVRM: Xid (PCI:0000:18:00): 9999, something new"),
)


def test_xids_are_parsed_in_every_form() -> None:
    assert [(e.pci, e.code) for e in parse_xids(LOG)] == [
        ("0000:18:00", 31),
        ("0000:18:00", 31),
        ("0000:ff:00", 79),
        ("0000:03:00", 45),
        ("0000:18:00", 9999),
    ]


def test_xids_are_joined_to_devices_by_bus_id_and_counted(machine: Machine) -> None:
    place = replace(machine.first.identity, pci_bus_id="00000000:18:00.0")
    facts = replace(machine.with_first(identity=place), kernel_log=LOG)
    found = {f.message.split()[1] + f.message.split()[3]: f for f in of("GP124", facts)}
    assert set(found) == {"31GPU", "79the", "45the", "9999GPU"}
    assert found["31GPU"].count == 2
    assert found["31GPU"].level is Level.WARNING
    assert found["79the"].level is Level.ERROR
    assert found["45the"].level is Level.NOTE
    assert "catalogue" in (found["9999GPU"].fix or pytest.fail("no fix")).text


def test_other_driver_messages_are_no_xid(machine: Machine) -> None:
    assert passed("GP124", machine.but(kernel_log=LOG[:1]))


def test_an_unreadable_log_is_not_checked(machine: Machine) -> None:
    refused = Unavailable("/dev/kmsg: Operation not permitted", ReadStatus.DENIED)
    assert reasons("GP124", machine.but(kernel_log=refused)) == [refused.reason]


# NVIDIA's descriptions (docs.nvidia.com/deploy/xid-errors), and a word of the meaning.
DESCRIPTIONS = {
    13: ("Graphics Engine Exception", "compute engine does not allow"),
    31: ("GPU memory page fault", "page fault"),
    32: ("Invalid or corrupted push buffer stream", "command stream"),
    43: ("GPU stopped processing", "stopped work"),
    45: ("Preemptive cleanup, due to previous errors", "aborted"),
    48: ("Double Bit ECC Error", "two bits"),
    61: ("Internal micro-controller breakpoint/warning", "breakpoint"),
    62: ("Internal micro-controller halt", "microcontroller halted"),
    63: ("ECC page retirement or row remapping recording event", "page was retired"),
    64: ("ECC page retirement or row remapper recording failure", "row failed"),
    68: ("NVDEC0 Exception", "video decoder"),
    69: ("Graphics Engine class error", "invalid class"),
    74: ("NVLINK Error", "NVLink"),
    79: ("GPU has fallen off the bus", "fallen off the bus"),
    92: ("High single-bit ECC error rate", "high rate"),
    94: ("Contained memory error", "was contained"),
    95: ("Uncontained memory error", "was not contained"),
    109: ("Context Switch Timeout Error", "did not yield"),
    119: ("GSP RPC Timeout", "did not answer"),
    120: ("GSP Error", "firmware"),
    121: ("C2C Link corrected error", "C2C"),
    140: ("Unrecovered ECC Error", "not recovered"),
    154: ("GPU Recovery Action Changed", "recovery action"),
}


def test_codes_have_the_meanings_that_nvidia_documents() -> None:
    assert list(DESCRIPTIONS) == list(XIDS)
    for code, (description, word) in DESCRIPTIONS.items():
        line = f"NVRM: Xid (PCI:0000:18:00): {code}, {description}"
        (event,) = parse_xids([KernelMessage(1.0, line)])
        assert word in event.advice.meaning, code


def test_every_finding_of_every_fleet_has_evidence_and_a_fix(machine: Machine) -> None:
    from gpuprobe.testing import fleets

    for name in fleets():
        found: Inventory = inventory(("nvml",), name, environ={})
        for finding in outcome(machine.but(inventory=found)).findings:
            assert finding.evidence, finding
            assert finding.fix is not None, finding
            assert finding.fix.text
