"""What the program copies, saves and hands on while it is watched has nothing of ours in it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from models import Mlp, seeded, train
from sinks import KeepingSink
from torch import nn

from gpuprobe.sampler.recorder import Recorder
from gpuprobe.sampler.tracing.tensors import modules_of

LEVELS = pytest.mark.parametrize("level", ["counters", "trace"])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is (deprecated|not supported)")
@LEVELS
@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_a_watched_model_is_copied_and_saved_as_ever(level: str, given: bool) -> None:
    model = seeded(Mlp)
    with Recorder(KeepingSink(), level=level, model=model if given else None):
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
        data = pickle.dumps(model)
        twin = copy.deepcopy(model)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        torch.save(model, io.BytesIO())
        scripted = torch.jit.script(nn.Sequential(copy.deepcopy(model)))
    assert data == pickle.dumps(model)
    for copied in (twin, averaged.module):
        assert not {**copied._forward_hooks, **copied._forward_pre_hooks}
    x = torch.ones(4, 16)
    assert torch.equal(scripted(x), model(x))


@LEVELS
def test_a_model_can_be_copied_after_a_first_call_that_failed(level: str) -> None:
    model = seeded(Mlp)
    sink = KeepingSink()
    with Recorder(sink, level=level):
        with pytest.raises(RuntimeError):
            model(torch.ones(4, 3))
        copy.deepcopy(model)
        model(torch.ones(4, 16)).sum().backward()
        assert not nn.modules.module._global_forward_hooks or level == "trace"
        torch.optim.SGD(model.parameters(), 0.1).step()
    [step] = sink.steps
    assert {phase.path for phase in step.phases} <= {
        *("setup", "forward", "other", "backward", "optimizer")
    }


def test_a_model_in_the_place_of_another_is_watched_too() -> None:
    """A model that is gone may leave its address to the next one."""
    sink = KeepingSink()
    with Recorder(sink):
        for _ in range(3):
            model = Mlp()
            train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
            del model
    # A new model is found when its optimizer first steps.
    assert len(sink.steps) == 6
    assert all("forward" in {phase.path for phase in step.phases} for step in sink.steps[1::2])


@LEVELS
@pytest.mark.parametrize("called", [False, True], ids=["fresh", "trained"])
def test_a_watched_model_can_be_exported(level: str, called: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sink = KeepingSink()
    with Recorder(sink, level=level):
        if called:
            train(model, optimizer, 1)
        program = torch.export.export(model, (torch.ones(2, 16),), strict=True)
        train(model, optimizer, 1)
    x = torch.ones(2, 16)
    assert program.module()(x).shape == model(x).shape
    assert not torch.nn.modules.module._global_forward_hooks
    for step in sink.steps:
        assert "forward" in {phase.path for phase in step.phases}


class Stubborn(nn.Linear):
    """Its methods are its own, and not what torch's are."""

    def named_modules(self, kind: str) -> None:  # type: ignore[override]
        raise TypeError(kind)

    def named_parameters(self, kind: str) -> None:  # type: ignore[override]
        raise TypeError(kind)

    def register_forward_hook(self, hook: object) -> None:  # type: ignore[override]
        raise TypeError(hook)

    modules = parameters = named_modules  # type: ignore[assignment]


@LEVELS
def test_a_model_with_methods_of_its_own_is_recorded(level: str) -> None:
    model = nn.ModuleList([Stubborn(16, 4)])[0]
    optimizer = torch.optim.SGD([model.weight, model.bias], 0.1)
    sink = KeepingSink()
    with Recorder(sink, level=level, warn=pytest.fail):
        train(model, optimizer, 2)
    assert len(sink.steps) == 2
    assert {"forward", "backward"} <= {phase.path for phase in sink.steps[1].phases}


class Elementwise(nn.Linear):
    """Compares as a tensor does, as the modules of tensordict do."""

    __hash__ = nn.Linear.__hash__

    def __eq__(self, other: object) -> torch.Tensor:  # type: ignore[override]
        return self.weight == getattr(other, "weight", 0)


@LEVELS
def test_a_model_that_compares_element_by_element_is_recorded(level: str) -> None:
    sink = KeepingSink()
    with Recorder(sink, level=level):
        model = nn.Sequential(Elementwise(16, 16), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.ones(4, 16)).sum().backward()
            optimizer.step()
            nn.Sequential(*model)(torch.ones(4, 16))  # another root of the same modules
    assert sink.ends[0].gpuprobe_faults == ()


def test_modules_are_named_as_torch_names_them() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(
        nn.Sequential(shared, nn.ReLU()), shared, Mlp(), nn.ModuleDict({"a": Mlp()})
    )
    assert list(modules_of(model)) == list(model.named_modules())
