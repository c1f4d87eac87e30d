"""The watch of torch's own CUDA code: what it puts in place, what it sees besides operators, and
that it does no harm. Runs only where torch has a device.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import gpuprobe
from gpuprobe.hazard_watch import hooks
from gpuprobe.hazard_watch.source import EventSource
from gpuprobe.patching import Patches
from gpuprobe.torch_support.version import installed

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is queued; graphs are captured on a new stream. torch hands out 32 streams in turn:
    a test's own stream may be the one that all captures use, where nothing can race.
    """
    monkeypatch.setattr(torch.cuda.graphs.graph, "default_capture_stream", None)
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def failing() -> None:
    torch.ones(3, device="cuda") + torch.ones(4, device="cuda")


def test_an_exception_stays_what_it_is() -> None:
    """Tensors on the stack are freed while it is on its way."""
    with gpuprobe.detect_hazards(), pytest.raises(RuntimeError, match="must match the size"):
        failing()
    with pytest.raises(RuntimeError, match="must match the size"):
        failing()


def test_nothing_is_left_behind() -> None:
    def found() -> list[Any]:
        kinds = torch.Event, torch.Stream, torch.cuda.Event, torch.cuda.Stream, torch.Tensor
        return [
            *(dict(vars(kind)) for kind in kinds),
            torch._C._cuda_setStream,
            torch._C._cuda_synchronize,
            torch.UntypedStorage.resize_,
            torch.autograd.graph._engine_run_backward,
            threading.Thread.run,
            _get_current_dispatch_mode_stack(),
        ]

    before = found()
    with gpuprobe.detect_hazards():
        assert found() != before
    assert found() == before


def test_no_reference_to_true_is_lost() -> None:
    """Before Python 3.12, which counts none of them, a program ends when the last one is gone."""
    with gpuprobe.detect_hazards():
        torch.ones(3, device="cuda")
    gc.collect()
    before = sys.getrefcount(True)
    for _ in range(40):
        with gpuprobe.detect_hazards():
            pass
    gc.collect()
    assert sys.getrefcount(True) > before - 10


def test_the_handle_of_a_collective_lives_as_long_as_the_program_keeps_it() -> None:
    """It keeps the tensors of the collective alive."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(64, device="cuda")
        with gpuprobe.detect_hazards() as found:
            kept = dist.all_reduce(x, async_op=True)
            x * 2  # races with it
            kept.wait()
            x + 1
            handle = dist.all_reduce(x, async_op=True)
            dropped = weakref.ref(handle)
            del handle
            torch.ones(64, device="cuda")
            assert dropped() is None
        assert [finding.kind for finding in found.races] == ["read-after-write"]
    finally:
        dist.destroy_process_group()


def test_a_failure_of_ours_ends_the_watch_only() -> None:
    source, patches = EventSource(), Patches()
    hooks.install(source, patches)

    def broken(*args: Any) -> None:
        raise RuntimeError("planted")

    source.device_op = broken  # type: ignore[method-assign]
    x = torch.ones(4, device="cuda")
    assert x.add(1).shape == (4,)
    patches.undo()
    assert source.broken == "RuntimeError: planted"


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_that_the_program_leaves_on_stays() -> None:
    mode = Passing()
    with gpuprobe.detect_hazards():
        mode.__enter__()
    assert _get_current_dispatch_mode_stack()[-1] is mode
    torch.ones(3, device="cuda").add(1)
    mode.__exit__(None, None, None)
    assert mode not in _get_current_dispatch_mode_stack()


def races(found: Any) -> list[str]:
    assert not [text for text in found.coverage if "failure" in text], found.coverage
    return [finding.kind for finding in found.races]


@pytest.mark.skipif(not hasattr(torch.Stream, "__enter__"), reason="torch.Stream is no context")
@pytest.mark.parametrize(
    "ordered", ["no", "wait_stream", "wait_event", "event.wait", "synchronize"]
)
def test_streams_and_events_of_any_accelerator_count(ordered: str) -> None:
    """``torch.Stream`` and ``torch.Event``, whose methods are C's."""
    with gpuprobe.detect_hazards() as found:
        side = torch.Stream("cuda:0")
        x = torch.ones(64, device="cuda")
        current = torch.accelerator.current_stream()
        if ordered == "wait_stream":
            side.wait_stream(current)
        elif ordered == "wait_event":
            side.wait_event(current.record_event())
        elif ordered == "event.wait":
            event = torch.Event("cuda")
            event.record(current)
            event.wait(side)
        elif ordered == "synchronize":
            current.synchronize()
        with side:
            y = x * 2
        torch.cuda.synchronize()
    assert y.shape == x.shape
    assert races(found) == ([] if ordered != "no" else ["read-after-write"])


def test_memory_of_before_the_watch_has_its_stream() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(64, device="cuda")
    torch.cuda.synchronize()
    with gpuprobe.detect_hazards() as found:
        y = x * 2  # on the default stream, while x is the side stream's
        del x
        with torch.cuda.stream(side):
            z = torch.zeros(64, device="cuda")
    assert y.shape == z.shape
    assert races(found) == ["use-after-free"]


def test_memory_that_a_storage_lets_go_of_is_free() -> None:
    side = torch.cuda.Stream()
    with gpuprobe.detect_hazards() as found:
        x = torch.ones(64, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        x.untyped_storage().resize_(0)
        z = torch.zeros(64, device="cuda")
    assert y.shape == z.shape
    assert races(found) == ["use-after-free"]


def test_gradients_of_another_stream_are_ordered_as_torch_orders_them() -> None:
    side = torch.cuda.Stream()
    with gpuprobe.detect_hazards() as found:
        w = torch.ones(64, device="cuda", requires_grad=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = w * 2
        torch.cuda.current_stream().wait_stream(side)
        (y * y + y).sum().backward()
        w.grad.add_(1)
    assert races(found) == []


def test_synchronisations_are_timed() -> None:
    with gpuprobe.detect_hazards() as found:
        x = torch.ones(64, device="cuda")
        for _ in range(3):
            x.sum().item()
    (row,) = [row for row in found.syncs if row.reason == "item"]
    assert row.count == 3
    assert row.seconds is not None
    assert row.seconds > 0


def test_copies_in_inference_mode_are_seen() -> None:
    """Where a mode gets operators that only call others."""
    side = torch.cuda.Stream()
    layer = torch.nn.Linear(8, 8).cuda()
    host = torch.ones(4, 8).pin_memory()
    with torch.inference_mode():
        expected = layer(host.cuda())
        with gpuprobe.detect_hazards() as found:
            with torch.cuda.stream(side):
                x = host.to("cuda", non_blocking=True)
            y = layer(x)
            torch.cuda.synchronize()
            with pytest.raises(RuntimeError):
                layer(x[:, 1:])
    assert y.shape == expected.shape
    assert set(races(found)) == {"read-after-write"}


def test_tensors_of_host_values_are_waited_for() -> None:
    with gpuprobe.detect_hazards() as found:
        x = torch.zeros(4, 4, device="cuda")
        torch.tensor([1, 2], device="cuda")
        x.new_tensor([1.0])
        x[0, 1] = 1.0
        x[2] = 1.0  # several elements: a kernel fills them
        x[[0, 1]]
    rows = sorted((row.reason, row.count, row.allowed) for row in found.syncs)
    assert rows == [
        ("copy", 1, True),
        ("new tensor from host values", 1, False),
        ("new tensor from host values", 1, False),
        # Since torch 2.15 a kernel fills the element.
        *([("number assigned to an element", 1, False)] if installed() < (2, 15) else []),
    ]


def _slots(how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows 0 and 1, and rows 2 and 3, or at least it may be so."""
    first = torch.tensor([0, 1], device="cuda")
    if how == "constructed":
        return first, torch.tensor([2, 3], device="cuda")
    if how == "copied":
        return first, torch.tensor([2, 3]).cuda()
    if how == "counted":
        return first, torch.arange(4, device="cuda")[2:]
    if how == "added":
        return first, first + 2
    assert how in ("overwritten", "computed")
    other = torch.tensor([2, 3], device="cuda")
    if how == "overwritten":
        other.fill_(2)
    return first, other if how == "overwritten" else other.clamp(max=3)


@pytest.mark.parametrize("captured", [False, True], ids=["", "captured"])
@pytest.mark.parametrize(
    "how", ["constructed", "copied", "counted", "added", "overwritten", "computed"]
)
def test_rows_are_known_where_the_host_gave_them(how: str, captured: bool) -> None:
    side = torch.cuda.Stream()
    with gpuprobe.detect_hazards() as found:
        cache, rows = torch.zeros(8, 64, device="cuda"), torch.ones(2, 64, device="cuda")
        first, second = _slots(how)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()

        def work() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                cache.index_copy_(0, first, rows)
            cache.index_copy_(0, second, rows)
            torch.cuda.current_stream().wait_stream(side)

        if captured:
            with torch.cuda.graph(graph):
                work()
        else:
            work()
        torch.cuda.synchronize()
    known = how in ("constructed", "copied", "counted", "added") and not captured
    assert races(found) == ([] if known else ["write-after-write"])


def test_gpuprobes_own_events_are_none_of_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they are asked at the end of a step would be taken for waits of the host."""
    from gpuprobe.sampler.gpu_clock import GpuClock

    monkeypatch.setattr("gpuprobe.sampler.gpu_clock.takes_time", lambda: True)
    torch.cuda.init()
    clock = GpuClock.of_torch()
    assert clock is not None
    assert clock.mark() is not None
    with gpuprobe.detect_hazards():
        assert clock.mark() is None
    assert clock.mark() is not None
