"""Looking for the program's models and tensors takes nothing from the program."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpuprobe.sampler.hooks.discover import compile_in_use, live_roots, live_tensors
from gpuprobe.sampler.tracing.tensors import plain_tensors


class Lazy:
    """A proxy that would load something if it were asked for its class."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise AssertionError("woken up")


def test_what_is_found() -> None:
    inner = torch.nn.Linear(2, 2)
    outer = torch.nn.Sequential(inner)
    lazy = Lazy()
    gc.collect()
    found = {id(module) for module in live_roots()}
    assert id(outer) in found
    assert id(inner) not in found
    kept = torch.ones(3)
    tensors = {id(tensor) for tensor in live_tensors()}
    assert {id(kept), id(inner.weight), id(inner.bias)} <= tensors
    assert id(lazy) not in found | tensors
    assert gc.isenabled()


def test_nothing_is_held() -> None:
    class Watched:
        pass

    one = Watched()
    before = sys.getrefcount(one)
    live_roots()
    live_tensors()
    assert sys.getrefcount(one) == before


@pytest.mark.parametrize("look", [live_roots, live_tensors, compile_in_use])
def test_tuples_that_other_threads_are_filling(
    look: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tuple that somebody else holds cannot be finished: ``tuple()`` raises a SystemError."""
    import torch._dynamo  # else there is nothing to look for

    monkeypatch.setattr(torch._dynamo.utils, "counters", {"frames": {}})
    errors: list[SystemError] = []
    filled = 0
    enough = threading.Event()

    def items() -> Iterator[int]:
        for item in range(7):  # fewer than the ten that a tuple has room for at first
            until = time.perf_counter() + 0.001
            while time.perf_counter() < until:
                pass
            yield item

    def fill() -> None:
        nonlocal filled
        while not enough.is_set():
            try:
                tuple(items())
                filled += 1
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=fill)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    thread.start()
    try:
        for _ in range(30):
            look()
            time.sleep(0.003)
    finally:
        enough.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not errors
    assert filled


def test_functional_tensors_are_what_they_hold() -> None:
    """torch.compile keeps some: their own storage has a size, and no memory."""
    held = torch.ones(3)
    functional = torch._to_functional_tensor(held)
    with pytest.raises(RuntimeError, match="invalid python storage"):
        functional.untyped_storage().data_ptr()
    (found,) = plain_tensors(functional)
    assert found.data_ptr() == held.data_ptr()
    with FakeTensorMode():
        fake = torch.ones(3)
    assert list(plain_tensors(torch._to_functional_tensor(fake))) == []
