"""Two allocation streams side by side, and the record of a run on the simulated GPU as truth."""

from __future__ import annotations

from pathlib import Path

import compare_streams
import pytest
import record_truth
from compare_streams import Event, described, differences, lines, stream
from hypothesis import given
from hypothesis import strategies as st
from reference_models import case
from shared_files import shared_snapshots
from truth_files import read_trace, read_truth

import gpuprobe
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import Frame, MemoryTrace
from gpuprobe.model.values import Unavailable

pytestmark = pytest.mark.simulated

SNAPSHOTS = {path.stem: path for path in shared_snapshots()}
events = st.lists(st.builds(Event, st.sampled_from("+-"), st.integers(1, 3), st.just("x")))


@given(events)
def test_equal_streams_have_no_differences(found: list[Event]) -> None:
    assert not list(differences(found, [event._replace(what="y") for event in found]))


@given(events, events)
def test_differences_account_for_every_event(left: list[Event], right: list[Event]) -> None:
    found = list(differences(left, right))
    lost = sum(len(difference.recorded) for difference in found)
    extra = sum(len(difference.simulated) for difference in found)
    assert len(left) - lost == len(right) - extra
    assert len(list(lines(found, 100))) >= len(found)


def test_a_stream_names_what_allocated() -> None:
    trace = MemoryTrace("cuda:0")
    frames = [
        Frame("??", 0, "at::_ops::empty_like::call(int)"),
        Frame("??", 0, "at::_ops::clone::redispatch(int)"),
        Frame("a.cpp", 0, "torch::autograd::generated::MulBackward0::apply()"),
        Frame("/x/torch/nn/functional.py", 3, "linear"),
        Frame("/x/train.py", 7, "step"),
    ]
    stack = trace.stacks.stack(tuple(trace.stacks.frame(frame) for frame in frames))
    assert described(trace.stacks.frames_of(stack)) == "clone>empty_like MulBackward0 train.py:7"
    for action, address in (
        (TraceAction.FREE_COMPLETED, 8),  # was there before
        (TraceAction.ALLOC, 16),
        (TraceAction.FREE_REQUESTED, 16),
        (TraceAction.FREE_COMPLETED, 16),
    ):
        trace.events.append(action.code, address, 512, stack=stack)
    assert [event[:2] for event in stream(trace)] == [("+", 512), ("-", 512)]


def test_a_run_on_the_virtual_gpu_is_recorded_as_on_a_real_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of record_truth.py but the process and the driver."""
    with gpuprobe.virtual_gpu("h100-80gb"):
        path = record_truth.record(case("vae-fp32"), "cuda", True, 2, -1, tmp_path)
    truth = read_truth(path)
    assert truth.outcome == "ok"
    assert getattr(truth.gpu, "title", "") == "NVIDIA H100 80GB HBM3"
    assert isinstance(truth.beside, Unavailable)
    peaks = [truth.built.peak_allocated, *(step.peak_allocated for step in truth.steps)]
    assert all(isinstance(peak, int) and peak > 0 for peak in peaks)
    assert truth.peak_allocated == max(peaks)
    trace = read_trace(path)
    assert trace is not None
    assert {trace.stacks.strings[index] for index in trace.events.phase} == {
        "build",
        "step 1",
        "step 2",
    }
    assert gpuprobe.replay(trace).peak_allocated == truth.peak_allocated
    assert compare_streams.main([str(path)]) == 0
    assert "0 differences" in capsys.readouterr().out


def test_out_of_memory_is_an_outcome(tmp_path: Path) -> None:
    from dataclasses import replace

    large = replace(case("vae-fp32"), tiny={"width": 256, "latent": 4, "size": 512, "batch": 128})
    with gpuprobe.virtual_gpu("t4", compute="shapes"):
        path = record_truth.record(large, "cuda", True, 2, -1, tmp_path)
    assert read_truth(path).outcome == "out of memory"


@pytest.mark.parametrize(
    "name", ["lm_ctx128_forward", "lm_ctx256_forward_bf16", "lm_medium_ctx256_train"]
)
def test_programs_allocate_as_recorded(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name not in SNAPSHOTS:
        pytest.skip("the public snapshots are not here")
    assert compare_streams.main([str(SNAPSHOTS[name])]) == 0, capsys.readouterr().out
