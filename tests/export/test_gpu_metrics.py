"""The GPUs' metrics: names by the conventions, units, and nothing for what could not be read."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpuprobe.api.devices import inventory
from gpuprobe.model.machine.clocks import THROTTLE_REASONS
from gpuprobe.model.machine.devices import Device, DeviceIdentity, Inventory
from gpuprobe.model.values import Reading, ReadStatus, Unavailable
from gpuprobe.reporters.metrics.gpu import (
    GPU_METRICS,
    THROTTLE_LABELS,
    GpuNames,
    gpu_families,
)
from gpuprobe.reporters.metrics.metrics import MAX_LABEL, Family, Metric, Sample, family
from gpuprobe.reporters.metrics.prometheus import render
from gpuprobe.testing import fleets

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Series:
    """What the official client's parser makes of the text. No series may be there twice."""
    series: Series = {}
    for one in text_string_to_metric_families(text):
        for sample in one.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in series
            series[key] = sample.value
    return series


def of(series: Series, metric: str, /, **labels: str) -> list[float]:
    """The values of the series with this name and (at least) these labels."""
    return [
        value
        for (found, pairs), value in series.items()
        if found == metric and labels.items() <= dict(pairs).items()
    ]


def exported(found: Inventory, **options: object) -> Series:
    given: dict[str, object] = {"xids": {}, **options}
    return parsed(render(gpu_families(found, GpuNames(), **given)))  # type: ignore[arg-type]


@pytest.mark.parametrize("fleet", sorted(fleets()))
def test_every_fleet_passes_the_official_parser(fleet: str) -> None:
    found = inventory(("nvml",), fleet)
    series = exported(found, processes=3)
    known = {metric.name: metric for metric in GPU_METRICS}
    for name, labels in series:
        assert tuple(sorted(known[name].labels)) == tuple(sorted(dict(labels)))
    for device in found.devices:
        uuid = device.key
        for part, metric in (("total", "total"), ("free", "free"), ("reserved", "reserved")):
            reading = getattr(device.memory, part).value
            wanted = [] if isinstance(reading, Unavailable) else [reading]
            assert of(series, f"gpuprobe_gpu_memory_{metric}_bytes", uuid=uuid) == wanted


def test_units_are_base_units() -> None:
    found = inventory(("nvml",), "8xh100")
    series = exported(found)
    device = found.devices[3]
    assert isinstance(device.power.draw.value, int)

    def one(name: str, **labels: str) -> float:
        (value,) = of(series, name, index="3", **labels)
        return value

    def raw(reading: Reading[int]) -> int:
        assert isinstance(reading.value, int)
        return reading.value

    assert one("gpuprobe_gpu_power_watts") == raw(device.power.draw) / 1000
    assert one("gpuprobe_gpu_energy_joules_total") == raw(device.power.energy) / 1000
    assert one("gpuprobe_gpu_clock_hertz", clock="sm") == raw(device.clocks.sm) * 1e6
    general = one("gpuprobe_gpu_utilization_ratio", task="general")
    assert general == raw(device.utilisation.gpu) / 100
    assert one("gpuprobe_gpu_temperature_celsius", sensor="gpu") == raw(device.temperature.gpu)
    assert one("gpuprobe_gpu_up") == 1
    pci = str(device.identity.pci_bus_id)
    assert one("gpuprobe_gpu_info", pci=pci, architecture="hopper", compute_capability="9.0") == 1


def test_parts_sum_to_the_total() -> None:
    series = exported(inventory(("nvml",), "8xh100"))
    for index in map(str, range(8)):
        (total,) = of(series, "gpuprobe_gpu_memory_total_bytes", index=index)
        assert sum(of(series, "gpuprobe_gpu_memory_part_bytes", index=index)) == total


def test_names_follow_the_conventions() -> None:
    names = [metric.name for metric in GPU_METRICS]
    assert len(set(names)) == len(names)
    for metric in GPU_METRICS:
        assert re.fullmatch(r"gpuprobe_[a-z0-9_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.name.removesuffix("_total").endswith(metric.unit)
        assert metric.help.endswith(".")
        assert metric.source
        for label in metric.labels:
            assert re.fullmatch(r"[a-z][a-z_]*", label)


def test_throttle_reasons_are_those_the_probe_tells() -> None:
    assert set(THROTTLE_LABELS) == set(THROTTLE_REASONS.values())
    found = inventory(("nvml",), "8xh100")
    slow = replace(found.devices[0], throttling=Reading(("power cap", "reason 0x8000"), "nvml"))
    series = exported(replace(found, devices=(slow, *found.devices[1:])))
    on = {
        dict(labels)["reason"]
        for (name, labels), value in series.items()
        if name == "gpuprobe_gpu_clock_limited" and value and dict(labels)["index"] == "0"
    }
    assert on == {"sw_power_cap", "unknown"}


def lost(device: Device) -> Device:
    """As `gpuprobe.probes.nvml.source` has a GPU that gives no handle any more."""
    gone = Unavailable("GPU is lost", ReadStatus.LOST)
    reading: Reading[object] = Reading(gone, "nvml")
    identity = DeviceIdentity(uuid=gone, pci_bus_id=gone, nvml_index=device.identity.nvml_index)
    return Device(identity, name=reading, throttling=reading)  # type: ignore[arg-type]


def test_a_lost_gpu_keeps_its_labels_and_has_no_values() -> None:
    names = GpuNames()
    before = inventory(("nvml",), "8xh100")
    gpu_families(before, names, xids={})
    victim = before.devices[2]
    after = replace(
        before, devices=tuple(lost(d) if d is victim else d for d in before.devices), waterfalls=()
    )
    series = parsed(render(gpu_families(after, names, xids={})))
    mine = {name: value for (name, labels), value in series.items() if ("index", "2") in labels}
    assert mine == {"gpuprobe_gpu_up": 0}
    assert of(series, "gpuprobe_gpu_up", uuid=victim.key, name=str(victim.name.value)) == [0]
    assert len(of(series, "gpuprobe_gpu_memory_used_bytes")) == 7


def test_a_gpu_that_was_lost_from_the_start_has_its_index() -> None:
    found = inventory(("nvml",), "8xh100")
    series = exported(replace(found, devices=(lost(found.devices[0]),), waterfalls=()))
    assert of(series, "gpuprobe_gpu_up", index="0", uuid="nvml-0", name="") == [0]


def test_processes_are_opt_in_and_capped() -> None:
    found = inventory(("nvml",), "8xh100")
    assert not of(exported(found), "gpuprobe_gpu_process_memory_bytes")
    crowd = tuple(
        replace(found.processes[0], pid=pid, memory=Reading(pid * 1000, "nvml"))  # type: ignore[arg-type]
        for pid in range(1, 200)
    )
    series = exported(replace(found, processes=crowd), processes=5)
    kept = of(series, "gpuprobe_gpu_process_memory_bytes")
    assert sorted(kept) == [195000, 196000, 197000, 198000, 199000]
    uuid = crowd[0].device
    assert of(series, "gpuprobe_gpu_processes", uuid=uuid) == [199]


def test_a_refused_process_list_is_not_an_empty_one() -> None:
    from gpuprobe.model.machine.devices import ProbeError

    found = inventory(("nvml",), "8xh100")
    key = found.devices[1].key
    refused = ProbeError("nvml", ReadStatus.DENIED, "no permission", key, "processes")
    series = exported(replace(found, errors=(*found.errors, refused)))
    assert not of(series, "gpuprobe_gpu_processes", uuid=key)
    assert len(of(series, "gpuprobe_gpu_processes")) == 7


def test_xids_are_counted_by_number() -> None:
    found = inventory(("nvml",), "8xh100")
    key = found.devices[1].key
    series = exported(found, xids={key: {79: 1, 31: 4}, "another machine's": {1: 1}})
    assert of(series, "gpuprobe_gpu_xid_errors_total", uuid=key, xid="31") == [4]
    assert len(of(series, "gpuprobe_gpu_xid_errors_total")) == 2
    assert not of(
        exported(found, xids=Unavailable("no permission")), "gpuprobe_gpu_xid_errors_total"
    )


@given(st.text(), st.floats(allow_nan=False) | st.integers(-(2**53), 2**53))
def test_any_text_is_a_label_and_any_number_a_value(text: str, value: float) -> None:
    metric = Metric("gpuprobe_x", "gauge", "", "X.", ("a", "b"), "")
    one = family(metric, [((text, "end"), value)])
    ((labels, number),) = [(s.labels, s.value) for s in one.samples]
    assert len(labels[0]) <= MAX_LABEL
    assert labels[0].isprintable()
    ((name, pairs), read) = next(iter(parsed(render([one])).items()))
    assert (name, read) == ("gpuprobe_x", number)
    assert dict(pairs) == {"a": labels[0], "b": "end"}


def test_the_help_is_one_line() -> None:
    metric = Metric("gpuprobe_x", "gauge", "", "a\\b\nc", (), "")
    (parsed_family,) = text_string_to_metric_families(
        render([Family(metric, (Sample((), 1),)), Family(metric, ())])
    )
    assert parsed_family.documentation == "a\\b\nc"


def test_labels_of_the_wrong_number_are_a_bug_that_is_seen() -> None:
    metric = Metric("gpuprobe_x", "gauge", "", "X.", ("a",), "")
    with pytest.raises(ValueError, match="gpuprobe_x"):
        family(metric, [((), 1)])
