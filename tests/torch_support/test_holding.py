"""What keeps a tensor's memory: each kind of holder, by real tensors of torch on the CPU."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from examples import examples
from gpuprobe.analysis.growth import keeper
from gpuprobe.model.io.codec import from_plain, to_plain
from gpuprobe.model.run.holders import Holder, HolderRoot, Kept
from gpuprobe.model.values import Bytes
from gpuprobe.patching import Patches
from gpuprobe.sampler.tracing.held import _key
from gpuprobe.torch_support.holding.objects import OUTSIDE
from gpuprobe.torch_support.holding.search import (
    Holders,
    SearchLimits,
    held_elsewhere,
    holders_of,
    largest_holders,
    lasting_holders_of,
    other_names_of,
    with_earlier,
)
from gpuprobe.torch_support.tensors import storage_key


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The globals of the program's ``__main__``, in a program without the other tests' modules."""
    tests = Path(__file__).parents[1]
    for name, other in list(sys.modules.items()):
        path = getattr(other, "__file__", None)
        if name != __name__ and path is not None and tests in Path(path).parents:
            monkeypatch.delitem(sys.modules, name)
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    yield vars(module)
    vars(module).clear()


def new(size: int = 4) -> torch.Tensor:
    return torch.zeros(size)


def found(tensor_or_key: torch.Tensor | int) -> Holder:
    key = tensor_or_key if isinstance(tensor_or_key, int) else storage_key(tensor_or_key)
    del tensor_or_key
    return holders_of([key], frames=())[key]


def key_of(value: torch.Tensor) -> int:
    return storage_key(value)


# Values of a global "x" that hold one tensor, and the expression for it.


class Plain:
    def __init__(self, **kept: Any) -> None:
        self.__dict__.update(kept)

    def method(self, *given: Any) -> None: ...


class Slotted:
    __slots__ = ("kept", "never")

    def __init__(self, kept: Any) -> None:
        self.kept = kept


class SlottedChild(Slotted):
    __slots__ = ("more",)


@dataclass
class Data:
    kept: Any


@dataclass(frozen=True, slots=True)
class FrozenData:
    kept: Any


class Typed(NamedTuple):
    first: int
    kept: Any


Named = namedtuple("Named", "first kept")


class OwnList(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("called")

    def __len__(self) -> int:
        raise AssertionError("called")


class OwnDict(dict[Any, Any]):
    def items(self) -> Any:
        raise AssertionError("called")

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("called")


class Computed:
    def __init__(self, kept: Any) -> None:
        self._kept = kept

    @property
    def kept(self) -> Any:
        raise AssertionError("called")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    def __hash__(self) -> int:
        raise AssertionError("hashed")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise AssertionError("a proxy outside of its context")


def in_model(tensor: torch.Tensor) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].cache = {"k": tensor}  # type: ignore[assignment]
    return model


def as_buffer(tensor: torch.Tensor) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    model[0].register_buffer("kept", tensor)
    return model


def as_gradient(tensor: torch.Tensor) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 4))
    model[0].bias.grad = tensor
    return model


def by_weak_key(tensor: torch.Tensor) -> Any:
    found: Any = weakref.WeakKeyDictionary()
    key = Plain()
    found[key] = tensor
    return SimpleNamespace(key=key, kept=found)


def attribute_of_tensor(tensor: torch.Tensor) -> torch.Tensor:
    other = torch.ones(1)
    other.kept = tensor  # type: ignore[attr-defined]
    return other


VALUES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "itself": (lambda t: t, "x"),
    "view": (lambda t: t[1:], "x"),
    "storage": (lambda t: t.untyped_storage(), "x"),
    "typed storage": (lambda t: Plain(kept=t.untyped_storage()), "x.kept"),
    "list": (lambda t: [1, t], "x[1]"),
    "tuple": (lambda t: (1, [t]), "x[1][0]"),
    "dict": (lambda t: {"val": {3: t}}, "x['val'][3]"),
    "key of a tuple": (lambda t: {("a", 1): t}, "x['a', 1]"),
    "key of a dict": (lambda t: {t: 1}, "x → key …"),
    "other key": (lambda t: {Plain: t}, "x[…]"),
    "long key": (lambda t: {"a" * 99: t}, f"x['{'a' * 38}…]"),
    "set": (lambda t: {t}, "x{…}"),
    "frozenset": (lambda t: frozenset([t]), "x{…}"),
    "deque": (lambda t: deque([0, t], maxlen=9), "x[1]"),
    "defaultdict": (lambda t: defaultdict(list, {"a": [t]}), "x['a'][0]"),
    "ordered": (lambda t: OrderedDict(a=t), "x['a']"),
    "namedtuple": (lambda t: Named(1, t), "x.kept"),
    "NamedTuple": (lambda t: Typed(1, t), "x.kept"),
    "subclass of list": (lambda t: OwnList([t]), "x[0]"),
    "subclass of dict": (lambda t: OwnDict(a=t), "x['a']"),
    "attribute": (lambda t: Plain(kept=[t]), "x.kept[0]"),
    "slot": (Slotted, "x.kept"),
    "inherited slot": (SlottedChild, "x.kept"),
    "dataclass": (Data, "x.kept"),
    "dataclass with slots": (FrozenData, "x.kept"),
    "namespace": (lambda t: SimpleNamespace(kept=t), "x.kept"),
    "proxy": (Computed, "x._kept"),
    "partial": (lambda t: functools.partial(print, t, sep=1), "x.args[0]"),
    "keyword of partial": (lambda t: functools.partial(print, end=t), "x.keywords['end']"),
    "bound method": (lambda t: Plain(kept=t).method, "x.__self__.kept"),
    "method of a list": (lambda t: [t].append, "x.__self__[0]"),
    "attribute of a module": (in_model, "x.1.cache['k']"),
    "buffer": (as_buffer, "x.0.kept"),
    "gradient": (as_gradient, "x.0.bias.grad"),
    "parameter": (lambda t: torch.nn.Sequential(torch.nn.ParameterList([t])), "x.0.0"),
    "attribute of a tensor": (attribute_of_tensor, "x.kept"),
    "weak keys": (by_weak_key, "x.kept.data[…]"),
    "iterator": (lambda t: iter([t]), "x → list[0]"),
    "sparse": (
        lambda t: torch.sparse_coo_tensor([[0, 1, 2, 3]], t, (9,), check_invariants=False),
        "x",
    ),
    "bound to an exception": (lambda t: ValueError(t), "x.args[0]"),
}


@pytest.mark.parametrize("kind", list(VALUES))
def test_values(main: dict[str, Any], kind: str) -> None:
    make, name = VALUES[kind]
    tensor = new()
    key = key_of(tensor)
    main["x"] = make(tensor)
    if kind == "sparse":
        key = torch._C._storage_address(main["x"]._values())  # type: ignore[attr-defined]
    del tensor
    one = found(key)
    assert one.name == name
    assert one.root is HolderRoot.GLOBAL
    assert from_plain(Holder, to_plain(one)) == one


def test_counts_of_containers(main: dict[str, Any]) -> None:
    main["history"] = {"val": [new() for _ in range(300)], "train": []}
    keys = [key_of(one) for one in main["history"]["val"][2:]]
    one = holders_of(keys, frames=())[keys[5]]
    assert one.name == "history['val'][7]"
    assert [(step.kind, step.size, step.holding) for step in one.path] == [
        ("dict", 2, 1),
        ("list", 300, 298),
        ("Tensor", None, None),
    ]
    assert one.text == "history['val'][7] (a list); 298 of 300 elements hold such memory"


def test_the_shortest_path_is_named(main: dict[str, Any]) -> None:
    tensor = new()
    main.update(deep=[[[tensor]]], short=[tensor])
    assert found(tensor).name == "short[0]"


def test_a_library_module_is_named_last(
    main: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ModuleType("lib.cache")
    library.__dict__.update(__file__="/env/lib/python3.12/site-packages/lib/cache.py")
    monkeypatch.setitem(sys.modules, "lib.cache", library)
    library.__dict__["REGISTRY"] = {"a": new()}
    key = key_of(library.__dict__["REGISTRY"]["a"])
    one = found(key)
    assert (one.root, one.name) == (HolderRoot.GLOBAL, "lib.cache.REGISTRY['a']")
    main["deep"] = [[[[library.__dict__["REGISTRY"]]]]]
    assert found(key).name == "deep[0][0][0][0]['a']"


def test_a_global_of_a_module_of_the_program(
    main: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("steps")
    module.__dict__.update(__file__="/home/me/steps.py", outputs=[new()])
    monkeypatch.setitem(sys.modules, "steps", module)
    one = found(module.__dict__["outputs"][0])
    assert one.place == "steps.outputs[0] (a list)"


# Functions


def with_closure(tensor: torch.Tensor) -> Any:
    history = [tensor]
    never: list[Any]

    def collect() -> None:
        history.append(never[0])

    if not history:
        never = []
    return collect


def with_default(tensor: torch.Tensor) -> Any:
    def collect(x: int, seen: list[Any] = [tensor], *, more: int = 2) -> None: ...  # noqa: B006

    return collect


def with_named_default(tensor: torch.Tensor) -> Any:
    def collect(*, seen: list[Any] = [tensor]) -> None: ...  # noqa: B006

    return collect


def with_attribute(tensor: torch.Tensor) -> Any:
    def collect() -> None: ...

    collect.outputs = [tensor]  # type: ignore[attr-defined]
    return collect


def with_cache(tensor: torch.Tensor) -> Any:
    @functools.cache
    def features(index: int) -> torch.Tensor:
        return kept.pop()

    kept = [tensor]
    features(1)
    return features


def with_bounded_cache(tensor: torch.Tensor) -> Any:
    @functools.lru_cache(maxsize=4)
    def features(index: int) -> torch.Tensor:
        return kept.pop()

    kept = [tensor]
    features(1)
    return features


def decorated(tensor: torch.Tensor) -> Any:
    def inner() -> torch.Tensor:
        return tensor

    return torch.no_grad()(inner)


@pytest.mark.parametrize(
    ("make", "root", "place"),
    [
        (with_closure, HolderRoot.CLOSURE, "history[0] (a list in with_closure"),
        (with_default, HolderRoot.DEFAULT, "seen[0] (a list in collect"),
        (with_named_default, HolderRoot.DEFAULT, "seen[0] (a list in collect"),
        (with_attribute, HolderRoot.GLOBAL, "x.outputs[0] (a list"),
        (with_cache, HolderRoot.CACHE, "x, a functools.cache"),
        (with_bounded_cache, HolderRoot.CACHE, "x, a functools.cache"),
        (decorated, HolderRoot.CLOSURE, "tensor (a Tensor in decorated"),
    ],
)
def test_functions(
    main: dict[str, Any], make: Callable[[torch.Tensor], Any], root: HolderRoot, place: str
) -> None:
    tensor = new()
    key = key_of(tensor)
    main["x"] = make(tensor)
    del tensor
    one = found(key)
    assert one.root is root
    assert one.place.startswith(place)
    if root is not HolderRoot.GLOBAL:
        assert (one.via, Path(one.file).name) == ("x", Path(__file__).name) or make is decorated


class Cache:
    shared: ClassVar[list[Any]] = []


@pytest.mark.parametrize("value", [Cache, Cache(), type("Inner", (Cache,), {})()])
def test_an_attribute_of_a_class(
    main: dict[str, Any], monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    monkeypatch.setattr(Cache, "shared", [new()])
    main["x"] = value
    one = found(Cache.shared[0])
    assert (one.root, one.place) == (HolderRoot.CLASS, "Cache.shared[0] (a list)")


# Frames


def test_a_variable_of_a_function_that_runs() -> None:
    def inner(key: int) -> Holder:
        return holders_of([key])[key]

    def outer() -> Holder:
        kept = [new()]
        return inner(key_of(kept[0]))

    one = outer()
    assert (one.root, one.name, one.function) == (HolderRoot.LOCAL, "kept[0]", "outer")
    assert one.line == outer.__code__.co_firstlineno + 2
    assert one.place == f"kept[0] (a list in outer, test_holding.py:{one.line})"


def test_a_loop_variable() -> None:
    for item in (new() for _ in range(1)):
        one = holders_of([key_of(item)])[key_of(item)]
        assert (one.root, one.name) == (HolderRoot.LOCAL, "item")


def while_it_waits(
    work: Callable[[], None], ready: threading.Event, finish: threading.Event, keys: list[Any]
) -> Any:
    """The holder of the first of ``keys``, while a thread does ``work``, which waits."""
    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    try:
        return holders_of(keys)[keys[0]]
    finally:
        finish.set()
        thread.join()


def test_a_variable_of_another_thread() -> None:
    ready, finish = threading.Event(), threading.Event()
    keys = []

    def work() -> None:
        batch = {"x": new()}
        keys.append(key_of(batch["x"]))
        ready.set()
        finish.wait()

    one = while_it_waits(work, ready, finish, keys)
    assert (one.root, one.function, one.name) == (HolderRoot.LOCAL, "work", "batch['x']")


def test_what_a_thread_was_started_with(main: dict[str, Any]) -> None:
    tensor = new()
    key = key_of(tensor)
    main["thread"] = thread = threading.Thread(target=print, args=([tensor],))
    del tensor
    assert found(key).name == "thread._args[0][0]"
    del thread


def test_a_thread_local(main: dict[str, Any]) -> None:
    main["local"] = threading.local()
    main["local"].kept = [new()]
    assert found(main["local"].kept[0]).name == "local.kept[0]"


def test_a_suspended_generator(main: dict[str, Any]) -> None:
    keys = []

    def batches() -> Iterator[int]:
        prefetched = [new()]
        keys.append(key_of(prefetched[0]))
        yield 1
        prefetched.clear()
        yield 2

    main["loader"] = batches()
    next(main["loader"])
    one = found(keys[0])
    assert (one.root, one.function, one.via) == (HolderRoot.GENERATOR, "batches", "loader")
    assert one.name == "prefetched[0]"
    del main["loader"]
    for _ in batches():  # no name refers to this one
        one = holders_of([keys[1]])[keys[1]]
        assert (one.root, one.function) == (HolderRoot.GENERATOR, "batches")
        assert one.name == "prefetched[0]"
        break


def test_a_suspended_coroutine(main: dict[str, Any]) -> None:
    keys = []

    class Wait:
        def __await__(self) -> Iterator[None]:
            yield None

    async def serve() -> None:
        request = new()
        keys.append(key_of(request))
        await Wait()
        del request

    main["task"] = serve()
    main["task"].send(None)
    one = found(keys[0])
    assert (one.root, one.function, one.name) == (HolderRoot.GENERATOR, "serve", "request")
    main["task"].close()


def test_a_task_of_asyncio(main: dict[str, Any]) -> None:
    async def serve(keys: list[int]) -> None:
        request = [new()]
        keys.append(key_of(request[0]))
        await asyncio.sleep(9)
        del request

    async def run() -> Holder:
        keys: list[int] = []
        task = asyncio.create_task(serve(keys))
        await asyncio.sleep(0)
        one = holders_of(keys)[keys[0]]
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return one

    one = asyncio.run(run())
    assert (one.root, one.function, one.name) == (HolderRoot.GENERATOR, "serve", "request[0]")


def test_the_exception_that_is_handled() -> None:
    keys = []

    def step() -> None:
        batch = [new()]
        keys.append(key_of(batch[0]))
        raise MemoryError

    try:
        step()
    except MemoryError:
        one = holders_of(keys)[keys[0]]
    assert (one.root, one.error, one.function) == (HolderRoot.EXCEPTION, "MemoryError", "step")
    assert one.name == "batch[0]"
    assert one.line == step.__code__.co_firstlineno + 3
    assert "kept by MemoryError" in one.place


def test_the_context_of_the_exception_that_is_handled() -> None:
    keys = []

    def step() -> None:
        batch = [new()]
        keys.append(key_of(batch[0]))
        raise MemoryError

    def retry() -> Holder:
        try:
            step()
        except MemoryError:
            raise ValueError from None
        raise AssertionError

    try:
        retry()
    except ValueError:
        one = holders_of(keys)[keys[0]]
    assert (one.root, one.error, one.name) == (HolderRoot.EXCEPTION, "MemoryError", "batch[0]")


def test_the_exception_of_another_thread() -> None:
    ready, finish = threading.Event(), threading.Event()
    keys = []

    def step() -> None:
        batch = [new()]
        keys.append(key_of(batch[0]))
        raise MemoryError

    def work() -> None:
        try:
            step()
        except MemoryError:
            ready.set()
            finish.wait()

    one = while_it_waits(work, ready, finish, keys)
    assert (one.root, one.error, one.name) == (HolderRoot.EXCEPTION, "MemoryError", "batch[0]")


def test_an_exception_that_a_variable_keeps(main: dict[str, Any]) -> None:
    keys = []

    def step() -> None:
        batch = [new()]
        keys.append(key_of(batch[0]))
        raise MemoryError

    main["errors"] = []
    try:
        step()
    except MemoryError as error:
        main["errors"].append(error)
    one = found(keys[0])
    assert (one.root, one.error, one.function) == (HolderRoot.EXCEPTION, "MemoryError", "step")
    assert (one.name, one.via) == ("batch[0]", "errors[0].__traceback__")


def test_the_last_exception_of_an_interactive_session(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []

    def step() -> None:
        batch = [new()]
        keys.append(key_of(batch[0]))
        raise MemoryError

    with pytest.raises(MemoryError) as caught:
        step()
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    del caught
    one = found(keys[0])
    assert (one.root, one.name) == (HolderRoot.EXCEPTION, "batch[0]")
    assert one.via == "sys.last_value"


# Autograd


def weight(size: int = 4) -> torch.Tensor:
    return torch.ones(size, requires_grad=True)


def test_a_saved_tensor(main: dict[str, Any]) -> None:
    factor = new()
    key = key_of(factor)
    main["total"] = (weight() * factor).sum()
    del factor
    one = found(key)
    assert (one.kept, one.node, one.name) == (Kept.SAVED, "MulBackward0", "total.grad_fn")
    assert one.text == (
        "saved for the backward pass of MulBackward0, kept by total.grad_fn (a Tensor)"
    )
    assert one.graphs == 1


def test_a_saved_result_and_a_list(main: dict[str, Any]) -> None:
    kept = weight()
    index = torch.tensor([0, 1])
    keys = key_of(index), 0
    result = (kept * 2)[index].exp()
    keys = key_of(index), key_of(result)
    main["history"] = {"val": [result.sum()]}
    del index, result
    both = holders_of(keys, frames=())
    assert (both[keys[0]].node, both[keys[1]].node) == ("IndexBackward0", "ExpBackward0")
    assert both[keys[0]].name == both[keys[1]].name == "history['val'][0].grad_fn"


def test_the_tensor_itself_comes_before_a_graph(main: dict[str, Any]) -> None:
    factor = new()
    main["loss"] = (weight() * factor).sum()
    main["factor"] = factor
    assert found(factor).name == "factor"


def test_a_variable_of_a_graph(main: dict[str, Any]) -> None:
    kept = weight()
    key = key_of(kept)
    main["out"] = kept + 1
    del kept
    one = found(key)
    assert (one.kept, one.name) == (Kept.VARIABLE, "out.grad_fn → AccumulateGrad → variable")


def test_a_freed_graph_keeps_nothing(main: dict[str, Any]) -> None:
    factor = new()
    key = key_of(factor)
    main["loss"] = (weight() * factor).sum()
    del factor
    main["loss"].backward()
    assert found(key) == OUTSIDE  # no tensor has this storage any more


def test_what_a_function_of_the_program_saves(main: dict[str, Any]) -> None:
    keys = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            mask, table = new(), new()
            ctx.save_for_backward(mask)
            ctx.tables = [table]
            keys.extend([key_of(mask), key_of(table)])
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    main["out"] = Scale.apply(weight())
    both = holders_of(keys, frames=())
    assert (both[keys[0]].kept, both[keys[0]].node) == (Kept.SAVED, "ScaleBackward")
    assert both[keys[1]].name == "out.grad_fn.tables[0]"


def test_hooks_of_saved_tensors_do_not_run(main: dict[str, Any]) -> None:
    keys = []

    def pack(tensor: torch.Tensor) -> Any:
        copy = tensor.clone()
        keys.append(key_of(copy))
        return {"copy": copy}

    def unpack(packed: Any) -> Any:
        raise AssertionError("unpacked")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        main["out"] = weight().exp()
    assert found(keys[0]).name == "out.grad_fn → packed['copy']"


def test_what_a_checkpoint_keeps(main: dict[str, Any]) -> None:
    kept = weight().exp().detach().requires_grad_()
    key = key_of(kept)
    main["out"] = checkpoint(lambda x: (x * 2).exp(), kept, use_reentrant=False)
    main["again"] = checkpoint(lambda x: (x * 2).exp(), kept, use_reentrant=True)
    del kept
    assert found(key).name.startswith(("out.grad_fn", "again.grad_fn"))


def test_the_gradient_of_what_is_no_leaf(main: dict[str, Any]) -> None:
    out = weight() * 2
    out.retain_grad()
    out.sum().backward()
    main["out"] = out
    assert out.grad is not None
    one = found(out.grad)
    assert (one.kept, one.name) == (Kept.GRAD, "out.grad")


def test_the_state_of_an_optimizer(main: dict[str, Any]) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    main["optimizer"] = optimizer
    assert found(optimizer.state[parameter]["exp_avg"]).name == "optimizer.state[…]['exp_avg']"


@pytest.mark.parametrize("kind", ["forward", "full backward", "tensor", "optimizer", "accumulated"])
def test_hooks(main: dict[str, Any], kind: str) -> None:
    collector = Plain(kept=[new()])
    model = torch.nn.Linear(2, 2)
    main["x"] = model
    if kind == "forward":
        handle: Any = model.register_forward_hook(collector.method)
        name = f"x._forward_hooks[{handle.id}].__self__.kept[0]"
    elif kind == "full backward":
        handle = model.register_full_backward_hook(collector.method)
        name = f"x._backward_hooks[{handle.id}].__self__.kept[0]"
    elif kind == "tensor":
        main["x"] = tensor = weight() * 2
        handle = tensor.register_hook(collector.method)
        name = f"x._backward_hooks[{handle.id}].__self__.kept[0]"
    elif kind == "accumulated":
        main["x"] = leaf = weight()
        handle = leaf.register_post_accumulate_grad_hook(collector.method)
        name = f"x._post_accumulate_grad_hooks[{handle.id}].__self__.kept[0]"
    else:
        main["x"] = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = optimizer.register_step_post_hook(collector.method)
        name = f"x._optimizer_step_post_hooks[{handle.id}].__self__.kept[0]"
    one = found(collector.kept[0])
    assert (one.root, one.name) == (HolderRoot.HOOK, name)


def test_a_hook_whose_tensor_is_gone(main: dict[str, Any]) -> None:
    kept = [new()]
    key = key_of(kept[0])
    tensor = weight() * 2
    tensor.register_hook(functools.partial(print, kept))
    main["loss"] = tensor.sum()
    del tensor, kept
    one = found(key)  # the node of C++ refers to the hook
    assert one.root in (HolderRoot.OUTSIDE, HolderRoot.HOOK)
    assert one.name.endswith(".args[0][0]")


# What no name refers to


class State:
    def __init__(self, out: Any) -> None:
        self.out = out
        self.hooks: list[Any] = []


class Callback:
    def __init__(self, state: State) -> None:
        self.state = state


def cycle(out: Any) -> None:
    state = State(out)
    state.hooks.append(Callback(state))


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.usefixtures("uncollected")
def test_a_cycle(main: dict[str, Any]) -> None:
    tensor, factor = new(), new()
    keys = key_of(tensor), key_of(factor)
    cycle([tensor, weight() * factor])
    del tensor, factor
    both = holders_of(keys, frames=())
    one = both[keys[0]]
    assert (one.root, one.name) == (HolderRoot.CYCLE, "State.out[0]")
    assert [each.kind + each.label for each in one.cycle] == [
        "State.hooks",
        "list[0]",
        "Callback.state",
    ]
    line = State.__init__.__code__.co_firstlineno - 1
    assert (Path(one.cycle[0].file).name, one.cycle[0].line) == (Path(__file__).name, line)
    saved = both[keys[1]]
    assert (saved.root, saved.kept, saved.node) == (HolderRoot.CYCLE, Kept.SAVED, "MulBackward0")
    assert saved.name == "State.out[1].grad_fn"


@pytest.mark.usefixtures("uncollected")
def test_many_cycles(main: dict[str, Any]) -> None:
    keys = []
    for _ in range(40):
        tensor = new()
        keys.append(key_of(tensor))
        cycle(tensor)
        del tensor
    assert {one.name for one in holders_of(keys, frames=()).values()} == {"State.out"}


@pytest.mark.usefixtures("uncollected")
def test_a_cycle_of_an_exception_and_a_frame_that_it_ended(main: dict[str, Any]) -> None:
    keys = []

    def fails(tensor: Any) -> None:
        keys.append(key_of(tensor))
        raise ValueError("too long")

    def tries() -> str:
        error = None
        try:
            fails(new())
        except ValueError as found:
            error = found
        return str(error)

    tries()
    one = holders_of(keys, frames=())[keys[0]]
    assert (one.root, one.name) == (HolderRoot.CYCLE, "tensor")
    assert [each.kind + each.label for each in one.cycle] == [
        "frame of tries.error",
        "ValueError.__traceback__",
    ]
    assert one.cycle[0].file == __file__


@pytest.mark.usefixtures("uncollected")
def test_a_cycle_through_a_context_of_autograd(main: dict[str, Any]) -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.input = x.detach() + 1
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    def step() -> int:
        out = Keeps.apply(weight())
        out.grad_fn.out = out
        return key_of(out.grad_fn.input)

    one = found(step())
    assert (one.root, one.path[-1].label) == (HolderRoot.CYCLE, ".input")


@pytest.mark.usefixtures("uncollected")
def test_a_cycle_of_gradients(main: dict[str, Any]) -> None:
    def step() -> int:
        parameter = torch.ones(4, requires_grad=True)
        with pytest.warns(UserWarning, match="create_graph"):
            (parameter**3).sum().backward(create_graph=True)
        assert parameter.grad is not None
        return key_of(parameter.grad)

    assert found(step()).root in (HolderRoot.CYCLE, HolderRoot.OUTSIDE)


@pytest.mark.usefixtures("uncollected")
def test_a_cycle_of_a_function(main: dict[str, Any]) -> None:
    def make() -> int:
        tensor = new()

        def walk(depth: int) -> Any:
            return walk(depth - 1) if depth else tensor

        return key_of(tensor)

    one = found(make())
    assert one.root is HolderRoot.CYCLE
    assert "function walk" in [each.kind for each in one.cycle]


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_a_hook_of_a_node_of_autograd(main: dict[str, Any], register: str) -> None:
    def make() -> int:
        state = SimpleNamespace(memo={})
        out = weight().exp()
        getattr(out.grad_fn, register)(functools.partial(lambda state, *_: None, state))
        state.memo["out"] = out
        return key_of(out)

    one = found(make())
    assert one.of_node_hooks
    assert one.root is HolderRoot.HOOK
    assert one.name.endswith(".args[0].memo['out']")
    gc.collect()
    assert found(make()).of_node_hooks  # the collector does not see it


def test_names_that_outlive_functions(main: dict[str, Any]) -> None:
    keeper = main["keeper"] = SimpleNamespace(last=None)

    def inner(x: torch.Tensor) -> tuple[Holders, Holders]:
        local = new()
        keys = [key_of(x), key_of(local)]
        return holders_of(keys), lasting_holders_of(keys)

    keeper.last = new()
    every, lasting = inner(keeper.last)
    assert sorted(one.name for one in every.values()) == ["local", "x"]
    assert [one.name for one in lasting.values()] == ["keeper.last"]


def test_an_argument_has_the_name_of_the_function_that_keeps_it(main: dict[str, Any]) -> None:
    def inner(x: torch.Tensor) -> tuple[Holders, Holders]:
        keys = [key_of(x)]
        return holders_of(keys), lasting_holders_of(keys)

    def middle() -> tuple[Holders, Holders]:
        joined = new()
        return inner(joined)

    innermost, lasting = middle()
    assert [(one.name, one.function) for one in innermost.values()] == [("x", "inner")]
    assert [(one.name, one.function) for one in lasting.values()] == [("joined", "middle")]


def test_the_other_names_of_an_object(main: dict[str, Any]) -> None:
    main["state"] = {"weight": new(), "bias": new()}
    main["checkpoint"] = {"model": main["state"], "step": 3}
    main["alone"] = {"table": new()}
    keys = [key_of(main["state"]["weight"]), key_of(main["alone"]["table"])]
    sizes = dict.fromkeys(keys, 16)
    found = holders_of(keys, frames=())
    assert [found[key].name for key in keys] == ["state['weight']", "alone['table']"]
    others = other_names_of(found, sizes)
    assert {key: one.name for key, one in others.items()} == {
        keys[0]: "checkpoint['model']['weight']"
    }


def test_a_value_of_an_expression() -> None:
    def search(kept: int) -> Holder:
        return holders_of([kept])[kept]

    def make() -> tuple[list[torch.Tensor], int]:
        tensor = new()
        return [tensor], key_of(tensor)

    def use(key: int) -> Holder:
        return search(key)

    holding = make()
    iterator = iter(holding[0])
    key = holding[1]
    del holding
    keeper = [iterator]
    del iterator
    one = use(key)
    assert one.root is HolderRoot.LOCAL
    assert one.name == "keeper[0] → list[0]"
    del keeper


def test_what_nothing_holds(main: dict[str, Any]) -> None:
    assert found(12345) == OUTSIDE
    assert OUTSIDE.text == "held outside Python"


def test_what_autocast_caches(main: dict[str, Any]) -> None:
    main["model"] = torch.nn.Linear(37, 11, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        main["model"](torch.ones(1, 37))
        size = 37 * 11 * 2
        one = holders_of({12345: size}, frames=())[12345]
        assert one.root is HolderRoot.AUTOCAST
        assert one.text == (
            "autocast's cache of converted weights (inferred: autocast is enabled, and a weight "
            "has this size in half precision)"
        )
        assert holders_of({12345: size + 2}, frames=())[12345].root is HolderRoot.OUTSIDE
    assert holders_of({12345: size}, frames=())[12345].root is HolderRoot.OUTSIDE


def test_the_buckets_of_ddp(main: dict[str, Any], tmp_path: Path) -> None:
    group: Any = torch.distributed
    group.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        main["model"] = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(37, 11))
        size = (37 * 11 + 11) * 4
        one = holders_of({12345: size}, frames=())[12345]
        main.clear()
    finally:
        group.destroy_process_group()
    assert one.root is HolderRoot.DDP
    assert one.text == (
        "the buckets of DistributedDataParallel's reducer (inferred: a bucket has this size)"
    )


def test_weak_references_hold_nothing(main: dict[str, Any]) -> None:
    tensor = new()
    main.update(ref=weakref.ref(tensor), values=weakref.WeakValueDictionary({1: tensor}))
    key = key_of(tensor)
    del tensor
    assert found(key) == OUTSIDE


def test_device_and_address(main: dict[str, Any]) -> None:
    main["x"] = [new()]
    key = ("cpu", main["x"][0].data_ptr())
    assert holders_of([key], frames=())[key].name == "x[0]"


def test_subclasses_are_not_dispatched(main: dict[str, Any]) -> None:
    class Strict(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *given: Any, **named: Any) -> Any:
            raise AssertionError("dispatched")

        @property
        def grad(self) -> Any:
            raise AssertionError("computed")

    class Wrapper(torch.Tensor):
        inner: torch.Tensor

        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            made = torch.Tensor._make_wrapper_subclass(cls, inner.shape)
            made.inner = inner
            return made

        @classmethod
        def __torch_dispatch__(cls, *given: Any, **named: Any) -> Any:
            raise AssertionError("dispatched")

    inner = new()
    key = key_of(inner)
    main.update(strict=[new().as_subclass(Strict)], wrapped=Wrapper(inner))
    del inner
    assert found(key).name == "wrapped.inner"
    key = torch._C._storage_address(main["strict"][0])  # type: ignore[attr-defined]
    assert found(key).name == "strict[0]"


def test_fake_tensors(main: dict[str, Any]) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        main["fake"] = torch.ones(3, requires_grad=True) * 2
    main["x"] = new()
    assert found(main["x"]).name == "x"


# A search changes nothing


def test_limits(main: dict[str, Any]) -> None:
    main["x"] = [[index] for index in range(50_000)]
    main["x"].append([[new()]])
    key = key_of(main["x"][-1][0][0])
    result = holders_of([key], frames=(), limits=SearchLimits(objects=20_000))
    assert result == {}
    assert result.incomplete == "stopped after 20,000 objects"
    result = holders_of([key], frames=(), limits=SearchLimits(seconds=0))
    assert result.incomplete == "stopped after 0 s"
    result = holders_of([key], frames=())
    assert (result[key].name, result.incomplete) == ("x[50000][0][0]", "")
    assert result.visited > 50_000


def test_nothing_remains(main: dict[str, Any]) -> None:
    model = torch.nn.Linear(4, 4)
    loss = model(torch.ones(1, 4)).sum()
    kept = [new(), loss]
    main["x"] = kept
    objects = [model, loss, kept, kept[0], model.weight, test_nothing_remains]
    keys = [key_of(kept[0]), 12345]
    holders_of(keys)  # what is made once: types' caches
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        references = [sys.getrefcount(one) for one in objects]
        uses = [one._use_count() for one in objects[:5] if isinstance(one, torch.Tensor)]
        tracked = len(gc.get_objects())
        collections = [generation["collections"] for generation in gc.get_stats()]
        thresholds, mode = gc.get_threshold(), torch.is_grad_enabled()
        counts = [tracked]
        for _ in range(4):  # another thread of the tests may make some meanwhile
            holders_of(keys)
            counts.append(len(gc.get_objects()))
        assert min(after - before for before, after in pairwise(counts)) <= 4
        assert references == [sys.getrefcount(one) for one in objects]
        assert uses == [one._use_count() for one in objects[:5] if isinstance(one, torch.Tensor)]
        assert collections == [generation["collections"] for generation in gc.get_stats()]
        assert (gc.get_threshold(), torch.is_grad_enabled()) == (thresholds, mode)
        assert not gc.isenabled()
    finally:
        if enabled:
            gc.enable()
    end = weakref.ref(kept[0])
    del objects, kept, main["x"]
    assert end() is None


def test_frames_do_not_keep_their_variables() -> None:
    ends = []

    def released() -> None:
        mine = new()
        ends.append(weakref.ref(mine))
        holders_of([key_of(mine)])
        del mine
        assert ends[0]() is None

    released()


def test_a_million_objects(main: dict[str, Any]) -> None:
    main["rows"] = [[index, [index]] for index in range(500_000)]
    main["rows"][-7].append(new())
    result = holders_of([key_of(main["rows"][-7][2])], frames=())
    assert [one.name for one in result.values()] == ["rows[499993][2]"]
    assert result.incomplete == ""
    assert result.visited > 500_000


# The largest


def test_the_containers_that_keep_the_most(main: dict[str, Any]) -> None:
    main.update(
        outputs=[new(256) for _ in range(4)],
        losses=[(weight(8) * 2).sum() for _ in range(4)],
        batch=[new(), new()],
        model=torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4))),
    )
    main["parameters"] = list(main["model"].parameters())
    first, second = largest_holders(frames=())
    assert first.place == "losses (a list)"
    assert (first.tensors, first.graphs) == (4, 4)
    assert first.saved_tensors == 8  # the weights and factors of their graphs
    assert (second.place, second.contents) == ("outputs (a list)", "4 tensors, 4.0 KiB")


def test_a_variable_whose_graph_grows(main: dict[str, Any]) -> None:
    total: Any = 0
    for _ in range(6):
        total = total + (weight(256) * new(256)).sum()
    main["total"] = total
    del total
    (one,) = largest_holders(frames=())
    assert one.name == "total.grad_fn"
    assert (one.of_graph, one.tensors, one.kind) == (True, 0, "Tensor")
    assert one.saved_tensors >= 6
    assert one.saved_bytes >= 6 * 1024
    assert keeper([one], 6, 6 * 1024) is one


def test_results_are_typed() -> None:
    assert isinstance(holders_of([], frames=()), Holders)


def outputs(count: int = 4) -> list[torch.Tensor]:
    return [new(256) for _ in range(count)]


def largest() -> list[str]:
    return [one.place for one in largest_holders(frames=())]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: {"a": {"b": deque(outputs())}}, "x['a']['b'] (a deque)"),
        (lambda: dict(enumerate(outputs())), "x (a dict)"),
        (lambda: [(1, one, {"y": 2}) for one in outputs()], "x (a list)"),
        (lambda: [Plain(kept=one) for one in outputs()], "x (a list)"),
        (lambda: {"train": [new(1)], "val": outputs(9)}, "x['val'] (a list)"),
        (lambda: functools.partial(print, outputs()), "x.args[0] (a list)"),
    ],
)
def test_where_the_largest_is(main: dict[str, Any], make: Callable[[], Any], name: str) -> None:
    main["x"] = make()
    assert largest() == [name]


def test_few_tensors_are_no_leak(main: dict[str, Any]) -> None:
    main["batch"] = outputs(2)
    assert largest() == []


def test_two_names_for_one_list_are_one_holder(main: dict[str, Any]) -> None:
    main["a"] = main["b"] = outputs()
    assert largest() == ["a (a list)"]


def test_weights_and_the_state_of_optimizers_are_no_holders(main: dict[str, Any]) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    model[2].cache = outputs()  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    main.update(
        optimizer=optimizer, model=model, parameters=list(model.parameters()), layers=list(model)
    )
    assert largest() == ["model.2.cache (a list)"]


def test_the_variables_of_functions_that_failed(main: dict[str, Any]) -> None:
    def inner() -> None:
        deeper = outputs()
        raise ValueError(len(deeper))

    def outer() -> None:
        kept = outputs()
        inner()
        del kept

    with pytest.raises(ValueError, match="4") as caught:
        outer()
    ended = {one.name: one.function for one in largest_holders(caught.value, frames=())}
    assert {name: ended[name] for name in ("kept", "deeper")} == {
        "kept": "outer",
        "deeper": "inner",
    }


def test_the_variables_of_functions_that_run(main: dict[str, Any]) -> None:
    def inner() -> tuple[Holder, ...]:
        return largest_holders(frames=[sys._getframe()])

    def outer() -> tuple[Holder, ...]:
        kept = outputs()
        result = inner()
        del kept
        return result

    assert ("kept", "outer") in [(one.name, one.function) for one in outer()]


def test_a_large_module_does_not_hide_what_the_script_keeps(
    main: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = ModuleType("many")
    many.__dict__.update({f"one{number}": Plain(kept=[number]) for number in range(60_000)})
    many.__file__ = "/home/me/many.py"
    monkeypatch.setitem(sys.modules, "many", many)
    main["x"] = {"a": {"b": Plain(kept=outputs())}}
    assert largest() == ["x['a']['b'].kept (a list)"]


def test_the_one_that_keeps_memory() -> None:
    losses = Holder("losses", "list", "", 20, 20, Bytes(80))
    kept = Holder("outputs", "list", "", 20, 0, Bytes(9000))
    batch = Holder("batch", "dict", "", 3, 0, Bytes(90_000))
    every = (losses, batch, kept)
    assert keeper(every, 18, 10_000) is kept  # most of the bytes
    assert keeper(every, 18, 10_000_000) is losses  # graphs keep more than their tensors
    assert keeper((batch, kept), 18, 10_000_000) is None
    assert with_earlier((kept,), (kept, losses)) == (kept,)  # a global of before
    inner = Holder("kept", "list", "train", 20, 0, Bytes(100))
    assert with_earlier((kept,), (inner,)) == (kept, inner)
    assert keeper(every, 60, 10_000) is None  # fewer tensors than steps


# A search finds what evaluates to the tensor


def in_containers(draw: Any, depth: int, leaf: torch.Tensor) -> Any:
    """A random graph of containers that has the tensor once."""
    if depth == 0:
        return leaf
    inner = in_containers(draw, depth - 1, leaf)
    kind = draw(st.sampled_from(["list", "tuple", "dict", "deque", "attribute", "named", "slots"]))
    around = [[number] for number in range(draw(st.integers(0, 3)))]
    if kind == "dict":
        key = draw(st.one_of(st.text("ab'\"", max_size=3), st.integers(-2, 2)))
        return {**{f"other{at}": one for at, one in enumerate(around)}, key: inner}
    if kind == "attribute":
        return Plain(other=around, kept=inner)
    if kind == "named":
        return Typed(3, inner)
    if kind == "slots":
        return FrozenData(inner)
    made: Any = [*around, inner, *around]
    return {"list": list, "tuple": tuple, "deque": deque}[kind](made)


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_the_path_leads_to_the_tensor(data: st.DataObject) -> None:
    tensor = new()
    module = ModuleType("gpuprobe_example")
    module.__file__ = "/home/me/gpuprobe_example.py"
    namespace = vars(module)
    namespace["x"] = in_containers(data.draw, data.draw(st.integers(0, 6)), tensor)
    # Other names and cycles must not lead astray.
    loop: list[Any] = [namespace["x"]]
    loop.append(loop)
    namespace["zz"] = [[loop]]
    key = key_of(tensor)
    sys.modules[module.__name__] = module
    try:
        one = holders_of([key], frames=())[key]
        expression = one.name.removeprefix("gpuprobe_example.")
        assert eval(expression, dict(namespace)) is tensor
    finally:
        del sys.modules[module.__name__]


# What else holds memory


def also_of(keys: list[int]) -> dict[int, Holder]:
    """What else holds storages, by their position."""
    sizes = dict.fromkeys(keys, 8)
    others = held_elsewhere(holders_of(sizes, frames=()), sizes, frames=())
    assert not others.incomplete
    return {keys.index(key): holder for key, holder in others.items() if isinstance(key, int)}


def test_nothing_else_holds_the_elements_of_a_list(main: dict[str, Any]) -> None:
    main["history"] = [new() for _ in range(3)]
    assert also_of([storage_key(one) for one in main["history"]]) == {}


def test_a_variable_that_holds_the_newest_element_of_a_list(main: dict[str, Any]) -> None:
    main["history"] = [new() for _ in range(3)]
    main["trainer"] = SimpleNamespace(last=SimpleNamespace(output=main["history"][2]))
    found = also_of([storage_key(one) for one in main["history"]])
    assert {at: one.name for at, one in found.items()} == {2: "trainer.last.output"}


def test_an_object_that_a_list_and_a_variable_hold(main: dict[str, Any]) -> None:
    main["trainers"] = [SimpleNamespace(state=new()) for _ in range(3)]
    main["x"] = SimpleNamespace(best=SimpleNamespace(of=main["trainers"][1]))
    found = also_of([storage_key(one.state) for one in main["trainers"]])
    assert {at: one.name for at, one in found.items()} == {1: "x.best.of.state"}


def test_a_second_name_of_a_variable(main: dict[str, Any]) -> None:
    main["x"] = new()
    keys = [storage_key(main["x"])]
    assert also_of(keys) == {}
    main["y"] = [main["x"]]
    assert {at: one.name for at, one in also_of(keys).items()} == {0: "y[0]"}


def graph_of(*, saved: list[torch.Tensor]) -> torch.Tensor:
    """A sum, whose graph saved a tensor."""
    weight = torch.ones(4, requires_grad=True)
    saved.append(new())
    return (weight * saved[-1]).sum()


def test_a_graph_that_another_variable_keeps(main: dict[str, Any]) -> None:
    saved: list[torch.Tensor] = []
    main["losses"] = [graph_of(saved=saved) for _ in range(3)]
    keys = [storage_key(one) for one in saved]
    saved.clear()
    # The reference to the graph is cut, also where Python has an object for its node.
    assert main["losses"][0].grad_fn is not None
    assert also_of(keys) == {}
    main["total"] = [SimpleNamespace(loss=main["losses"][1] * 2)]
    found = also_of(keys)
    assert {at: (one.name, one.kept) for at, one in found.items()} == {
        1: ("total[0].loss.grad_fn", Kept.SAVED)
    }


def test_gradients_that_several_names_lead_to(main: dict[str, Any]) -> None:
    main["weights"] = [torch.ones(4, requires_grad=True) for _ in range(3)]
    main["model"] = SimpleNamespace(first=SimpleNamespace(weight=main["weights"][0]))
    sum(one.sum() for one in main["weights"]).backward()
    keys = [storage_key(one.grad) for one in main["weights"]]
    assert also_of(keys) == {}  # there is one reference to each: that of the weight


def test_a_module_holds_its_weights_once(main: dict[str, Any]) -> None:
    main["server"] = SimpleNamespace(model=torch.nn.Linear(4, 4))
    keys = [storage_key(one) for one in main["server"].model.parameters()]
    assert also_of(keys) == {}  # its attributes are in a dict of it
    main["first"] = [main["server"].model.weight]
    assert {at: one.name for at, one in also_of(keys).items()} == {0: "server.model.weight"}


def test_what_a_cache_and_a_variable_hold(main: dict[str, Any]) -> None:
    @functools.lru_cache(maxsize=4)
    def cached(number: int) -> torch.Tensor:
        return new()

    main["cached"] = cached
    keys = [storage_key(cached(number)) for number in range(3)]
    assert also_of(keys) == {}
    main["holder"] = SimpleNamespace(deeper=SimpleNamespace(deepest=[[cached(2)]]))
    assert {at: one.name for at, one in also_of(keys).items()} == {2: "holder.deeper.deepest[0][0]"}


def test_objects_that_the_keys_of_a_cache_hold(main: dict[str, Any]) -> None:
    class Model:
        def __init__(self) -> None:
            self.gram = new()

        @functools.lru_cache(maxsize=8)  # noqa: B019 - what is tested
        def weights(self, noise: int) -> int:
            return noise

    main["Model"] = Model
    models = [Model() for _ in range(3)]
    for model in models:
        model.weights(1)
        model.weights(2)
    keys = [storage_key(model.gram) for model in models]
    del model, models
    assert also_of(keys) == {}


def test_what_the_frames_of_kept_exceptions_and_a_variable_hold(main: dict[str, Any]) -> None:
    keys: list[int] = []

    def check(batch: list[torch.Tensor]) -> None:
        pair = (batch[0], len(batch))
        raise ValueError(pair[1])

    def step() -> None:
        batch = [new()]
        keys.append(storage_key(batch[0]))
        check(batch)

    main["failures"] = []
    for _ in range(3):
        try:
            step()
        except ValueError as error:
            main["failures"].append(error)
    assert also_of(keys) == {}  # neither in step, nor in check, which it calls
    frame = main["failures"][0].__traceback__.tb_next.tb_frame
    main["kept"] = frame.f_locals["batch"][0]
    del frame
    for _ in range(12):  # far away, so that the exception is found first
        main["kept"] = [main["kept"]]
    assert {at: one.name for at, one in also_of(keys).items()} == {0: "kept" + 12 * "[0]"}


def test_what_is_not_used_is_kept_by_the_container_on_its_path(main: dict[str, Any]) -> None:
    session = SimpleNamespace(model=SimpleNamespace(weight=new()), log=[new() for _ in "ab"])
    main["session"] = session
    keys = [storage_key(session.model.weight)]
    keys += [storage_key(one) for one in session.log]
    found = holders_of(keys, frames=())
    of_model, first, second = (_key(found[key]) for key in keys)
    assert first == second != of_model


def test_what_gpuprobe_keeps_for_a_hook_is_not_searched(main: dict[str, Any]) -> None:
    own = Patches()
    own.noted = [[] for _ in range(10_000)]  # type: ignore[attr-defined]
    main["hook"] = functools.partial(print, own)
    deep: list[Any] = [new()]
    key = key_of(deep[0])
    for _ in range(8):
        deep = [deep]
    main["x"] = deep
    result = holders_of([key], frames=())
    assert result[key].name == "x" + 9 * "[0]"
    assert result.visited < 10_000
