"""Rules about the driver, torch and pycuda."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor_machine import TORCH, Machine, of, only, outcome, passed, read, reasons

from gpuprobe.api.devices import inventory
from gpuprobe.catalogue.architectures import runs_on
from gpuprobe.model.findings import Level
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.probes.health import RULES
from gpuprobe.probes.health.base import LibraryFile, MachineFacts
from gpuprobe.probes.health.driver import version_pair


def test_a_healthy_machine_passes_every_rule(machine: Machine) -> None:
    result = outcome(machine.facts)
    assert result.findings == ()
    assert result.not_checked == ()
    assert len(result.passed) == len(RULES)


def test_where_nothing_could_be_read_nothing_passes() -> None:
    result = outcome(MachineFacts())
    assert result.passed == ()
    assert result.findings == ()
    assert {entry.rule.id for entry in result.not_checked} == {r.id for r in RULES}


def test_no_driver_is_found_and_device_rules_say_why_they_did_not_look(machine: Machine) -> None:
    facts = machine.but(inventory=inventory(("nvml",), "no-driver", environ={}), libraries=())
    found = only("GP101", facts)
    assert found.level is Level.ERROR
    assert "not loaded" in dict(found.evidence)["NVML error"]
    assert found.fix is not None
    assert "modprobe" in found.fix.code
    assert reasons("GP120", facts) == ["no driver"]
    assert reasons("GP104", facts) == ["no driver: unknown whether there is a GPU"]


def test_in_a_container_the_fix_is_the_containers(machine: Machine) -> None:
    gone = inventory(("nvml",), "no-driver", environ={})
    found = only("GP101", machine.but(inventory=gone, in_container=True))
    assert found.fix is not None
    assert "--gpus all" in found.fix.code
    assert "Without an NVIDIA GPU in the host, there is nothing to fix." in found.fix.text
    assert dict(found.evidence)["inside a container"] == "yes"


@pytest.mark.parametrize(
    ("inside", "text"), [(False, "no"), (Unavailable("/proc/1: denied"), "unknown")]
)
def test_whether_it_is_a_container_is_in_the_evidence(
    machine: Machine, inside: bool | Unavailable, text: str
) -> None:
    gone = inventory(("nvml",), "no-driver", environ={})
    facts = machine.but(inventory=gone, libraries=(), in_container=inside)
    assert dict(only("GP101", facts).evidence)["inside a container"] == text


def test_a_missing_python_package_is_no_missing_driver(machine: Machine) -> None:
    gone = inventory(("nvml",), "no-driver", environ={})
    source = replace(gone.sources[0], reason="nvidia-ml-py is not installed (No module ...)")
    facts = machine.but(inventory=replace(gone, sources=(source,)))
    assert of("GP101", facts) == []
    assert reasons("GP101", facts) == [source.reason]


def test_a_stub_library(machine: Machine) -> None:
    stub = LibraryFile("libcuda.so.1", "/usr/local/cuda/lib64/stubs/libcuda.so.1", True)
    assert only("GP102", machine.but(libraries=(stub,))).subject == "libcuda.so.1"


@pytest.mark.parametrize(
    ("driver", "built", "level"),
    [
        ("12.8", "12.6", None),
        ("12.6", "12.6", None),
        ("13.0", "12.6", None),
        ("12.2", "12.6", Level.NOTE),  # minor-version compatibility
        ("11.8", "12.6", Level.ERROR),
        ("12.9", "13.0", Level.ERROR),
        ("10.1", "10.2", Level.ERROR),  # before 11 there was no such compatibility
    ],
)
def test_driver_against_runtime(
    machine: Machine, driver: str, built: str, level: Level | None
) -> None:
    found = machine.facts.inventory
    assert not isinstance(found, Unavailable)
    facts = machine.but(
        inventory=replace(found, driver=replace(found.driver, cuda=read(driver))),
        torch=replace(TORCH, cuda=built),
        pycuda_cuda="9.0",
    )
    assert [f.level for f in of("GP103", facts)] == ([] if level is None else [level])


def test_the_compatibility_package_makes_an_old_driver_a_note(machine: Machine) -> None:
    found = machine.facts.inventory
    assert not isinstance(found, Unavailable)
    compat = LibraryFile("libcuda.so.1", "/usr/local/cuda-12.6/compat/libcuda.so.560.35", False)
    facts = machine.but(
        inventory=replace(found, driver=replace(found.driver, cuda=read("11.8"))),
        libraries=(compat,),
    )
    assert [f.level for f in of("GP103", facts)] == [Level.NOTE]


def test_torch_without_cuda(machine: Machine) -> None:
    cpu = replace(TORCH, version="2.13.0+cpu", cuda=Unavailable("built without CUDA"))
    assert only("GP104", machine.but(torch=cpu)).level is Level.ERROR
    without_gpu = machine.with_inventory(devices=())
    assert of("GP104", replace(without_gpu, torch=cpu)) == []
    rocm = replace(cpu, hip="6.2")
    assert of("GP104", machine.but(torch=rocm)) == []


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_90", (9, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("compute_80", (9, 0), True),
        ("compute_90", (8, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (9, 1), False),
        ("compute_90a", (10, 0), False),
        ("sm_100f", (10, 3), True),
        ("sm_100f", (12, 0), False),
        ("sm_120", (12, 0), True),
        ("nonsense", (9, 0), False),
    ],
)
def test_which_code_runs_where(arch: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(arch, capability) is runs


def test_no_code_for_the_gpu(machine: Machine) -> None:
    found = of("GP105", machine.but(torch=replace(TORCH, archs=("sm_70", "sm_75", "sm_80"))))
    assert len(found) == 7  # every H100
    assert ("compute capability", "9.0") in found[0].evidence


def test_a_torch_that_cannot_be_imported(machine: Machine) -> None:
    broken = Unavailable("import torch: signal 11: nothing")
    assert only("GP106", machine.but(torch=broken)).level is Level.ERROR
    absent = Unavailable("torch is not installed", ReadStatus.UNSUPPORTED)
    facts = machine.but(torch=absent)
    assert of("GP106", facts) == []
    assert reasons("GP106", facts) == ["torch is not installed"]
    assert reasons("GP103", facts) == ["torch is not installed"]


def test_pycuda_against_driver_and_torch(machine: Machine) -> None:
    assert only("GP170", machine.but(pycuda_cuda="12.9")).level is Level.ERROR
    assert only("GP170", machine.but(pycuda_cuda="11.8")).level is Level.NOTE
    assert passed("GP170", machine.but(pycuda_cuda="12.8"))


def test_version_pair() -> None:
    assert version_pair("12.8.1") == (12, 8)
    assert version_pair("2.13.0+cu126") == (2, 13)
    assert version_pair("nightly") is None
