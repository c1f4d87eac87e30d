"""Operators seen below autograd without a dispatch mode."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpuprobe.sampler.tracing.cpu import CpuTrace
from gpuprobe.torch_support import operator_calls
from gpuprobe.torch_support.operator_calls import handled_by, left_out, unhandled, watch

Seen = list[str]


@pytest.fixture
def seen() -> Iterator[Seen]:
    names: Seen = []

    def note(op: Any, args: Any, kwargs: Any, below: Callable[..., Any]) -> Any:
        names.append(op.name().removeprefix("aten::"))
        return below(op, args, kwargs)

    end = watch(note)
    try:
        yield names
    finally:
        end()
    names.clear()
    torch.ones(2).add(1)
    assert names == []


class Passing(TorchDispatchMode):
    """Calls what it is given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_each_operator_is_seen_once_below_autograd(seen: Seen) -> None:
    x = torch.ones(3, requires_grad=True)
    torch.nn.functional.linear(x.view(1, 3), torch.ones(2, 3)).sum().backward()
    assert seen[:4] == ["ones", "view", "ones", "t"]
    assert {"mm", "sum", "expand"} <= set(seen)
    assert "linear" not in seen


def test_an_operator_is_taken_apart_in_inference_mode_too(seen: Seen) -> None:
    with torch.inference_mode():
        torch.nn.functional.linear(torch.ones(1, 3), torch.ones(2, 3))
    assert "mm" in seen
    assert "linear" not in seen


def test_what_torch_creates_below_a_mode_of_the_program_is_seen(seen: Seen) -> None:
    with Passing():
        assert torch.tensor([1.0, 2.0]).mul(2).tolist() == [2.0, 4.0]
    assert seen[-2:] == ["lift_fresh", "mul.Tensor"]


def test_an_operator_that_was_defined_later_is_seen(seen: Seen) -> None:
    with torch.library._scoped_library("gpuprobe_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        assert torch.ops.gpuprobe_test.twice(torch.ones(2)).tolist() == [2.0, 2.0]
    assert "gpuprobe_test::twice" in seen


def test_an_operator_that_was_defined_later_is_traced_with_fake_tensors(seen: Seen) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def calls(op: Any, x: torch.Tensor) -> Any:
        return op(x)

    for factor in (2, 3):  # the second time the name belongs to another operator
        with torch.library._scoped_library("gpuprobe_test", "FRAGMENT") as library:
            library.define("times(Tensor x) -> Tensor")
            library.impl("times", lambda x, n=factor: x * n, "CompositeExplicitAutograd")
            times = torch.ops.gpuprobe_test.times.default
            graph = make_fx(partial(calls, times), tracing_mode="fake")(torch.ones(2))
            assert times in {node.target for node in graph.graph.nodes}
            assert graph(torch.ones(2)).tolist() == [float(factor)] * 2
    assert "gpuprobe_test::times" in seen


def test_subclasses_come_first(seen: Seen) -> None:
    class Wrapper(torch.Tensor):
        inner: torch.Tensor

        @staticmethod
        def __new__(cls: Any, inner: torch.Tensor) -> Any:
            made = torch.Tensor._make_wrapper_subclass(cls, inner.shape)
            made.inner = inner
            return made

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append("subclass")
            return Wrapper(func(*(a.inner if isinstance(a, Wrapper) else a for a in args)))

    made = Wrapper(torch.ones(3)) * 2
    assert seen == ["ones", "subclass", "mul.Tensor"]
    assert made.inner.tolist() == [2.0, 2.0, 2.0]


def test_threads_that_start_meanwhile_are_seen_also_with_a_run_of_their_own(seen: Seen) -> None:
    class Worker(threading.Thread):
        def run(self) -> None:
            torch.ones(2).exp()

    worker = Worker()
    worker.start()
    worker.join()
    assert "exp" in seen


def test_the_backward_pass_adds_gradients_in_place_as_without_a_watch(seen: Seen) -> None:
    w = torch.ones(8, requires_grad=True)
    loss = (w * 2).sum() + (w * 3).sum() + (w * 4).sum()
    seen.clear()
    loss.backward()
    assert "add.Tensor" not in seen
    assert seen.count("add_.Tensor") in (0, 2)  # C++ itself, or in place of it
    assert w.grad is not None
    assert w.grad.tolist() == [9.0] * 8


def test_what_fails_keeps_no_argument_alive() -> None:
    trace = CpuTrace(lambda: "", pytest.fail)
    trace.start([])
    try:
        tensor = torch.ones(3)
        count = sys.getrefcount(tensor)
        with pytest.raises(RuntimeError, match="size of tensor") as caught:
            tensor + torch.ones(4)
        assert sys.getrefcount(tensor) == count
        assert caught.value.__traceback__ is not None
    finally:
        trace.stop()


def test_parts_of_an_operator_go_to_one_handler(seen: Seen) -> None:
    parts: Seen = []

    def inner(op: Any, args: Any, kwargs: Any, below: Callable[..., Any]) -> Any:
        parts.append(op.name())
        return below(op, args, kwargs)

    def outer(op: Any, args: Any, kwargs: Any, below: Callable[..., Any]) -> Any:
        with handled_by(inner):
            torch.ones(2).sin()
        return below(op, args, kwargs)

    end = watch(outer)
    try:
        torch.zeros(2)
    finally:
        end()
    assert parts == ["aten::ones", "aten::sin"]
    assert seen == ["zeros"]


def test_unwatched_operators_are_not_seen(seen: Seen) -> None:
    with unhandled():
        torch.ones(2).exp()
    assert seen == []


def test_fake_tensors_are_left_to_torch(seen: Seen) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        made = torch.ones(2) @ torch.ones(2, 3)
    assert made.shape == (3,)
    assert seen == []


def test_torch_may_call_operators_of_subclasses_without_the_key_of_python(seen: Seen) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    python = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    with torch._C._ExcludeDispatchKeyGuard(python):
        assert torch.ops.aten.detach(fake).shape == (3,)
    assert seen == []


def test_higher_order_operators_run(seen: Seen) -> None:
    from torch._higher_order_ops.cond import cond

    result = cond(torch.tensor(True), lambda x: x.sin(), lambda x: x.cos(), (torch.zeros(2),))
    assert result.tolist() == [0.0, 0.0]


def test_functions_of_gpuprobe_are_not_compiled(seen: Seen) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    assert program(torch.ones(2)).tolist() == [3.0, 3.0]
    assert "mul.Tensor" in seen
    cached = torch._dynamo.eval_frame._debug_get_cache_entry_list(operator_calls._operator.__code__)
    assert cached == []


class _Graphs:
    """A backend of torch.compile that counts compilations and runs the graph as it is."""

    def __init__(self) -> None:
        self.compiled = 0
        self.called = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.called += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def graphs() -> Iterator[_Graphs]:
    torch._dynamo.reset()
    yield _Graphs()
    torch._dynamo.reset()


@pytest.mark.parametrize("stance", ["fail_on_recompile", "eager_on_recompile"])
def test_a_compiled_function_stays_compiled_where_it_must_not_be_compiled_again(
    graphs: _Graphs, stance: str
) -> None:
    function = torch.compile(lambda x: x * 2 + 1, backend=graphs)
    x = torch.ones(3)
    function(x)
    names: Seen = []

    def note(op: Any, args: Any, kwargs: Any, below: Callable[..., Any]) -> Any:
        names.append(op.name().removeprefix("aten::"))
        return below(op, args, kwargs)

    left = left_out.calls
    end = watch(note)
    try:
        with torch.compiler.set_stance(stance):
            function(x)
            x - 1
            function(function(x))
    finally:
        end()
    graph = ["mul.Tensor", "add.Tensor"]
    assert names == [*graph, "sub.Tensor", *graph, *graph]
    assert left_out.calls == left + 3
    assert (graphs.compiled, graphs.called) == (1, 4)


def test_a_definition_that_fails_changes_nothing(seen: Seen) -> None:
    library = torch.library.Library("gpuprobe_test_failing", "DEF")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        with pytest.raises(RuntimeError, match="twice"):
            library.define("twice(Tensor x, int y) -> Tensor")
        with pytest.raises(RuntimeError):
            library.define("no schema at all")
        assert torch.ops.gpuprobe_test_failing.twice(torch.ones(2)).tolist() == [2.0, 2.0]
        assert seen == ["ones", "gpuprobe_test_failing::twice"]
    finally:
        library._destroy()


def test_the_same_where_recompiling_is_an_error(graphs: _Graphs, seen: Seen) -> None:
    function = torch.compile(lambda x: x * 2, backend=graphs)
    with unhandled():
        function(torch.ones(3))
    seen.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        function(torch.ones(3))
    assert (graphs.compiled, graphs.called) == (1, 2)
    assert seen == ["ones", "mul.Tensor"]


def test_code_between_graphs_is_not_seen_where_recompiling_is_forbidden(
    graphs: _Graphs, seen: Seen
) -> None:
    def broken(x: Any) -> Any:
        y = x * 2
        torch._dynamo.graph_break()
        return y.tolist(), eager(y), y + 1

    @torch.compiler.disable
    def eager(y: Any) -> Any:
        return y.neg()

    function = torch.compile(broken, backend=graphs)
    x = torch.ones(2)
    with unhandled():
        function(x)
    seen.clear()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert function(x)[0] == [2.0, 2.0]
        x - 1
    assert seen == ["mul.Tensor", "neg", "add.Tensor", "sub.Tensor"]
    compiled = graphs.compiled
    function(x)  # it may be compiled again, and is seen as a whole
    assert graphs.compiled > compiled
