"""A GPU's memory, divided: the parts sum to the total, whatever could not be seen."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.model.machine.devices import (
    Device,
    DeviceIdentity,
    DeviceMemory,
    GpuProcess,
    TorchView,
    WaterfallPart,
)
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable
from gpuprobe.probes.memory import waterfall

MIB = 1 << 20
NO = Unavailable("refused", ReadStatus.DENIED)


def reading(value: Any) -> Reading[Any]:
    return Reading(value, "nvml")


def device(total: Any, free: Any, reserved: Any, torch: TorchView | None = None) -> Device:
    memory = DeviceMemory(reading(total), free=reading(free), reserved=reading(reserved))
    return Device(DeviceIdentity(uuid="GPU-1"), memory=memory, torch=torch or TorchView())


def process(pid: int, memory: Any, uid: Any, own: bool = False) -> GpuProcess:
    return GpuProcess(
        pid, "GPU-1", ("compute",), reading(memory), own=own, uid=Reading(uid, "host")
    )


sizes = st.integers(0, 1 << 40).map(Bytes)
maybe = st.one_of(sizes, st.just(NO))
uids = st.one_of(st.integers(0, 3), st.just(NO))


@given(
    total=sizes,
    free=maybe,
    reserved=maybe,
    others=st.lists(st.tuples(maybe, uids), max_size=5),
    own=st.none() | maybe,
    torch=st.none() | st.tuples(sizes, sizes),
    unlisted=st.none() | st.just(NO),
)
def test_parts_sum_to_the_total(
    total: Bytes,
    free: Any,
    reserved: Any,
    others: list[tuple[Any, Any]],
    own: Any,
    torch: tuple[int, int] | None,
    unlisted: Unavailable | None,
) -> None:
    view = None
    if torch is not None:
        low, high = sorted(torch)
        view = TorchView(allocated=Reading(Bytes(low), "t"), reserved=Reading(Bytes(high), "t"))
    listed = [process(i, memory, uid) for i, (memory, uid) in enumerate(others)]
    if own is not None:
        listed.append(process(99, own, 1, own=True))
    fall = waterfall(device(total, free, reserved, view), listed, 1, unlisted)
    assert list(fall.parts) == list(WaterfallPart)
    known = [v for v in fall.parts.values() if not isinstance(v, Unavailable)]
    assert sum(known) == fall.total == total
    assert isinstance(fall.parts[WaterfallPart.UNEXPLAINED], int)
    hidden = [p for p, v in fall.parts.items() if isinstance(v, Unavailable)]
    assert not hidden or fall.notes  # a missing part has a note


def test_every_part_in_its_place() -> None:
    view = TorchView(
        allocated=Reading(Bytes(300 * MIB), "torch"), reserved=Reading(Bytes(400 * MIB), "torch")
    )
    listed = [
        process(1, Bytes(1000 * MIB), uid=7),
        process(2, Bytes(200 * MIB), uid=1),
        process(3, Bytes(900 * MIB), uid=1, own=True),
    ]
    fall = waterfall(
        device(Bytes(8000 * MIB), Bytes(5000 * MIB), Bytes(800 * MIB), view), listed, 1
    )
    assert {part.value: value // MIB for part, value in fall.parts.items()} == {  # type: ignore[operator]
        "driver_reserved": 800,
        "other_users": 1000,
        "own_other_processes": 200,
        "this_context": 500,
        "torch_unused": 100,
        "torch_allocated": 300,
        "unexplained": 100,
        "free": 5000,
    }
    assert fall.notes == ()


def test_a_process_that_nvml_cannot_name_is_not_called_a_context() -> None:
    view = TorchView(
        allocated=Reading(Bytes(MIB), "torch"), reserved=Reading(Bytes(2 * MIB), "torch")
    )
    listed = [process(4242, Bytes(500 * MIB), uid=NO)]
    fall = waterfall(device(Bytes(1000 * MIB), Bytes(400 * MIB), Bytes(0), view), listed, 1)
    assert isinstance(fall.parts[WaterfallPart.CONTEXT], Unavailable)
    assert any("owner" in note for note in fall.notes)


def test_without_a_total_there_is_nothing_to_divide() -> None:
    fall = waterfall(device(NO, NO, NO), [], 1)
    assert fall.total is NO
    assert fall.parts == {}
