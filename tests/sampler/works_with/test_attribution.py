"""What memory is for is recognised: autocast's weights, checkpoints, optimizer state."""

from __future__ import annotations

import threading
from collections import Counter

import programs
import pytest
import torch
from models import Mlp, seeded
from programs import Net
from sinks import KeepingSink

import gpuprobe
from gpuprobe.analysis.trace.categories import categories
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.model.memory import Category
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.sampler.hooks.torch_hooks import RECOMPUTE
from gpuprobe.sampler.recorder import Recorder

WEIGHTS = sum(p.numel() for p in Net().parameters())


def recorded(program: object) -> KeepingSink:
    sink = KeepingSink()
    with Recorder(sink, level="trace"):
        assert callable(program)
        program()
    return sink


def made(trace: MemoryTrace, category: Category, phase: str = "") -> list[int]:
    """The sizes of what was allocated of a category, in a phase."""
    strings = trace.stacks.strings
    return [
        row.size
        for row in trace.events.rows()
        if row.action.value == "alloc"
        and row.category == category.code
        and (not phase or strings[row.phase] == phase)
    ]


def trace_of(sink: KeepingSink, step: int) -> MemoryTrace:
    return sink.traces[sink.steps[step].traces[0]]


def test_what_autocast_keeps_of_the_weights() -> None:
    trace = trace_of(recorded(programs.autocast), 1)
    # Every parameter once, in two bytes instead of four.
    assert sum(made(trace, Category.WEIGHT_CAST)) == 2 * WEIGHTS
    assert made(trace, Category.WEIGHT_CAST, "forward")


@pytest.mark.parametrize("program", [programs.checkpointed, programs.checkpointed_reentrant])
def test_a_checkpoint_that_is_run_again(program: object) -> None:
    sink = recorded(program)
    trace = trace_of(sink, 1)
    # Linear(16, 64), GELU: one row of 64 floats for each of 8 samples is what was not kept.
    again = made(trace, Category.ACTIVATION, "backward/recompute")
    assert 8 * 64 * 4 in again
    assert 8 * 64 * 4 not in made(trace, Category.ACTIVATION, "forward")
    by_path = {phase.path: phase for phase in sink.steps[1].phases}
    assert by_path["backward/recompute"].entries == 1
    assert by_path["backward"].entries == 1
    assert by_path["backward/recompute"].duration_ns < by_path["backward"].duration_ns


def test_without_a_checkpoint_nothing_is_run_again() -> None:
    sink = recorded(programs.foreach)
    assert "backward/recompute" not in {phase.path for phase in sink.steps[1].phases}
    assert 8 * 64 * 4 in made(trace_of(sink, 1), Category.ACTIVATION, "forward")


def test_a_checkpoint_in_a_checkpoint_that_fails() -> None:
    """The phases are left in order even where the recomputation raises."""
    from torch.utils.checkpoint import checkpoint

    calls = 0

    def inner(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 6:  # a step makes three: forward, within outer's recomputation, its own
            raise KeyError("inside the recomputation")
        return x.sin().cos()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, x.exp(), use_reentrant=False).tan()

    net = seeded(Mlp)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step() -> None:
        checkpoint(outer, net(torch.ones(4, 16)), use_reentrant=False).sum().backward()

    sink = KeepingSink()
    failures = 0
    with programs.no_hooks_left(), Recorder(sink):
        for _ in range(3):
            try:
                step()
            except KeyError:
                failures += 1
            optimizer.step()
            optimizer.zero_grad()
    assert failures == 1
    assert sink.ends[0].gpuprobe_faults == ()
    for recorded_step in sink.steps[1:]:
        tops = {phase.path for phase in recorded_step.phases if "/" not in phase.path}
        assert tops == {"other", "forward", "backward", "optimizer"}


def test_the_first_step_makes_the_optimizers_state() -> None:
    sink = recorded(programs.scheduled_average)
    first, second = trace_of(sink, 0), trace_of(sink, 1)
    assert sum(made(first, Category.OPTIMIZER_STATE, "optimizer")) >= 2 * 4 * WEIGHTS
    assert sum(made(second, Category.OPTIMIZER_STATE)) == 0


def test_gradients_are_what_the_backward_pass_leaves() -> None:
    trace = trace_of(recorded(programs.foreach), 1)
    assert sum(made(trace, Category.GRADIENT, "backward")) == 4 * WEIGHTS


@pytest.mark.simulated
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("again", [False, True])
def test_on_a_gpu_stacks_and_lifetimes_tell(again: bool) -> None:
    """There, no category is recorded for what is gone by the end of the step: a closure's
    activations are not the optimizer's, and a checkpoint's are not gradients.
    """
    size = 512 * 64 * 4  # of no parameter's size

    def program() -> None:
        around = None
        if again:

            def around(body: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
                return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)

        net = Net(around).cuda()
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)
        for x in programs.batches(3, 512):
            x = x.cuda()

            def evaluate(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(evaluate)

    sink = KeepingSink()
    with gpuprobe.virtual_gpu("a100-40gb"), Recorder(sink, level="trace"):
        program()
    assert sink.ends[0].gpuprobe_faults == ()
    ledger = ledger_of(trace_of(sink, 1))
    rows = [row for row in range(ledger.made) if ledger.requested[row] == size]
    found = Counter(Category.from_code(code) for code in categories(ledger, rows))
    assert found[Category.ACTIVATION] >= 4  # two a call of the closure, and two calls
    assert found[Category.OPTIMIZER_STATE] == found[Category.GRADIENT] == 0
    if again:
        stacks = [ledger.trace.stacks.frames_of(ledger.stack[row]) for row in rows]
        assert any(frame.name == "recompute_fn" for stack in stacks for frame in stack)


@pytest.mark.parametrize("of_the_engine", [True, False])
def test_on_a_gpu_the_engines_own_thread_recomputes(
    of_the_engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """autograd has a thread for each GPU, for which the watched thread waits. What another
    thread of the program does meanwhile is not the step's.
    """
    monkeypatch.setattr("gpuprobe.sampler.hooks.torch_hooks.in_engine", lambda: of_the_engine)
    sink = KeepingSink()
    net = seeded(Mlp)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with Recorder(sink) as recorder:

        def in_a_thread(gradient: torch.Tensor) -> None:
            def work() -> None:
                recorder.begin(RECOMPUTE)
                recorder.end(RECOMPUTE)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

        for _ in range(2):
            loss = net(torch.ones(4, 16)).sum()
            loss.register_hook(in_a_thread)
            loss.backward()
            optimizer.step()
    assert sink.ends[0].gpuprobe_faults == ()
    assert len(sink.steps) == 2
    for step in sink.steps:
        paths = {phase.path for phase in step.phases}
        assert ("backward/recompute" in paths) == of_the_engine
