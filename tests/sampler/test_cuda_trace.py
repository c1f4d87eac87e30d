"""What the CUDA trace does with a snapshot, without a device: naming the blocks that live."""

from __future__ import annotations

import gc

import pytest
import torch

from gpuprobe.model.memory import Block, BlockState, Category, Segment, TraceAction
from gpuprobe.model.trace import Frame, MemoryTrace, StackTable
from gpuprobe.sampler.tracing.calls import ModuleCalls
from gpuprobe.sampler.tracing.cuda import (
    Before,
    CudaTrace,
    _categorise,
    _last_owners,
    layout_now,
)
from gpuprobe.sampler.tracing.tensors import Known

ALLOC, FREE = TraceAction.ALLOC.code, TraceAction.FREE_COMPLETED.code


def test_the_last_owner_of_an_address_is_named() -> None:
    trace = MemoryTrace("cuda:0")
    trace.baseline.append(ALLOC, 0x1000, 512)
    for action, address in [
        (ALLOC, 0x2000),
        (FREE, 0x2000),
        (ALLOC, 0x2000),
        (FREE, 0x1000),
        (ALLOC, 0x1000),
    ]:
        trace.events.append(action, address, 512)
    known = {
        ("cuda:0", 0x1000): Known("cuda:0", 0x1000, 512, Category.GRADIENT, "Net.a"),
        ("cuda:0", 0x2000): Known("cuda:0", 0x2000, 512, Category.PARAMETER, "Net.b"),
        ("cuda:1", 0x2000): Known("cuda:1", 0x2000, 512, Category.BUFFER),
    }
    _categorise(trace, _last_owners(trace), known)
    names = [Category.from_code(code) for code in trace.events.category]
    unknown = Category.UNKNOWN
    assert names == [unknown, unknown, Category.PARAMETER, unknown, Category.GRADIENT]
    assert [trace.stacks.strings[i] for i in trace.events.module][2::2] == ["Net.b", "Net.a"]
    assert Category.from_code(trace.baseline.category[0]) is unknown


def test_what_is_kept_of_live_blocks_is_none_of_the_collectors_business() -> None:
    trace = MemoryTrace("cuda:0")
    frame = trace.stacks.frame(Frame("train.py", 3, "main"))
    stack, module = trace.stacks.stack((frame,)), trace.stacks.string("Net.a")
    trace.events.append(ALLOC, 0x1000, 512, stack=stack, module=module)
    block = Block(0x1000, 512, 512, BlockState.ALLOCATED, stack)
    trace.segments = (Segment(0, 0x1000, 512, 0, "small", blocks=(block,)),)
    before = Before({}, {}, StackTable())
    before.add_live(trace, _last_owners(trace))
    (origin,) = before.origins.values()
    assert before.table.frames_of(origin[0]) == (Frame("train.py", 3, "main"),)
    assert before.table.strings[origin[1]] == "Net.a"
    gc.collect()
    assert not gc.is_tracked(origin)


def test_modules_are_laid_over_the_events_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000, 100_000, 10_000))  # nanoseconds
    monkeypatch.setattr("gpuprobe.sampler.tracing.calls.time_ns", lambda: next(clock))
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    taken = ModuleCalls()
    taken.name_modules([model])
    taken.enter_module(model)  # not traced yet: no note of it
    taken.begin()
    taken.enter_module(model[0])  # at 10
    taken.leave_module()  # 20
    taken.leave_module()  # 30
    trace = MemoryTrace("cuda:0")
    for time_us in (5, 10, 19, 20, 29, 30, 31):
        trace.events.append(ALLOC, 0x1000 + time_us, 512, time_us=time_us)
    taken.complete(trace)
    names = [trace.stacks.strings[i] for i in trace.events.module]
    inner, outer = "Sequential.0", "Sequential"
    assert names == [outer, inner, inner, outer, outer, "", ""]


def test_without_cuda_there_is_nothing_to_trace() -> None:
    trace = CudaTrace()
    assert trace.begin() is None
    assert trace.collect(0, {}) == []
    assert layout_now(0, {}) == []
    trace.stop()


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_traced_and_the_history_switched_off_again() -> None:
    trace = CudaTrace()
    keep = torch.zeros(1 << 20, device="cuda")
    assert trace.begin() is None
    more = torch.zeros(1 << 20, device="cuda")
    known = Known(str(keep.device), keep.data_ptr(), keep.nbytes, Category.PARAMETER, "Net.a")
    # Of other GPUs too, if earlier tests of this process left memory there.
    (taken,) = [one for one in trace.collect(0, {0: known}) if one.device == "cuda:0"]
    assert taken.step == 0
    assert len(taken.events) > 0
    assert not torch._C._cuda_isHistoryEnabled()
    del more
