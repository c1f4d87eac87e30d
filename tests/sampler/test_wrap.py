"""`Recorder.wrap` and `watch_steps`: what is wrapped stays what it was."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sinks import KeepingSink

import gpuprobe
from gpuprobe.sampler.recorder import Recorder


def plain(x: int) -> int:
    return x + 1


async def coroutine(x: int) -> int:
    await asyncio.sleep(0)
    return x + 1


def generator(x: int) -> Iterator[int]:
    yield x
    return x + 1


async def stream(x: int) -> AsyncIterator[int]:
    yield x


KINDS = ("iscoroutinefunction", "isgeneratorfunction", "isasyncgenfunction", "isfunction")


@pytest.mark.parametrize("function", [plain, coroutine, generator, stream])
def test_a_wrapped_function_is_of_the_same_kind(function: object, tmp_path: Path) -> None:
    for wrapped in (
        Recorder(KeepingSink()).wrap(function),  # type: ignore[type-var]
        gpuprobe.watch_steps(tmp_path / "run.gpuprobe")(function),  # type: ignore[type-var]
    ):
        for kind in KINDS:
            assert getattr(inspect, kind)(wrapped) == getattr(inspect, kind)(function)
        assert inspect.signature(wrapped) == inspect.signature(function)  # type: ignore[arg-type]


def test_a_coroutine_is_a_step_while_it_runs() -> None:
    sink = KeepingSink()
    inside: list[bool] = []
    with Recorder(sink) as recorder:

        @recorder.wrap
        async def step(x: int) -> int:
            await asyncio.sleep(0)
            inside.append(recorder._in_step)
            return x

        async def both() -> list[int]:
            return await asyncio.gather(step(1), step(2))

        assert asyncio.run(step(3)) == 3
        assert asyncio.run(both()) == [1, 2]  # the second runs inside the first one's step
    assert inside[:2] == [True, True]
    assert len(sink.steps) == 2


def test_what_a_wrapped_generator_is_sent_and_returns() -> None:
    sink = KeepingSink()
    with Recorder(sink) as recorder:

        @recorder.wrap
        def step() -> Iterator[int]:
            got = yield 1
            yield got + 1
            return "end"  # type: ignore[return-value]

        running = step()
        assert next(running) == 1
        assert running.send(4) == 5  # type: ignore[attr-defined]
        with pytest.raises(StopIteration, match="end"):
            next(running)
    assert len(sink.steps) == 1


def test_steps_of_another_thread_do_not_fail_beside_an_open_one() -> None:
    with Recorder(KeepingSink()) as recorder:
        done: list[int] = []

        def other() -> None:
            with recorder.step():
                done.append(1)
            done.append(recorder.wrap(plain)(1))

        with recorder.step():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
    assert done == [1, 2]


def test_a_wrapped_function_may_call_another() -> None:
    sink = KeepingSink()
    with Recorder(sink) as recorder:
        inner = recorder.wrap(plain)
        assert recorder.wrap(lambda: inner(1))() == 2
    assert len(sink.steps) == 1


@pytest.mark.parametrize("name", ["step", "phase"])
def test_a_step_that_is_never_entered_is_a_warning(tmp_path: Path, name: str) -> None:
    """torch's profiler has a ``step()`` that ends a step."""
    with gpuprobe.record(tmp_path / "a.gpuprobe") as recorder:
        given = () if name == "step" else ("validation",)
        with pytest.warns(RuntimeWarning, match=rf"{name}\(\) does nothing outside a with"):
            getattr(recorder, name)(*given)
        with getattr(recorder, name)(*given):
            pass

        @getattr(recorder, name)(*given)
        def decorated() -> int:
            return 3

        assert decorated() == 3
