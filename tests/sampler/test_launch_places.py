"""Places of launches: the line, the module and the phase of each operator, on the CPU.

A dispatch mode counts operators here as the native engine counts kernels.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gpuprobe
from gpuprobe.model.run.launches import (
    LaunchedKernel,
    LaunchKind,
    LaunchPlace,
    StepLaunches,
    rows_of,
)
from gpuprobe.sampler.tracing.calls import BackwardCalls, ModuleCalls
from gpuprobe.sampler.tracing.launches import LaunchTrace
from gpuprobe.sampler.tracing.places import OperatorPlaces
from gpuprobe.user_frames import PACKAGE


class CountedOperators(TorchDispatchMode):
    """A `LaunchCounter` of operators: one launch each, by the operator's name."""

    def __init__(self) -> None:
        super().__init__()
        self.here: Callable[[], int] | None = None
        self._phase = 0
        self._counts: Counter[tuple[str, int, int]] = Counter()

    def start(self, here: Callable[[], int]) -> bool:
        if self.here is not None:
            return False
        self.here = here
        self._counts.clear()
        return True

    def stop(self) -> None:
        self.here = None

    def phase(self, number: int) -> None:
        self._phase = number

    def take(self) -> Sequence[tuple[LaunchedKernel, int, int, int]]:
        found = [
            (LaunchedKernel(name, LaunchKind.LIBRARY), place, phase, count)
            for (name, place, phase), count in self._counts.items()
        ]
        self._counts.clear()
        return found

    def count(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if self.here is not None:
            self._counts[func.overloadpacket.__name__, self.here(), self._phase] += 1
        return func(*args, **(kwargs or {}))


# Its frame is gpuprobe's own, as that of the native engine's mode is.
CountedOperators.count.__code__ = CountedOperators.count.__code__.replace(
    co_filename=f"{PACKAGE}counted.py"
)
CountedOperators.__torch_dispatch__ = CountedOperators.count  # type: ignore[method-assign]


def line(back: int = 1) -> int:
    return sys._getframe(back).f_lineno


class Traced:
    """A `LaunchTrace` over `CountedOperators`."""

    def __init__(self) -> None:
        self.counter = CountedOperators()
        self.modules = ModuleCalls()
        self.backward = BackwardCalls()
        self.path = "setup"
        self.faults: list[Exception] = []
        self.numbers = OperatorPlaces(self.modules, self.backward, self.failed)
        self.trace = LaunchTrace(self.counter, self.numbers, self.modules, lambda: self.path)

    def failed(self, error: Exception) -> None:
        """As the recorder, which ends all traces."""
        self.faults.append(error)
        self.trace.stop()

    def __enter__(self) -> Traced:
        self.counter.__enter__()
        self.trace.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.trace.stop()
        self.counter.__exit__(None, None, None)
        assert self.faults == []

    def enter(self, path: str) -> None:
        self.path = path
        self.trace.path_changed(path)

    def places(self, operator: str) -> Counter[LaunchPlace]:
        """Of the launches since the last time."""
        taken = self.trace.take()
        assert taken is not None
        found: Counter[LaunchPlace] = Counter()
        for kernel, place, count in rows_of(taken):
            if kernel.name == operator:
                found[place] += count
        return found


def place(number: int, phase: str, module: str = "") -> LaunchPlace:
    return LaunchPlace(phase, f"{__file__}:{number} in {_function()}", module)


def _function() -> str:
    return sys._getframe(2).f_code.co_name


def test_an_operator_has_its_line_and_phase() -> None:
    x = torch.ones(4)
    with Traced() as traced:
        x + x
        first = line() - 1
        traced.enter("forward")
        for _ in range(3):
            x + x
        second = line() - 1
        assert traced.places("add") == {
            place(first, "setup"): 1,
            place(second, "forward"): 3,
        }
        assert traced.places("add") == {}


def test_the_backward_pass_has_the_lines_and_modules_of_the_forward_pass() -> None:
    module = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    with Traced() as traced:
        traced.enter("forward")
        traced.modules.enter_module(module)
        y = x.sin()
        made = line() - 1
        traced.modules.leave_module()
        loss = y.sum()
        traced.enter("backward")
        traced.backward.called()
        loss.backward()
        traced.backward.returned()
        taken = traced.trace.take()
    assert taken is not None
    places = {
        (kernel.name, where.phase): where
        for kernel, where, _ in rows_of(taken)
        if kernel.name in ("sin", "cos")
    }
    assert places["sin", "forward"] == place(made, "forward", "Linear")
    assert places["cos", "backward"] == place(made, "backward", "Linear")


def test_what_accumulates_gradients_has_the_line_of_backward() -> None:
    x = torch.ones(4, requires_grad=True)
    with Traced() as traced:
        for _ in range(2):
            loss = x.sum()
            traced.enter("backward")
            traced.backward.called()
            called = line() - 1
            loss.backward()
            traced.backward.returned()
        (found,) = traced.places("add_") or traced.places("add")
    assert found == place(called, "backward")


def test_lines_of_torch_are_not_the_users() -> None:
    x = torch.ones(2, 4)
    module = torch.nn.Linear(4, 4)
    with Traced() as traced:
        torch.nn.functional.relu(module(x))
        called = line() - 1
        assert set(traced.places("addmm")) == {place(called, "setup")}


def test_one_recording_counts_at_a_time() -> None:
    with Traced() as traced:
        numbers = OperatorPlaces(ModuleCalls(), BackwardCalls(), traced.faults.append)
        second = LaunchTrace(traced.counter, numbers, ModuleCalls(), lambda: "")
        second.begin()
        assert not second.on
        assert second.take() is None
        torch.ones(2) + 1
        second.stop()
        assert sum(traced.places("add").values()) == 1


def test_a_fault_ends_the_counting_and_not_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with Traced() as traced:
        monkeypatch.setattr(traced.numbers, "_forward_place", lambda frame: 1 // 0)
        assert float((torch.ones(1) + 1)[0]) == 2
        assert not traced.trace.on
        assert [type(fault) for fault in traced.faults] == [ZeroDivisionError]
        traced.faults.clear()


def test_a_recording_without_a_counter_has_none(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    path = tmp_path / "r.gpuprobe"
    with gpuprobe.record(path, model=model, optimizer=optimizer, level="trace"):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    (rank,) = gpuprobe.load(path).ranks
    assert not any(isinstance(step.launches, StepLaunches) for step in rank.steps)
