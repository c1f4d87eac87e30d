"""What the program's signal handlers raise reaches the program, wherever it comes up."""

from __future__ import annotations

import functools
import gc
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from models import Mlp, seeded, train
from sinks import KeepingSink

from gpuprobe.sampler.failures import from_program
from gpuprobe.sampler.recorder import Recorder
from gpuprobe.sampler.tracing import cpu as cpu_trace

LEVELS = pytest.mark.parametrize("level", ["counters", "trace"])


class TooLong(Exception):
    pass


def stop(number: int, frame: FrameType | None) -> None:
    raise TooLong


class Stopper:
    def __call__(self, *args: object) -> None:
        raise TooLong

    def method(self, number: int, frame: FrameType | None) -> None:
        raise TooLong


def tired(limit: str, number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise TimeoutError(limit)  # an OSError, as a full disk is


HANDLERS = [stop, Stopper(), Stopper().method, functools.partial(tired, "1 s")]


@pytest.fixture
def handled(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, request.param)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("handled", HANDLERS, indirect=True, ids=lambda h: type(h).__name__)
@LEVELS
def test_a_time_limit_that_ends_in_our_code_ends_the_step(
    level: str, handled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    warnings: list[str] = []
    sink = KeepingSink()
    with Recorder(sink, level=level, model=model, warn=warnings.append) as recorder:
        train(model, optimizer, 1)
        original = recorder._living

        def struck() -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return original()

        with monkeypatch.context() as patched:
            patched.setattr(recorder, "_living", struck)
            with pytest.raises((TooLong, TimeoutError)):
                train(model, optimizer, 1)
        train(model, optimizer, 1)
    assert not warnings
    assert len(sink.steps) >= 2


@pytest.mark.parametrize("handled", HANDLERS[-1:], indirect=True)
def test_a_time_limit_is_no_full_disk(handled: None) -> None:
    recorder = Recorder(KeepingSink(), warn=pytest.fail)
    with pytest.raises(TimeoutError), recorder._failures:
        signal.raise_signal(signal.SIGUSR1)


def test_our_own_errors_are_ours() -> None:
    def fails(frame: object) -> None:
        raise ZeroDivisionError(str(frame))

    with pytest.raises(ZeroDivisionError) as caught:
        fails(None)
    assert not from_program(caught.value)


def test_nothing_that_is_raised_is_lost_where_a_storage_dies() -> None:
    """Python prints, and drops, what is raised in the callback of a weak reference."""
    trace = cpu_trace.CpuTrace(lambda: "", pytest.fail)
    trace.start([])
    ours: list[str] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            ours.append(frame.f_code.co_name)

    tensor = torch.ones(100)
    try:
        sys.setprofile(profile)
        del tensor
        gc.isenabled()
    finally:
        sys.setprofile(None)
        trace.stop()
    assert not ours


def test_storages_that_other_threads_drop_are_accounted_for() -> None:
    trace = cpu_trace.CpuTrace(lambda: "", pytest.fail)
    trace.start([])
    try:
        before = trace.read()[0].counts.allocated
        tensors = [torch.ones(100) for _ in range(10)]
        assert trace.read()[0].counts.allocated == before + 4000
        thread = threading.Thread(target=tensors.clear)
        thread.start()
        thread.join()
        assert trace.read()[0].counts.allocated == before
    finally:
        trace.stop()
