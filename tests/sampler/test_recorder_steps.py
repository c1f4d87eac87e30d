"""Which steps and phases the recorder finds, and that they add up."""

from __future__ import annotations

import contextlib
import gc
import sys
from types import FrameType

import pytest
import torch
from models import Checkpointed, Mlp, seeded, train
from sinks import KeepingSink

import gpuprobe
from gpuprobe.errors import UsageError
from gpuprobe.model.memory import AllocatorCounts, Category
from gpuprobe.model.run.session import AllocatorActivity, Step
from gpuprobe.model.values import Bytes, Peak, Unavailable
from gpuprobe.sampler.base import DeviceMark, Mark
from gpuprobe.sampler.hooks.torch_hooks import SEARCHES
from gpuprobe.sampler.recorder import Recorder
from gpuprobe.sampler.timeline import HOST_RISE, counters_rose

LEVELS = pytest.mark.parametrize("level", ["counters", "trace"])


def paths(step: Step) -> list[str]:
    return [phase.path for phase in step.phases]


def check_cover(step: Step) -> None:
    """Phases of depth one cover the step; children stay inside their parents."""
    tops = [phase for phase in step.phases if "/" not in phase.path]
    assert sum(phase.duration_ns for phase in tops) == step.duration_ns
    by_path = {phase.path: phase for phase in step.phases}
    for phase in step.phases:
        if "/" in phase.path:
            assert phase.duration_ns <= by_path[phase.path.rpartition("/")[0]].duration_ns


@LEVELS
def test_steps_are_found_at_each_optimizer_step(level: str) -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    with Recorder(sink, level=level):
        train(model, torch.optim.AdamW(model.parameters()), 4)
    assert [step.index for step in sink.steps] == [0, 1, 2, 3]
    assert {step.ended_by for step in sink.steps} == {"optimizer"}
    for step in sink.steps:
        check_cover(step)
        assert {"forward", "backward", "optimizer"} <= set(paths(step))
    assert "setup" in paths(sink.steps[0])
    assert "setup" not in paths(sink.steps[1])
    assert sink.closed
    assert sink.ends[0].error is None


@LEVELS
def test_the_collector_does_not_run_while_a_step_is_written(level: str) -> None:
    callers: set[str] = set()

    def note(phase: str, info: dict[str, int]) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            callers.add(frame.f_code.co_name)
            frame = frame.f_back

    before = gc.get_threshold()
    model = seeded(Mlp)
    with Recorder(KeepingSink(), level=level):
        gc.callbacks.append(note)
        gc.set_threshold(1)
        try:
            train(model, torch.optim.AdamW(model.parameters()), 2)
        finally:
            gc.set_threshold(*before)
            gc.callbacks.remove(note)
    assert "train" in callers
    assert "_write_step" not in callers
    assert gc.isenabled()


def test_the_loss_is_part_of_the_forward_phase() -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    with Recorder(sink, level="trace"):
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    trace = list(sink.traces.values())[1]
    strings = trace.stacks.strings
    # mean() makes a scalar: 4 bytes, after the model has returned.
    scalars = [row for row in trace.events.rows() if row.size == 4 and row.action.value == "alloc"]
    assert scalars
    assert strings[scalars[0].phase] == "forward"


@LEVELS
def test_the_program_may_mark_its_own_steps_and_phases(level: str) -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(sink, model=model, optimizer=optimizer, level=level) as rec:
        for _ in range(3):
            with rec.step():
                with rec.phase("load"):
                    x = torch.randn(8, 16)
                with rec.phase("learn"):
                    model(x).sum().backward()
                    optimizer.step()
    assert len(sink.steps) == 3
    assert {step.ended_by for step in sink.steps} == {"user"}
    for step in sink.steps:
        check_cover(step)
        assert {"load", "learn", "learn/forward", "learn/backward", "learn/optimizer"} <= set(
            paths(step)
        )


def test_wrap_makes_each_call_a_step_and_passes_results_on() -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    with Recorder(sink, model=model) as rec:

        @rec.wrap
        def step(scale: float) -> float:
            """A step."""
            return model(torch.ones(2, 16)).sum().item() * scale

        values = [step(scale=2.0), step(1.0)]
    assert values[0] == 2 * values[1]
    assert step.__doc__ == "A step."
    assert len(sink.steps) == 2


def test_steps_do_not_nest() -> None:
    with (
        Recorder(KeepingSink()) as rec,
        rec.step(),
        pytest.raises(UsageError, match="do not nest"),
        rec.step(),
    ):
        pass


@LEVELS
def test_two_optimizers_in_one_iteration_are_one_step(level: str) -> None:
    sink = KeepingSink()
    critic, maker = seeded(Mlp), seeded(Mlp)
    first = torch.optim.Adam(critic.parameters())
    second = torch.optim.Adam(maker.parameters())
    with Recorder(sink, level=level):
        for _ in range(3):
            for model, optimizer in ((critic, first), (maker, second)):
                optimizer.zero_grad()
                model(torch.randn(4, 16)).sum().backward()
                optimizer.step()
    assert [step.index for step in sink.steps] == [0, 1, 2]
    for step in sink.steps:
        check_cover(step)
        by_path = {phase.path: phase for phase in step.phases}
        assert by_path["optimizer"].entries == 2
        assert by_path["backward"].entries == 2
    if level == "trace":
        assert [len(step.traces) for step in sink.steps] == [2, 2, 2]


def test_an_optimizer_that_steps_more_often_still_makes_steps() -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    often = torch.optim.SGD(model.parameters(), 0.1)
    seldom = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(sink):
        for _ in range(2):
            for _ in range(3):
                model(torch.randn(4, 16)).sum().backward()
                often.step()
            seldom.step()
    assert len(sink.steps) == 6


def test_gradient_accumulation_stays_in_one_step() -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(sink):
        for _ in range(2):
            for _ in range(4):
                model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(sink.steps) == 2
    by_path = {phase.path: phase for phase in sink.steps[1].phases}
    assert by_path["forward"].entries == 4
    assert by_path["backward"].entries == 4


def test_a_closure_nests_forward_and_backward_in_the_optimizer() -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    x = torch.randn(8, 16)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with Recorder(sink):
        for _ in range(2):
            optimizer.step(closure)
    assert len(sink.steps) == 2
    for step in sink.steps:
        check_cover(step)
    assert {"optimizer/forward", "optimizer/backward"} <= set(paths(sink.steps[1]))


def test_an_optimizer_that_wraps_another_is_one_optimizer() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: object = None) -> None:
            self.inner.step()

    sink = KeepingSink()
    model = seeded(Mlp)
    with Recorder(sink):
        train(model, Wrapper(torch.optim.SGD(model.parameters(), 0.1)), 3)
    assert len(sink.steps) == 3


def test_checkpointing_recomputes_inside_the_backward_phase() -> None:
    sink = KeepingSink()
    model = seeded(Checkpointed)
    with Recorder(sink, level="trace"):
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    assert len(sink.steps) == 2
    check_cover(sink.steps[1])
    by_path = {phase.path: phase for phase in sink.steps[1].phases}
    assert by_path["backward"].entries == 1
    assert by_path["forward"].entries == 1


def test_the_data_phase_is_the_wait_for_the_loader() -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(list(torch.randn(12, 16)), batch_size=4)
    with Recorder(sink):
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert len(sink.steps) == 3
    assert "data" in paths(sink.steps[1])


def test_evaluation_after_training_is_kept_as_a_step_of_its_own() -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    with Recorder(sink):
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
        with torch.no_grad():
            model(torch.randn(64, 16))
    assert [step.ended_by for step in sink.steps] == ["optimizer", "optimizer", "end"]


def test_a_program_without_an_optimizer_is_one_step() -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    with Recorder(sink, level="trace"), torch.no_grad():
        model(torch.randn(64, 16))
    assert [step.ended_by for step in sink.steps] == ["end"]
    assert "forward" in paths(sink.steps[0])


@LEVELS
def test_known_tensors_are_the_real_ones(level: str) -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(sink, level=level):
        train(model, optimizer, 2)
    parameters = sum(p.nbytes for p in model.parameters())
    (tensors,) = sink.steps[1].tensors
    assert tensors.by_category[Category.PARAMETER] == parameters
    assert tensors.by_category[Category.GRADIENT] == parameters
    scalars = 4 * len(list(model.parameters()))  # AdamW's step counts
    assert tensors.by_category[Category.OPTIMIZER_STATE] == 2 * parameters + scalars
    assert tensors.by_category[Category.BUFFER] == sum(b.nbytes for b in model.buffers())
    if level == "trace":
        end = sink.steps[1].windows[0].end.allocated
        assert not isinstance(end, Unavailable)
        assert not isinstance(tensors.rest, Unavailable)
        assert tensors.known + tensors.rest == end
    else:
        assert isinstance(tensors.rest, Unavailable)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(UsageError, match="everything"):
        Recorder(KeepingSink(), level="everything")


@LEVELS
def test_steps_go_on_after_one_that_raised(level: str) -> None:
    """torch calls no hook where ``optimizer.step`` raises, and the program may catch that."""
    sink = KeepingSink()
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def gives_up() -> float:
        model(torch.randn(4, 16)).sum().backward()
        raise FloatingPointError("the loss is not finite")

    def deeper() -> None:
        optimizer.step()

    with Recorder(sink, level=level, model=model):
        for attempt in range(6):
            model(torch.randn(4, 16)).sum().backward()
            if attempt % 2:
                with contextlib.suppress(FloatingPointError):
                    optimizer.step(gives_up)
            else:
                deeper()
    assert [step.ended_by for step in sink.steps] == ["optimizer"] * 3 + ["end"]
    for step in sink.steps[:3]:
        check_cover(step)
    assert "optimizer/forward" in paths(sink.steps[1])
    assert not any(path.count("optimizer") > 1 for step in sink.steps for path in paths(step))


def test_an_optimizer_in_the_place_of_another_makes_steps_and_is_counted() -> None:
    """A new optimizer for each round: it may be given the address of the one before."""
    sink = KeepingSink()
    model = seeded(Mlp)
    with Recorder(sink, model=model):
        for _ in range(4):
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            train(model, optimizer, 2)
            del optimizer
            gc.collect()
    assert len(sink.steps) == 8
    for step in sink.steps:
        [known] = step.tensors
        assert known.by_category[Category.OPTIMIZER_STATE] == known.by_category[Category.PARAMETER]


def test_optimizers_without_end_do_not_have_all_objects_looked_through_each_time() -> None:
    recorder = Recorder(KeepingSink())
    with recorder:
        hooks = recorder._hooks
        hooks._next = float("inf")
        for _ in range(SEARCHES):
            hooks.search_again()
        assert hooks._searches == SEARCHES
        hooks._next = float("inf")
        hooks.search_again()
        assert hooks._searches == SEARCHES
        hooks._next = 0.0
        hooks.search_again()
        assert hooks._searches == SEARCHES + 1


@pytest.mark.simulated
def test_a_peak_after_the_last_step_is_kept() -> None:
    """Memory that no phase is reported for: a table of results, say."""
    sink = KeepingSink()
    with gpuprobe.virtual_gpu("t4"), Recorder(sink):
        model = seeded(Mlp).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.randn(8, 16, device="cuda")).sum().backward()
            optimizer.step()
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        peak = torch.cuda.max_memory_allocated()
    assert [step.ended_by for step in sink.steps] == ["optimizer", "optimizer", "end"]
    (window,) = sink.steps[-1].windows
    assert window.peak_allocated == Peak.exactly(Bytes(peak))


def test_counters_that_rise_are_of_a_device_or_worth_it() -> None:
    def mark(rss: int, *devices: tuple[str, int, int | None]) -> Mark:
        made = tuple(
            DeviceMark(name, AllocatorCounts(), peak, 0, AllocatorActivity(), exact)
            for name, peak, exact in devices
        )
        return Mark(0, rss, rss, made)

    start = mark(0, ("cuda:0", 5, None))
    assert not counters_rose(start, mark(HOST_RISE, ("cuda:0", 5, None)))
    assert counters_rose(start, mark(HOST_RISE + 1, ("cuda:0", 5, None)))
    assert counters_rose(start, mark(0, ("cuda:0", 6, None)))
    assert counters_rose(start, mark(0, ("cuda:0", 5, None), ("cuda:1", 1, None)))
    assert not counters_rose(start, mark(0, ("cuda:0", 4, None)))  # the program reset it
    assert not counters_rose(mark(0, ("cpu", 5, 5)), mark(0, ("cpu", 6, 6)))  # known exactly
