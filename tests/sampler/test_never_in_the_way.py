"""The watched program computes the same, keeps its counters and hooks, and survives our faults."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Checkpointed, Mlp, seeded, train
from sinks import Broken, FullDisk, KeepingSink
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from gpuprobe.sampler import recorder
from gpuprobe.sampler.recorder import Recorder
from gpuprobe.sampler.tracing import cpu as cpu_trace
from gpuprobe.sampler.tracing import traces

LEVELS = pytest.mark.parametrize("level", ["counters", "trace"])


def reference(steps: int = 4) -> list[float]:
    model = seeded(Mlp)
    return train(model, torch.optim.AdamW(model.parameters()), steps)


def watched(sink: Any, level: str, warnings: list[str], steps: int = 4) -> list[float]:
    model = seeded(Mlp)
    with Recorder(sink, level=level, warn=warnings.append):
        return train(model, torch.optim.AdamW(model.parameters()), steps)


@LEVELS
def test_losses_are_bit_identical(level: str) -> None:
    assert watched(KeepingSink(), level, []) == reference()


@LEVELS
def test_random_numbers_are_untouched(level: str) -> None:
    def draw() -> tuple[list[float], float]:
        torch.manual_seed(11)
        random.seed(11)
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
        return torch.rand(5).tolist(), random.random()

    expected = draw()
    with Recorder(KeepingSink(), level=level):
        assert draw() == expected


def hooks_of_torch() -> list[object]:
    """Everything of torch that the recorder may hold on to."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    return [
        torch.autograd._engine_run_backward,
        torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
        dict(module._global_forward_hooks),
        dict(module._global_forward_pre_hooks),
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
        list(_get_current_dispatch_mode_stack()),
    ]


@LEVELS
def test_every_hook_is_taken_out_again(level: str) -> None:
    before = hooks_of_torch()
    model = seeded(Mlp)
    with Recorder(KeepingSink(), level=level):
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
        assert hooks_of_torch() != before
    assert hooks_of_torch() == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@LEVELS
def test_the_programs_exception_passes_through_and_is_recorded(level: str) -> None:
    before = hooks_of_torch()
    sink = KeepingSink()
    model = seeded(Mlp)

    def program() -> None:
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), Recorder(sink, level=level):
        program()
    (end,) = sink.ends
    assert end.error is not None
    assert (end.error.type, end.error.out_of_memory) == ("KeyError", False)
    assert len(sink.steps) == 3
    assert sink.steps[-1].ended_by == "end"
    assert hooks_of_torch() == before


def test_an_out_of_memory_error_is_known_as_one() -> None:
    sink = KeepingSink()
    with (
        pytest.raises(RuntimeError, match="you tried to allocate"),
        Recorder(sink, level="trace"),
    ):
        torch.empty(2**62, dtype=torch.uint8)
    (end,) = sink.ends
    assert end.error is not None
    assert end.error.out_of_memory


@LEVELS
def test_a_full_disk_costs_the_recording_only(level: str) -> None:
    warnings: list[str] = []
    sink = FullDisk(after=2)
    assert watched(sink, level, warnings) == reference()
    assert [step.index for step in sink.steps] == [0, 1]
    (warning,) = warnings
    assert "No space left" in warning
    assert "continues" in warning


@LEVELS
def test_a_bug_of_ours_switches_us_off_and_nothing_else(level: str) -> None:
    before = hooks_of_torch()
    warnings: list[str] = []
    sink = Broken()
    assert watched(sink, level, warnings) == reference()
    (warning,) = warnings
    assert "ZeroDivisionError" in warning
    assert sink.ends[0].gpuprobe_faults
    assert hooks_of_torch() == before


def test_a_fault_inside_a_hook_leaves_torchs_list_of_hooks_alone() -> None:
    """torch goes through the hooks one by one while ours fails: another one is behind it."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    before = hooks_of_torch()
    warnings: list[str] = []
    model = seeded(Mlp)
    with Recorder(KeepingSink(), warn=warnings.append) as watching:
        called = []
        handle = register_optimizer_step_post_hook(lambda *args: called.append(1))
        watching._close_step = lambda *a, **k: 1 // 0  # type: ignore[assignment]
        train(model, torch.optim.SGD(model.parameters(), 0.1), 3)
        handle.remove()
    assert len(called) == 3
    (warning,) = warnings
    assert "ZeroDivisionError" in warning
    assert hooks_of_torch() == before


# Each of these is something the recorder calls while the program runs.
FAULTS = [
    (recorder.Recorder, "_walk"),
    (recorder.Recorder, "_close_step"),
    (traces.Traces, "collect"),
    (recorder.PhaseTimeline, "enter"),
    (recorder.PhaseTimeline, "leave"),
    (recorder.PhaseTimeline, "cut"),
    (recorder.MarkReader, "__call__"),
    (cpu_trace.CpuTrace, "_record"),
    (cpu_trace.CpuTrace, "_record_alloc"),
    (cpu_trace.CpuTrace, "mark_known"),
    (cpu_trace.CpuTrace, "enter_module"),
    (cpu_trace.CpuTrace, "leave_module"),
    (cpu_trace.CpuTrace, "mark_inputs"),
]


@pytest.mark.parametrize(("owner", "name"), FAULTS, ids=[f"{o.__name__}.{n}" for o, n in FAULTS])
@pytest.mark.parametrize("call", [1, 7])
def test_a_fault_anywhere_leaves_the_training_alone(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int
) -> None:
    """The ``call``-th call of one of our functions, once training has begun, raises."""
    before = hooks_of_torch()
    warnings: list[str] = []
    sink = KeepingSink()
    model = seeded(Mlp)
    optimizer = torch.optim.AdamW(model.parameters())
    original = getattr(owner, name)
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("injected")
        return original(*args, **kwargs)

    with Recorder(sink, level="trace", warn=warnings.append):
        monkeypatch.setattr(owner, name, failing)
        losses = train(model, optimizer, 8)
    assert losses == reference(8)
    assert calls >= call, "the fault was never injected"
    assert len(warnings) == 1
    assert "injected" in warnings[0]
    assert sink.ends, "the recording was not closed"
    monkeypatch.undo()
    assert hooks_of_torch() == before


def test_a_recorder_inside_another_is_no_problem() -> None:
    outer, inner = KeepingSink(), KeepingSink()
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = hooks_of_torch()
    with Recorder(outer, level="trace"):
        with Recorder(inner, level="trace"):
            train(model, optimizer, 2)
        train(model, optimizer, 1)
    assert len(inner.steps) == 2
    assert len(outer.steps) == 3
    assert hooks_of_torch() == before


@LEVELS
def test_workers_forked_by_a_loader_do_not_record(level: str) -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(
        list(torch.randn(16, 16)), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    with Recorder(sink, level=level):
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert len(sink.steps) == 4
    assert sink.ends[0].gpuprobe_faults == ()


def test_checkpointing_gives_the_same_losses_under_trace() -> None:
    def run() -> list[float]:
        model = seeded(Checkpointed)
        return train(model, torch.optim.SGD(model.parameters(), 0.1), 3)

    expected = run()
    with Recorder(KeepingSink(), level="trace"):
        assert run() == expected


@LEVELS
@pytest.mark.parametrize("how", ["function", "module", "in place", "step"])
@pytest.mark.parametrize("when", ["before", "within"])
# dynamo imports parts of torch that warn of their own age.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_compiled_stays_compiled(level: str, how: str, when: str) -> None:
    """The same number of graphs is compiled, with the same losses, watched or not."""

    def run(watch: Any) -> tuple[list[float], int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        graphs = 0

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            nonlocal graphs
            graphs += 1
            return graph.forward

        model: Any = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if how == "function":
            compiled = torch.compile(lambda x: model(x), backend=backend, fullgraph=True)
        elif how == "module":
            compiled = torch.compile(model, backend=backend, fullgraph=True)
        elif how == "in place":
            model.compile(backend=backend, fullgraph=True)
            compiled = model
        else:
            compiled = torch.compile(model, backend=backend)
            optimizer.step = torch.compile(optimizer.step, backend=backend)  # type: ignore[method-assign]
        generator = torch.Generator().manual_seed(5)
        losses = []
        with watch:
            for _ in range(3):
                optimizer.zero_grad()
                loss = compiled(torch.randn(8, 16, generator=generator)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, graphs

    expected = run(contextlib.nullcontext())
    assert expected[1] > 0
    sink = KeepingSink()
    rec = Recorder(sink, level=level)
    if when == "before":
        losses, compiled = run(rec)
    else:
        with rec:
            losses, compiled = run(contextlib.nullcontext())
    assert (losses, compiled) == expected
    if level == "trace" and not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        return  # this torch cannot do both: the recording has ended, and says so
    assert sink.ends[0].gpuprobe_faults == ()
    assert any("torch.compile" in spot.what for spot in sink.blind_spots)
    if how != "step":  # a compiled optimizer step cannot be seen
        assert len(sink.steps) == 3
        assert "forward" in {phase.path for phase in sink.steps[1].phases}


def test_finish_in_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    sink = KeepingSink()
    rec = Recorder(sink)
    with rec:
        pid = os.fork()
        if pid == 0:
            rec.finish()
            os._exit(len(sink.ends))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(sink.ends) == 1


def test_the_step_that_ran_out_of_memory_is_traced() -> None:
    """However far into training: the failed step's trace is what explains it."""
    sink = KeepingSink()
    model = seeded(Mlp)

    def program() -> None:
        train(model, torch.optim.SGD(model.parameters(), 0.1), 6)
        torch.empty(2**62, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match="tried to allocate"), Recorder(sink, level="trace"):
        program()
    assert [bool(step.traces) for step in sink.steps] == [True] * 3 + [False] * 3 + [True]
    assert sink.steps[-1].ended_by == "end"


@LEVELS
def test_a_fault_while_starting_is_one_warning(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuprobe.sampler.hooks import torch_hooks as hooks

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("while starting")

    before = hooks_of_torch()
    monkeypatch.setattr(hooks.Hooks, "install", fail)
    warnings: list[str] = []
    sink = KeepingSink()
    assert watched(sink, level, warnings) == reference()
    (warning,) = warnings
    assert "ZeroDivisionError: while starting" in warning
    assert sink.ends[0].gpuprobe_faults == ("ZeroDivisionError: while starting",)
    assert hooks_of_torch() == before


def test_a_fault_at_the_first_call_of_a_model_is_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gpuprobe.sampler.hooks import torch_hooks as hooks

    def fail(*_: object) -> list[object]:
        raise ZeroDivisionError("while looking for models")

    monkeypatch.setattr(hooks, "live_roots", fail)
    warnings: list[str] = []
    assert watched(KeepingSink(), "counters", warnings) == reference()
    (warning,) = warnings
    assert "while looking for models" in warning


@LEVELS
def test_a_warning_that_cannot_be_said_ends_nothing(level: str) -> None:
    def closed(text: str) -> None:
        raise OSError(9, "Bad file descriptor")

    model = seeded(Mlp)
    sink = FullDisk(after=1)
    with Recorder(sink, level=level, warn=closed) as recorder:
        losses = train(model, torch.optim.AdamW(model.parameters()), 2)
        recorder.fault(ValueError("ours"))
        losses += train(model, torch.optim.AdamW(model.parameters()), 1)
    assert losses[:2] == reference(2)
    assert any("warning" in fault for fault in sink.ends[0].gpuprobe_faults)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own
@LEVELS
def test_derivatives_of_derivatives_are_recorded(level: str) -> None:
    """What torch.func hands on is wrapped, and has no memory to ask for."""
    from torch.func import hessian, jacfwd

    model = seeded(Mlp).eval()
    warnings: list[str] = []

    def value(x: torch.Tensor) -> torch.Tensor:
        return model(x[None]).pow(3).sum()

    x = torch.ones(16)
    expected = hessian(value)(x), jacfwd(value)(x)
    with Recorder(KeepingSink(), level=level, model=model, warn=warnings.append):
        found = hessian(value)(x), jacfwd(value)(x)
    assert all(map(torch.equal, found, expected))
    assert not warnings
