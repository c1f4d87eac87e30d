"""Joining by identity, and naming what differs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.model.machine.devices import (
    NOT_READ,
    Device,
    DeviceIdentity,
    DeviceMemory,
    MigInstance,
    MigMode,
)
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable
from gpuprobe.probes.base import SourceView
from gpuprobe.probes.joining import join
from gpuprobe.probes.nvml.readings import pci_bus_id

NONE = Unavailable("not reported", ReadStatus.UNSUPPORTED)
GIB = 1 << 30


def uuid(n: int) -> str:
    return f"GPU-{n:08x}-0000-0000-0000-000000000000"


def bus(n: int) -> str:
    return f"00000000:{n + 1:02x}:00.0"


def gpu(source: str, n: int, total: int = 80 * GIB, name: str = "H100", **identity: Any) -> Device:
    who = {"uuid": uuid(n), "pci_bus_id": bus(n), **identity}
    memory = DeviceMemory(total=Reading(Bytes(total), source))
    return Device(DeviceIdentity(**who), name=Reading(name, source), memory=memory)


def nvml(*devices: Device) -> SourceView:
    return SourceView("nvml", devices)


@given(st.permutations(range(4)))
def test_cuda_order_is_followed_whatever_it_is(order: list[int]) -> None:
    views = [
        nvml(*(gpu("nvml", n, nvml_index=n) for n in range(4))),
        SourceView("cuda", tuple(gpu("cuda", n, cuda_ordinal=i) for i, n in enumerate(order))),
    ]
    joined = join(views, {})
    assert [d.identity.nvml_index for d in joined.devices] == [0, 1, 2, 3]
    for ordinal, n in enumerate(order):
        assert joined.devices[n].identity.cuda_ordinal == ordinal
    named = [d.message for d in joined.disagreements if d.kind == "order"]
    assert bool(named) == (order != [0, 1, 2, 3])
    for ordinal, n in enumerate(order):
        assert (f"cuda:{ordinal} is NVML {n}" in "".join(named)) == (ordinal != n)


def test_without_a_uuid_the_pci_address_joins() -> None:
    views = [
        nvml(gpu("nvml", 0, nvml_index=0), gpu("nvml", 1, nvml_index=1)),
        SourceView("pycuda", (gpu("pycuda", 1, uuid=NONE, cuda_ordinal=0),)),
    ]
    joined = join(views, {"CUDA_VISIBLE_DEVICES": "1"})
    assert len(joined.devices) == 2
    assert joined.devices[1].identity.cuda_ordinal == 0
    assert isinstance(joined.devices[0].identity.cuda_ordinal, Unavailable)


def test_an_index_alone_never_joins() -> None:
    views = [
        nvml(gpu("nvml", 0, nvml_index=0)),
        SourceView("torch", (gpu("torch", 0, uuid=NONE, pci_bus_id=NONE, torch_ordinal=0),)),
    ]
    joined = join(views, {})
    assert len(joined.devices) == 2
    assert [d.kind for d in joined.disagreements if d.kind == "unmatched"] == ["unmatched"]


def test_torch_that_sees_fewer_is_named() -> None:
    views = [
        nvml(*(gpu("nvml", n, nvml_index=n) for n in range(8))),
        SourceView("torch", tuple(gpu("torch", n, torch_ordinal=n) for n in range(2))),
    ]
    messages = [d.message for d in join(views, {}).disagreements]
    assert "torch sees 2 of 8 GPUs" in messages
    assert any("in a different order than CUDA_VISIBLE_DEVICES" in m for m in messages)


@pytest.mark.parametrize(
    ("cuda_total", "reserved", "expected", "word"),
    [
        (80 * GIB - 500 * 2**20, 500 * 2**20, True, "reserved by the driver"),
        (70 * GIB, 500 * 2**20, False, "not counted by CUDA"),
        (79 * GIB, None, True, "does not report how much"),
        (60 * GIB, None, False, "not counted by CUDA"),
        (90 * GIB, 500 * 2**20, False, "different devices"),
    ],
)
def test_totals_that_differ_say_why(
    cuda_total: int, reserved: int | None, expected: bool, word: str
) -> None:
    known = gpu("nvml", 0, nvml_index=0)
    held: Reading[Any] = NOT_READ if reserved is None else Reading(Bytes(reserved), "nvml")
    memory = DeviceMemory(total=known.memory.total, reserved=held)
    views = [
        nvml(Device(known.identity, name=known.name, memory=memory)),
        SourceView("cuda", (gpu("cuda", 0, cuda_total, cuda_ordinal=0),)),
    ]
    (found,) = join(views, {}).disagreements
    assert found.kind == "total"
    assert found.expected is expected
    assert word in found.message


def test_names_that_differ_are_named() -> None:
    views = [
        nvml(gpu("nvml", 0, nvml_index=0)),
        SourceView("cuda", (gpu("cuda", 0, name="A100", cuda_ordinal=0),)),
    ]
    (found,) = join(views, {}).disagreements
    assert (found.kind, found.evidence) == ("name", (("nvml", "H100"), ("cuda", "A100")))


def test_the_source_nearest_to_the_hardware_wins_and_others_fill_in() -> None:
    blind = Device(
        DeviceIdentity(uuid=uuid(0), pci_bus_id=bus(0), nvml_index=0), name=Reading(NONE, "nvml")
    )
    views = [SourceView("torch", (gpu("torch", 0, torch_ordinal=0),)), nvml(blind)]
    (device,) = join(views, {}).devices
    assert device.name == Reading("H100", "torch")
    assert device.identity.nvml_index == 0
    assert device.identity.torch_ordinal == 0


def test_a_mig_instance_joins_its_parent() -> None:
    instance = MigInstance("MIG-0000002a-0000-0000-0000-000000000000", 1, 0)
    parent = gpu("nvml", 0, nvml_index=0, mig_instances=(instance,))
    split = Device(
        parent.identity,
        name=parent.name,
        memory=parent.memory,
        mig=MigMode(Reading(True, "nvml"), Reading(True, "nvml")),
    )
    part = gpu("cuda", 42, 10 * GIB, cuda_ordinal=0, pci_bus_id=bus(0))
    joined = join([nvml(split), SourceView("cuda", (part,))], {})
    (device,) = joined.devices
    assert device.identity.mig_instances[0].cuda_ordinal == 0
    assert joined.visibility.devices == (instance.uuid,)
    assert not [d for d in joined.disagreements if d.kind == "total"]


@pytest.mark.parametrize(
    ("raw", "known"),
    [
        ("00000000:3B:00.0", "00000000:3b:00.0"),
        ("0000:3b:00.0", "00000000:3b:00.0"),
        (b"0000:3B:00.0", "00000000:3b:00.0"),
        ("3b:00.0", "00000000:3b:00.0"),
        ("10000:01:00.0", "00010000:01:00.0"),
        ("0000:3b:00", "00000000:3b:00.0"),
    ],
)
def test_pci_addresses_are_normalised(raw: object, known: str) -> None:
    assert pci_bus_id(raw) == known


@pytest.mark.parametrize("raw", ["", "nonsense", "1:2:3:4.0", "zz:00.0"])
def test_what_is_no_pci_address_is_refused(raw: str) -> None:
    with pytest.raises(ValueError, match=r"PCI address|invalid literal"):
        pci_bus_id(raw)
