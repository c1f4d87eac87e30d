"""Stacks of what the autograd engine allocates, and which blocks are cuBLAS's workspaces."""

from __future__ import annotations

import threading

import pytest
import torch

from gpuprobe.model.memory import Category, TraceAction
from gpuprobe.model.trace import Frame, MemoryTrace
from gpuprobe.sampler.tracing import cuda
from gpuprobe.sampler.tracing.calls import BackwardCalls
from gpuprobe.sampler.tracing.cuda import Workspaces, _drop_own_frames
from gpuprobe.user_frames import PACKAGE

ALLOC, FREE = TraceAction.ALLOC.code, TraceAction.FREE_COMPLETED.code
HOOK = Frame("/app/hooks.py", 3, "hook")
THREAD = Frame(threading.__file__, 1, "_bootstrap")


def noted(monkeypatch: pytest.MonkeyPatch, times: list[int]) -> BackwardCalls:
    clock = iter(times)
    monkeypatch.setattr("gpuprobe.sampler.tracing.calls.now_us", lambda: next(clock))
    found = BackwardCalls()
    found.begin()
    return found


def traced(*rows: tuple[int, tuple[Frame, ...]]) -> MemoryTrace:
    trace = MemoryTrace("cuda:0")
    for number, (time_us, frames) in enumerate(rows):
        stack = trace.stacks.stack(tuple(map(trace.stacks.frame, frames)))
        trace.events.append(ALLOC, 0x1000 * (number + 1), 512, time_us=time_us, stack=stack)
    return trace


def stacks_of(trace: MemoryTrace) -> list[tuple[Frame, ...]]:
    return [trace.stacks.frames_of(stack) for stack in trace.events.stack]


def test_what_the_engine_allocates_has_the_stack_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = noted(monkeypatch, [10, 20])
    calls.called()
    calls.returned()
    trace = traced((5, ()), (12, ()), (13, (HOOK,)), (14, (HOOK, THREAD)), (25, ()))
    calls.complete(trace)
    before, plain, hook, thread, after = stacks_of(trace)
    assert before == after == ()
    assert plain[0].name == "test_what_the_engine_allocates_has_the_stack_of_the_call"
    assert hook == (HOOK, *plain)
    assert thread == (HOOK, THREAD)


def test_a_stack_of_the_thread_that_called_is_whole_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = noted(monkeypatch, [10, 20])
    calls.called()
    calls.returned()
    outermost = calls._call[0][-1]
    trace = traced((12, (HOOK, outermost)))
    calls.complete(trace)
    assert stacks_of(trace) == [(HOOK, outermost)]


def test_a_call_within_another_gives_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = noted(monkeypatch, [10, 20, 30, 40])

    def outer() -> None:
        calls.called()

    def inner() -> None:
        calls.called()

    outer()
    inner()
    calls.returned()
    calls.returned()
    trace = traced((15, ()), (25, ()), (35, ()))
    calls.complete(trace)
    assert [frames[0].name for frames in stacks_of(trace)] == ["outer", "inner", "outer"]


def test_a_call_that_began_before_the_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuprobe.sampler.tracing.calls.now_us", lambda: 30)
    calls = BackwardCalls()
    calls.called()
    calls.begin()
    calls.returned()
    trace = traced((15, ()), (35, ()))
    calls.complete(trace)
    assert [bool(frames) for frames in stacks_of(trace)] == [True, False]


def test_the_first_kept_block_of_a_stream_and_a_thread_is_the_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 4096
    monkeypatch.setattr(cuda, "workspace_bytes", lambda device: size)
    monkeypatch.setattr(cuda, "_addresses_of_tensors", lambda device: {0x1000})
    trace = MemoryTrace("cuda:0")
    engine = trace.stacks.stack((trace.stacks.frame(Frame("/x/torch/_tensor.py", 1, "backward")),))
    for action, address, nbytes, stack in (
        (ALLOC, 0x1000, size, 0),  # a tensor owns it
        (ALLOC, 0x2000, size, 0),  # freed again
        (FREE, 0x2000, size, 0),
        (ALLOC, 0x3000, size, 0),
        (ALLOC, 0x4000, size, 0),  # the stream has one
        (ALLOC, 0x5000, size, engine),
        (ALLOC, 0x6000, size - 512, 0),
    ):
        trace.events.append(action, address, nbytes, stack=stack)
    found = Workspaces()
    found.name(trace, uses=False)
    named = [
        address
        for address, code in zip(trace.events.address, trace.events.category, strict=True)
        if Category.from_code(code) is Category.WORKSPACE
    ]
    assert named == [0x3000, 0x5000]
    assert stacks_of(trace)[3][0].name == "at::cuda::CUDABlasWorkspace"
    later = MemoryTrace("cuda:0")
    for address in (0x1000, 0x3000):
        later.baseline.append(ALLOC, address, size)
    found.name(later, uses=False)
    assert [Category.from_code(code) for code in later.baseline.category] == [
        Category.UNKNOWN,
        Category.WORKSPACE,
    ]


def test_tensors_of_a_device_are_found_by_where_they_begin() -> None:
    kept = torch.zeros(8)
    assert kept.untyped_storage().data_ptr() not in cuda._addresses_of_tensors("cuda:0")


def test_gpuprobe_is_in_no_stack() -> None:
    trace = traced((1, (Frame(f"{PACKAGE}native/mode.py", 1, "f"), HOOK)), (2, (HOOK,)))
    _drop_own_frames(trace.stacks)
    assert stacks_of(trace) == [(HOOK,), (HOOK,)]
