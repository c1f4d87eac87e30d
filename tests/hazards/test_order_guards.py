"""What orders streams by itself, and what tells whether freed memory could be given away."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import gpuprobe
from gpuprobe.hazard_watch import device as cuda_device
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.events import Allocation, EventRecord, EventWait, Free, Launch
from gpuprobe.hazards.footprint import Footprint

_SMALL, _LARGE = 4096, 4 << 20


class Device:
    """An engine with a default stream, two side streams and, as stream 200, a blocking one."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.engine.legacy.blocking = lambda device, number: number >= 200
        self.main, self.one, self.two = (self.engine.stream(0, at) for at in range(3))
        self.blocking, self.other = self.engine.stream(0, 200), self.engine.stream(0, 201)

    def use(self, actor: int, address: int, size: int = 512, *, write: bool = True) -> None:
        where = Footprint(address, address + size)
        site = (actor, address, self.engine.operations)
        self.engine.apply(Launch(actor, "op", [(address, where, write)], site))

    @property
    def rules(self) -> list[str]:
        return [race.rule.id for race in self.engine.races]


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.mark.parametrize("order", [("main", "blocking"), ("blocking", "main")])
def test_the_legacy_default_stream_and_a_blocking_one_wait_for_each_other(
    device: Device, order: tuple[str, str]
) -> None:
    for name in order:
        device.use(getattr(device, name), 0)
    assert device.rules == []
    device.use(device.one, 0)
    assert device.rules == ["GP203"]


def test_blocking_streams_do_not_wait_for_each_other(device: Device) -> None:
    device.use(device.blocking, 0)
    device.use(device.other, 0)
    assert device.rules == ["GP203"]


def test_what_the_default_stream_does_between_them_orders_blocking_streams(device: Device) -> None:
    device.use(device.blocking, 0)
    device.use(device.main, 1024)
    device.use(device.other, 0)
    assert device.rules == []


@pytest.mark.parametrize("waits", [EventRecord, EventWait])
def test_records_and_waits_of_the_default_stream_are_barriers_too(
    device: Device, waits: type[EventRecord | EventWait]
) -> None:
    device.engine.apply(EventRecord(7, device.one))
    device.use(device.blocking, 0)
    device.engine.apply(waits(7, device.main))
    device.use(device.other, 0)
    assert device.rules == []


def test_blocking_streams_of_another_device_are_not_waited_for(device: Device) -> None:
    elsewhere = device.engine.stream(1, 200)
    device.use(elsewhere, 0)
    device.use(device.main, 0)
    assert device.rules == ["GP203"]


def test_a_replayed_log_has_the_same_barriers(device: Device) -> None:
    device.use(device.blocking, 0)
    device.use(device.main, 0)
    device.use(device.one, 0)
    last = device.engine.races[-1].log_index
    again = device.engine.replayed(lambda _, log: (event for _, event in log), last)
    assert len(again.races) == len(device.engine.races) > 0


# -- memory that could have been given away


def _freed_under(device: Device, size: int = _SMALL, private: bool = False) -> None:
    """A block of the first side stream is freed while the default stream reads it."""
    device.engine.apply(Allocation(0, size, device.one, private))
    device.use(device.one, 0)
    device.engine.apply(EventRecord(1, device.one))
    device.engine.apply(EventWait(1, device.main))
    device.use(device.main, 0, write=False)
    device.engine.apply(Free(0, "freed"))


@pytest.mark.parametrize(
    ("size", "later", "rules"),
    [
        (_SMALL, _SMALL, ["GP213"]),
        (_SMALL, 64 * _SMALL, ["GP213"]),  # merged with what lies around it
        (_LARGE, 2 * _LARGE, ["GP213"]),
        (_SMALL, _LARGE, []),  # of the other pool
        (_LARGE, _SMALL, []),
    ],
)
def test_blocks_of_the_same_pool_could_have_been_given_it(
    device: Device, size: int, later: int, rules: list[str]
) -> None:
    _freed_under(device, size)
    device.engine.apply(Allocation(1 << 30, later, device.one))
    device.use(device.one, 1 << 30)
    assert device.rules == rules


def test_blocks_of_other_streams_do_not_tell_that_the_memory_was_safe(device: Device) -> None:
    _freed_under(device)
    device.engine.apply(
        Allocation(1 << 30, _SMALL, device.main)
    )  # it has seen its own read, of course
    device.use(device.main, 1 << 30)
    device.engine.at_end()
    assert device.rules == ["GP213"]


def test_memory_of_a_graphs_pool_is_given_to_no_other_tensor(device: Device) -> None:
    _freed_under(device, private=True)
    device.engine.at_end()
    assert device.rules == []


def test_a_place_whose_uses_are_waited_for_elsewhere_is_safe(device: Device) -> None:
    for wait in (True, False):
        device.engine.apply(Allocation(0, _SMALL, device.one))
        device.use(device.one, 0)
        device.engine.apply(EventRecord(1, device.one))
        device.engine.apply(EventWait(1, device.main))
        where = Footprint(0, 512)
        device.engine.apply(Launch(device.main, "op", [(0, where, False)], "the consumer"))
        if wait:
            device.engine.apply(EventRecord(2, device.main))
            device.engine.apply(EventWait(2, device.one))
        device.engine.apply(Free(0, "freed"))
    device.engine.at_end()
    assert device.rules == []


# -- the program does the same with and without the watch


def _reused() -> list[bool]:
    """Whether freed blocks that were recorded for another stream are given away again: once their
    user is done, and for a stream without work.
    """
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    source = torch.ones(4).pin_memory()
    result = torch.empty(4, device="cuda")
    with torch.cuda.stream(side):
        block = source.cuda(non_blocking=True)
        other = torch.ones(4, device="cuda")
    main.wait_stream(side)
    block.record_stream(main)
    result.copy_(block)
    copied = block.data_ptr()
    del block
    main.synchronize()
    with torch.cuda.stream(side):
        again = torch.empty(4, device="cuda")
    idle = torch.ones(4, device="cuda")
    idle.record_stream(side)
    address = idle.data_ptr()
    del idle
    last = torch.empty(4, device="cuda")
    return [again.data_ptr() == copied, last.data_ptr() == address and other is not None]


@pytest.mark.simulated
def test_the_watch_holds_no_block() -> None:
    with gpuprobe.virtual_gpu("h100-80gb"):
        assert _reused() == [True, True]
    with gpuprobe.virtual_gpu("h100-80gb"), gpuprobe.detect_hazards():
        assert _reused() == [True, True]


class _Twice(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


@pytest.mark.simulated
@pytest.mark.parametrize("of_base", [False, True])
def test_the_watch_calls_apply_of_any_torch(of_base: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch 2.15 on, ``apply`` is the descriptor of the C++ base class."""
    if of_base:
        apply = vars(torch._C._FunctionBase)["apply"]
        monkeypatch.setattr(torch.autograd.Function, "apply", apply)
    with gpuprobe.virtual_gpu("h100-80gb"), gpuprobe.detect_hazards() as found:
        leaf = torch.ones(4, device="cuda", requires_grad=True)
        _Twice.apply(leaf).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [2.0] * 4
    assert found.operations > 0


@pytest.mark.simulated
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_a_leafs_gradient_is_accumulated_where_a_function_took_it_first() -> None:
    """As torch 2.13 does on CUDA: the hook of a leaf sees the stream of its accumulating node."""
    with gpuprobe.virtual_gpu("h100-80gb"):
        one, two = torch.cuda.Stream(), torch.cuda.Stream()
        seen: list[Any] = []
        leaf = torch.ones(4, device="cuda", requires_grad=True)
        parts = []
        for stream in (one, two):
            with torch.cuda.stream(stream):
                parts.append(_Twice.apply(leaf))
        leaf.register_hook(lambda grad: seen.append(torch.cuda.current_stream()))
        (parts[0] + parts[1]).sum().backward()
        assert seen == [one]
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [4.0] * 4


# -- what the driver is asked on CUDA


class _Driver:
    """``cuStreamGetFlags``: stream 5 does not exist, 6 was made without flags."""

    def cuStreamIsCapturing(self, stream: Any, status: Any) -> int:
        ctypes.cast(status, ctypes.POINTER(ctypes.c_int))[0] = int(stream.value == 8)
        return 0

    def cuStreamGetFlags(self, stream: Any, flags: Any) -> int:
        assert stream.value not in (8, 9)
        if stream.value == 5:
            return 400
        ctypes.cast(flags, ctypes.POINTER(ctypes.c_uint))[0] = 0 if stream.value == 6 else 1
        return 0


@pytest.mark.parametrize(
    ("handle", "blocking"), [(0, False), (5, False), (6, True), (7, False), (8, False), (9, False)]
)
def test_the_driver_knows_which_streams_are_blocking(
    monkeypatch: pytest.MonkeyPatch, handle: int, blocking: bool
) -> None:
    """It is not asked of a stream that captures (8), whose capture would end, nor of one of torch's
    pools (9).
    """
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _Driver())
    machine = object.__new__(cuda_device.Cuda)
    machine.labels = {(0, 9): 3}
    assert machine.blocking(0, handle) is blocking


def test_without_a_driver_no_stream_is_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "_DRIVER", "libno-such-driver.so")
    assert cuda_device._waits_for_the_default_stream(6) is False
