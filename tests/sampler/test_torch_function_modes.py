"""The program's own modes and tensor classes hear of its own calls, and of none of ours."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from sinks import KeepingSink
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from gpuprobe.sampler.recorder import Recorder


class Functions(TorchFunctionMode):
    def __init__(self, heard: list[str]) -> None:
        super().__init__()
        self.heard = heard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(f"mode: {func}")
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self, heard: list[str]) -> None:
        super().__init__()
        self.heard = heard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(f"operator: {func}")
        return func(*args, **(kwargs or {}))


class Telling(torch.Tensor):
    heard: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.heard.append(f"tensor: {func}")
        return super().__torch_function__(func, types, args, kwargs or {})


def program() -> list[str]:
    torch.manual_seed(0)
    Telling.heard = heard = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    model[0].weight = torch.nn.Parameter(model[0].weight.detach().as_subclass(Telling))
    optimizer = torch.optim.Adam(model.parameters())
    batches = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2)
    with Functions(heard), Operators(heard):
        for _ in range(3):
            for (x,) in batches:
                optimizer.zero_grad()
                loss = model(x.as_subclass(Telling)).square().sum()
                loss.backward()
                optimizer.step()
    return [line.split(" at 0x")[0] for line in heard]


@pytest.mark.parametrize("level", ["counters", "trace"])
def test_nothing_is_heard_of_the_recorder(level: str) -> None:
    program()  # what torch does once
    expected = program()
    sink = KeepingSink()
    with Recorder(sink, level=level):
        assert program() == expected
    assert len(sink.steps) == 12
    assert not sink.ends[0].gpuprobe_faults
