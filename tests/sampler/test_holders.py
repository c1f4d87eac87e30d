"""The containers of a program that hold tensors when it ends."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from gpuprobe import recursion
from gpuprobe.analysis.growth import keeper
from gpuprobe.model.run.session import Holder
from gpuprobe.model.values import Bytes
from gpuprobe.sampler.holders import holders, with_earlier


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program's ``__main__``, without variables: in a program without the modules of other
    tests, which have thousands of objects.
    """
    tests = Path(__file__).parents[1]
    for name, other in list(sys.modules.items()):
        path = getattr(other, "__file__", None)
        if name != __name__ and path is not None and tests in Path(path).parents:
            monkeypatch.delitem(sys.modules, name)
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

    def clear(self) -> None:
        self.history = None

    def hook(self, *given: Any) -> None: ...


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
        (lambda: Tracker(tensors()), "x.history", "list"),
        (lambda: {"a": {"b": deque(tensors())}}, "x['a']['b']", "deque"),
        (lambda: dict(enumerate(tensors())), "x", "dict"),
        (lambda: [(1, one, {"y": 2}) for one in tensors()], "x", "list"),
        (lambda: [Tracker(one) for one in tensors()], "x", "list"),
        (lambda: [Tracker(tensors())], "x[0].history", "list"),
        (lambda: functools.partial(print, tensors()), "x.args[0]", "list"),
        (lambda: Tracker(tensors()).clear, "x.__self__.history", "list"),
        (lambda: cached(4), "x, a functools.cache", "dict"),
    ],
)
def test_where_they_are(main: ModuleType, value: Callable[[], Any], name: str, kind: str) -> None:
    main.__dict__["x"] = value()
    (found,) = holders()
    assert (found.name, found.kind, found.tensors) == (name, kind, 4)


def cached(calls: int) -> Any:
    @functools.cache
    def features(index: int) -> torch.Tensor:
        return torch.zeros(index)

    for index in range(calls):
        features(index)
    return features


def with_attribute() -> Any:
    def collect() -> None: ...

    collect.outputs = tensors()  # type: ignore[attr-defined]
    return collect


def with_default() -> Any:
    def collect(x: int, seen: list[Any] = tensors(), *, more: int = 2) -> None: ...  # noqa: B008

    return collect


def with_named_default() -> Any:
    def collect(*, seen: list[Any] = tensors()) -> None: ...  # noqa: B008

    return collect


def with_closure() -> Any:
    history = tensors()
    never: list[Any]

    def collect() -> None:
        history.append(never[0])

    if not history:
        never = []
    return collect


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (with_attribute, "step.outputs (a list)"),
        (with_default, "seen (a list in collect)"),
        (with_named_default, "seen (a list in collect)"),
        (with_closure, "history (a list in with_closure)"),
    ],
)
def test_what_functions_keep(main: ModuleType, make: Callable[[], Any], place: str) -> None:
    main.__dict__["step"] = make()
    assert [one.place for one in holders()] == [place]


def test_functions_of_libraries_are_not_searched(main: ModuleType) -> None:
    namespace: dict[str, Any] = {"kept": tensors()}
    code = compile("def step(kept=kept): ...", "/env/lib/python3.12/site-packages/a.py", "exec")
    exec(code, namespace)
    main.__dict__["step"] = namespace["step"]
    assert holders() == ()


class Cache:
    shared: ClassVar[list[Any]] = []

    def outer(self) -> None: ...


@pytest.mark.parametrize("value", [Cache, Cache(), Cache().outer, type("Inner", (Cache,), {})()])
def test_an_attribute_of_a_class(
    main: ModuleType, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    monkeypatch.setattr(Cache, "shared", tensors())
    main.__dict__["x"] = value
    assert [one.place for one in holders()] == ["Cache.shared (a list)"]


def test_what_hooks_keep(main: ModuleType) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    handle = model[0].register_forward_hook(Tracker(tensors()).hook)
    main.__dict__["model"] = model
    (found,) = holders()
    assert found.name == f"model.0._forward_hooks[{handle.id}].__self__.history"


def test_a_global_of_another_module(main: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    many = ModuleType("many")
    many.__dict__.update({f"one{number}": Tracker(None) for number in range(30_000)})
    many.__file__ = "/home/me/many.py"
    monkeypatch.setitem(sys.modules, "many", many)
    for name, path in (("steps", "/home/me/steps.py"), ("lib", "/env/site-packages/lib.py")):
        module = ModuleType(name)
        module.__dict__.update(__file__=path, outputs=tensors())
        monkeypatch.setitem(sys.modules, name, module)
    assert [one.place for one in holders()] == ["steps.outputs (a list)"]


@pytest.mark.parametrize("element", [Tracker, lambda number: [number] * 4])
def test_a_large_module_does_not_hide_what_the_script_keeps(
    main: ModuleType, monkeypatch: pytest.MonkeyPatch, element: Callable[[int], Any]
) -> None:
    many = ModuleType("many")
    many.__dict__.update({f"one{number}": element(number) for number in range(30_000)})
    many.__file__ = "/home/me/many.py"
    monkeypatch.setitem(sys.modules, "many", many)
    main.__dict__["x"] = {"a": {"b": Tracker(tensors())}}
    assert [one.place for one in holders()] == ["x['a']['b'].history (a list)"]


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


def test_gpuprobe_itself_is_not_searched(main: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed, its files are in no folder of packages."""
    monkeypatch.setattr(recursion, "kept", tensors(), raising=False)
    vars(main)["own"] = tensors()
    assert [one.name for one in holders()] == ["own"]
