"""The scenarios of torch's own sanitizer tests, put to our engine.

Source: ``test/test_cuda_sanitizer.py`` of PyTorch, class ``TestArgumentHandler`` (which bytes an
operator reads and writes). Of ``TestEventHandler`` (which launches race) here are those whose
verdict is another one; the others are cases of the property in `test_hazard_engine`. Each test
keeps the scenario's name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gpuprobe
from gpuprobe.api import hazards
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.events import (
    Allocation,
    BlockAccess,
    Event,
    EventDestroy,
    EventRecord,
    EventWait,
    Launch,
)
from gpuprobe.hazards.footprint import Footprint

pytestmark = pytest.mark.simulated

SIZE = 8


class Streams:
    """An engine whose launches say whether they were good."""

    def __init__(self) -> None:
        self.engine = Engine()
        self._lines = 0

    def good(self, stream: int, *, reads: Any = (), writes: Any = ()) -> bool:
        """Launch something that reads some tensors, and reads and writes others."""
        return self.errors(stream, reads, writes) == 0

    def errors(self, stream: int, reads: Any, writes: Any) -> int:
        accesses = []
        for tensor, write in [(t, False) for t in reads] + [(t, True) for t in writes]:
            where = Footprint(1000 * tensor, 1000 * tensor + SIZE)
            if not self.engine.is_live(where.low):
                self.engine.apply(Allocation(where.low, SIZE))
            accesses.append((where.low, where, write))
        self._lines += 1
        before = len(self.engine.races)
        self.engine.apply(Launch(self.actor(stream), "op", accesses, self._lines))
        found = self.engine.races[before:]
        return len({race.block for race in found})

    def actor(self, stream: int) -> int:
        return self.engine.stream(0, stream)

    def record(self, event: int, stream: int) -> None:
        self.engine.apply(EventRecord(event, self.actor(stream)))

    def wait(self, event: int, stream: int) -> None:
        self.engine.apply(EventWait(event, self.actor(stream)))


@pytest.fixture
def on() -> Streams:
    return Streams()


def test_deleted_record(on: Streams) -> None:
    """torch's third variant makes an event under the id of a live one, whose deletion it takes to
    have been overlooked. Our front ends number events once and for all, so that a new one never
    has the id of another: what is left of it is an event that was deleted.
    """
    assert on.good(1, reads=[1])
    on.record(0, 1)
    on.engine.apply(EventDestroy(0))
    on.wait(0, 2)
    assert not on.good(2, writes=[1])


def test_multiple_errors(on: Streams) -> None:
    assert on.good(0, writes=range(10))
    assert on.errors(1, [], range(10)) == 1
    assert {race.rule.kind for race in on.engine.races} == {"write-after-write"}
    # torch: ten errors, one for each tensor. Ours is one for each pair of lines, of which a
    # report has one to show. Launches on ten lines are ten.
    other = Streams()
    for tensor in range(10):
        assert other.good(0, writes=[tensor])
    assert other.errors(1, [], range(10)) == 10


# -- what an operator touches


def touched(call: Any) -> tuple[set[int], set[int]]:
    """Addresses that the operators of ``call`` read, and those that they wrote: storages of the
    tensors it returns and is given, by number."""
    with gpuprobe.detect_hazards():
        feed = hazards._source
        assert feed is not None
        accesses: list[BlockAccess] = []
        apply = feed.engine.apply

        def recording(event: Event) -> None:
            if isinstance(event, Launch):
                accesses.extend(event.accesses)
            apply(event)

        def make(*shape: int) -> torch.Tensor:
            return torch.ones(*shape, device="cuda")

        tensors, run = call(make)
        feed.engine.apply = recording
        result = run()
        feed.engine.apply = apply
        results = result if isinstance(result, (tuple, list)) else [result]
        names = {}
        for name, tensor in [*enumerate(tensors), *enumerate(results, 100)]:
            found = feed.touch(tensor)
            names.setdefault(found[1].low, name)
        reads = {names.get(where.low, -1) for _, where, write in accesses if not write}
        writes = {names.get(where.low, -1) for _, where, write in accesses if write}
    return reads, writes


def test_add() -> None:
    def call(make: Any) -> Any:
        a, b = make(5, 3), make(5, 3)
        return (a, b), lambda: torch.add(a, b)

    assert touched(call) == ({0, 1}, {100})


def test_cat() -> None:
    def call(make: Any) -> Any:
        a, b, c = make(2, 4, 5), make(2, 1, 5), make(2, 7, 5)
        return (a, b, c), lambda: torch.cat((a, b, c), dim=1)

    assert touched(call) == ({0, 1, 2}, {100})


def test_split() -> None:
    """torch: reads the input and writes all outputs. A split launches nothing: it makes views.
    With torch's verdict, splitting on a second stream would race with a write on the first."""

    def call(make: Any) -> Any:
        a = make(5, 2)
        return (a,), lambda: torch.split(a, 2)

    assert touched(call) == (set(), set())


def test_inplace() -> None:
    def call(make: Any) -> Any:
        a = make(4, 2)
        return (a,), lambda: a.add_(5)

    assert touched(call) == (set(), {0})


def test_out() -> None:
    def call(make: Any) -> Any:
        a, b = make(8), make(8)
        return (a, b), lambda: torch.mul(a, 3, out=b)

    assert touched(call) == ({0}, {1})


def test_nonzero() -> None:
    """torch: three results written. They are columns of one tensor, which is what is written;
    the columns lie in it one element apart."""

    def call(make: Any) -> Any:
        a = make(5, 3, 2)
        return (a,), lambda: torch.nonzero(a, as_tuple=True)

    assert touched(call) == ({0}, {100})


def test_tensor_used_twice() -> None:
    """``test_tensor_names``: one tensor as two arguments."""

    def call(make: Any) -> Any:
        vector, matrix = make(3), make(3, 3)
        return (vector, matrix), lambda: torch.addr(matrix, vector, vector)

    assert touched(call) == ({0, 1}, {100})


def test_subclass() -> None:
    """Making and using a tensor subclass goes smoothly, and its accesses are judged."""

    class Mine(torch.Tensor):
        def __new__(cls, data: torch.Tensor) -> Any:
            return data.clone().as_subclass(cls)

    with gpuprobe.detect_hazards() as found:
        value = Mine(torch.rand(2, 2, device="cuda"))
        assert torch.equal(torch.zeros(2, 2, device="cuda") * value, torch.zeros_like(value))
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            value.add_(1)  # the host has waited for equal(), and so for the clone
        value.mul_(2)
    assert isinstance(value, Mine)
    assert [finding.kind for finding in found.races] == ["write-after-write"]
