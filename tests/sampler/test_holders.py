"""The containers of a program that hold tensors when it ends."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from types import ModuleType
from typing import Any

import pytest
import torch

from gpuprobe.analysis.growth import keeper
from gpuprobe.model.run.session import Holder
from gpuprobe.model.values import Bytes
from gpuprobe.sampler.holders import holders, with_earlier


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program's ``__main__``, without variables."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def tensors(count: int = 4, size: int = 256) -> list[torch.Tensor]:
    return [torch.zeros(size) for _ in range(count)]


def graphs(count: int = 4) -> list[torch.Tensor]:
    weight = torch.ones(8, requires_grad=True)
    return [(weight * 2).sum() for _ in range(count)]


class Tracker:
    def __init__(self, kept: Any) -> None:
        self.history = kept


class Hostile:
    """What a search must not call, and cannot read."""

    __slots__ = ("slot",)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    def __hash__(self) -> int:
        raise AssertionError("hashed")

    def __len__(self) -> int:
        raise AssertionError("measured")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise AssertionError("a proxy outside of its context")


class Lazy(dict[str, Any]):
    """A mapping that loads what it is asked for."""

    def values(self) -> Any:
        raise AssertionError("loaded")

    def __iter__(self) -> Any:
        raise AssertionError("loaded")


def test_a_global_list(main: ModuleType) -> None:
    main.__dict__["outputs"] = tensors()
    assert holders() == (Holder("outputs", "list", "", 4, 0, Bytes(4096)),)
    assert holders()[0].place == "outputs (a list)"
    assert holders()[0].contents == "4 tensors, 4.0 KiB"


@pytest.mark.parametrize(
    ("value", "name", "kind"),
    [
        (Tracker(tensors()), "x.history", "list"),
        ({"a": {"b": deque(tensors())}}, "x['a']['b']", "deque"),
        (dict(enumerate(tensors())), "x", "dict"),
        ([(1, one, {"y": 2}) for one in tensors()], "x", "list"),
        ([Tracker(one) for one in tensors()], "x", "list"),
        ([Tracker(tensors())], "x[0].history", "list"),
    ],
)
def test_where_they_are(main: ModuleType, value: Any, name: str, kind: str) -> None:
    main.__dict__["x"] = value
    (found,) = holders()
    assert (found.name, found.kind, found.tensors) == (name, kind, 4)


def test_an_attribute_of_a_module_in_a_model(main: ModuleType) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    model[2].cache = tensors()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    main.__dict__.update(
        optimizer=optimizer, model=model, parameters=list(model.parameters()), layers=list(model)
    )
    assert [one.name for one in holders()] == ["model.2.cache"]


def test_two_names_for_one_list_are_one_holder(main: ModuleType) -> None:
    main.__dict__["a"] = main.__dict__["b"] = tensors()
    assert [one.name for one in holders()] == ["a"]


def test_storages_are_counted_once(main: ModuleType) -> None:
    base = torch.zeros(1024)
    main.__dict__["views"] = [base[i:] for i in range(5)]
    assert holders()[0].bytes == 4096


def test_graphs_come_first(main: ModuleType) -> None:
    main.__dict__.update(large=tensors(size=1 << 20), losses=graphs())
    assert [(one.name, one.graphs) for one in holders()] == [("losses", 4), ("large", 0)]
    assert holders()[0].contents == "4 tensors, 16 B, with autograd graphs"


def test_the_variables_of_functions_that_failed(main: ModuleType) -> None:
    def inner() -> None:
        deeper = tensors()
        raise ValueError(len(deeper))

    def outer() -> None:
        kept = tensors()
        inner()
        del kept

    with pytest.raises(ValueError, match="4") as caught:
        outer()
    found = {one.name: one.function for one in holders(caught.value)}
    assert {name: found[name] for name in ("kept", "deeper")} == {
        "kept": "outer",
        "deeper": "inner",
    }


def test_the_variables_of_functions_that_run(main: ModuleType) -> None:
    def inner() -> tuple[Holder, ...]:
        return holders(running=sys._getframe())

    def outer() -> tuple[Holder, ...]:
        kept = tensors()
        found = inner()
        del kept
        return found

    assert ("kept", "outer") in [(one.name, one.function) for one in outer()]
    reference = weakref.ref(torch.zeros(1))

    def released() -> None:
        nonlocal reference
        mine = tensors()
        reference = weakref.ref(mine[0])
        holders(running=sys._getframe())
        del mine
        assert reference() is None  # the search keeps nothing

    released()


def test_few_tensors_are_no_leak(main: ModuleType) -> None:
    main.__dict__["batch"] = tensors(2)
    assert holders() == ()


def test_objects_are_not_called_or_compared(main: ModuleType) -> None:
    loop: list[Any] = [Hostile(), Hostile]
    loop.append(loop)
    main.__dict__.update(
        lazy=Lazy(a=1), loop=loop, hostile=Hostile(), sparse=[torch.eye(2).to_sparse()] * 3
    )
    assert [(one.name, one.bytes) for one in holders()] == [("sparse", 0)]


def test_large_data_ends_the_search(main: ModuleType) -> None:
    rows = [[0] * 1000] * 3 + [[index] * 1000 for index in range(3000)]
    main.__dict__.update(rows=rows, outputs=tensors())
    assert [one.name for one in holders()] == ["outputs"]  # before what is within rows


def test_the_one_that_keeps_memory() -> None:
    losses = Holder("losses", "list", "", 20, 20, Bytes(80))
    outputs = Holder("outputs", "list", "", 20, 0, Bytes(9000))
    batch = Holder("batch", "dict", "", 3, 0, Bytes(90_000))
    found = (losses, batch, outputs)
    assert keeper(found, 18, 10_000) is outputs  # most of the bytes
    assert keeper(found, 18, 10_000_000) is losses  # graphs keep more than their tensors
    assert keeper((batch, outputs), 18, 10_000_000) is None
    assert with_earlier((outputs,), (outputs, losses)) == (outputs,)  # a global of before
    inner = Holder("kept", "list", "train", 20, 0, Bytes(100))
    assert with_earlier((outputs,), (inner,)) == (outputs, inner)
    assert keeper(found, 60, 10_000) is None  # fewer tensors than steps
