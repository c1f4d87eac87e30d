"""Compiled regions and Triton kernels, which launch kernels without an operator.

The graph that Inductor compiled is run on the CPU, operator by operator, and its results are put
where the compiled code's are. Other Triton kernels are run by Triton's interpreter, on the host.
"""

from __future__ import annotations

import ast
import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

from gpuprobe.errors import GpuprobeError, NotModelled
from gpuprobe.native.values.aliases import CPU
from gpuprobe.native.values.arguments import Args, Kwargs
from gpuprobe.native.values.computing import Call, Computing
from gpuprobe.native.values.draws import Key, generator_of, key_of
from gpuprobe.native.values.plans import plan_of
from gpuprobe.native.values.region_cost import RegionCost
from gpuprobe.native.values.skipping import SKIP_DEVICE, SKIP_TO_DEVICE
from gpuprobe.native.values.triton_interpreter import JIT, interpret, patch_helpers
from gpuprobe.patching import Patches, when_imported

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

_Tensor: Final = torch.Tensor
_Region: TypeAlias = Callable[[Sequence[object]], Sequence[object]]
"""A compiled region: its inputs, and its results."""


def _seeds(count: int, device: object) -> Tensor:
    return torch.randint(0, 1 << 62, (count,))


def _random(size: Iterable[int], seed: Tensor, mode: str, *, offset: int = 0) -> Tensor:
    draw = {"rand": torch.rand, "randn": torch.randn}[mode]
    return draw(tuple(size), generator=generator_of((int(seed), offset)))


def _randint(low: int, high: int, size: Iterable[int], seed: Tensor, *, offset: int = 0) -> Tensor:
    return torch.randint(low, high, tuple(size), generator=generator_of((int(seed), offset)))


_RANDOM: Final[dict[str, Callable[..., Tensor]]] = {
    "inductor_seeds": _seeds,
    "inductor_seed": lambda device: torch.randint(0, 1 << 62, ()),
    "inductor_lookup_seed": lambda seeds, index: seeds[index],
    "inductor_random": _random,
    "inductor_randint": _randint,
}
"""Inductor's own operators: a number is drawn from the seed, in the backward pass again."""


class OnCpu(torch.fx.Interpreter):
    """Runs a graph of operators for CUDA on CPU tensors."""

    def __init__(self, graph: GraphModule, computing: Computing, key: Key) -> None:
        super().__init__(graph, garbage_collect_values=True)
        self._computing = computing
        self._key = key
        self._draws = 0

    def call_function(self, target: object, args: Args, kwargs: Kwargs) -> object:
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise NotModelled(
                f"values of a compiled region with {target.name()} are not computed",
                hint="use compute='shapes', or run without torch.compile",
            )
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        plan = self._computing.plan(target)
        given = {name: CPU if isinstance(v, torch.device) else v for name, v in kwargs.items()}
        values = [CPU if isinstance(v, torch.device) else v for v in args]
        self._draws += 1
        random = _RANDOM.get(plan.name)
        if random is not None:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(self._key[0] ^ (self._key[1] << 20) ^ self._draws)
                return random(*values, **given)
        key = (self._key[0], (self._key[1] << 20) + self._draws) if plan.random else None
        call = Call(plan, values, given, key)
        result = self._computing.found(call)
        self._computing.counted(call, result)
        return result

    def fetch_attr(self, target: str) -> object:
        found = super().fetch_attr(target)
        if isinstance(found, _Tensor) and found.is_cuda:
            return self._computing.aliases.exact(found)
        return found


Unknown = Callable[[torch.Tensor], None]


def follow(computing: Computing, patches: Patches, unknown: Unknown | None) -> None:
    """Compute the values of compiled regions with ``computing``; with ``unknown``, call that with
    each tensor that they write instead.
    """
    for module, patch in {
        "torch._inductor.compile_fx": lambda: _patch_inductor(computing, patches, unknown),
        "torch._inductor.runtime.triton_heuristics": lambda: _patch_kernels(computing, patches),
        "torch._functorch.config": lambda: _patch_cache(patches),
        JIT: lambda: _patch_triton(computing, patches, unknown),
        "triton.runtime.autotuner": lambda: _patch_autotuner(computing, patches),
    }.items():
        patches.add(when_imported(module, patch))


_CONSTANT: Final = "_tensor_constant"
"""How a graph's constants are named: tensors that the traced code makes of Python's numbers, which
torch copies to the device without an operator."""


def _patch_inductor(computing: Computing, patches: Patches, unknown: Unknown | None) -> None:
    """Keep the graph of each region that Inductor compiles, to compute its values."""
    from torch._inductor import compile_fx

    before = compile_fx._compile_fx_inner

    @functools.wraps(before)
    def compile_inner(gm: GraphModule, inputs: object, **kwargs: object) -> Any:
        for name, value in gm.named_buffers(recurse=False):
            if name.startswith(_CONSTANT) and value.is_cuda:
                computing.written(value)
        graph = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
        compiled = before(gm, inputs, **kwargs)
        run = getattr(compiled, "current_callable", None)
        if run is not None:
            compiled.current_callable = _with_values(run, graph, computing, unknown)
        return compiled

    patches.set(compile_fx, "_compile_fx_inner", compile_inner)


def _patch_cache(patches: Patches) -> None:
    """Disable the cache of autograd, whose regions have no graph."""
    import torch._functorch.config as config

    patches.add(_changed(config, "enable_autograd_cache", False))


def _patch_triton(computing: Computing, patches: Patches, unknown: Unknown | None) -> None:
    """Compute the values of the program's Triton kernels with Triton's interpreter."""
    from triton.runtime.jit import JITFunction

    patch_helpers(patches)
    before = JITFunction.run

    @functools.wraps(before)
    def launch(self: Any, *args: object, **kwargs: Any) -> object:
        inside = computing.skipping.set(0)
        computing.skipping.set(inside)
        result = computing.placed(before, self, *args, **kwargs)
        if inside or kwargs.get("warmup"):
            return result
        allowed = computing.allows(_of_a_program(self.src) * _programs(self, args, kwargs))
        if allowed and computing.computes((*args, *kwargs.values())):
            _interpret(self, args, kwargs, computing)
        elif unknown is not None:
            for item in (*args, *kwargs.values()):
                if isinstance(item, _Tensor):
                    unknown(item)
        return result

    patches.set(JITFunction, "run", launch)


def _patch_autotuner(computing: Computing, patches: Patches) -> None:
    """Compute nothing for the launches that Triton's autotuner measures, before the one that
    counts.
    """
    from triton.runtime.autotuner import Autotuner

    before = Autotuner._bench

    @functools.wraps(before)
    def measure(self: object, *args: object, **kwargs: object) -> object:
        inside = computing.skipping.set(SKIP_DEVICE | SKIP_TO_DEVICE)
        try:
            return before(self, *args, **kwargs)
        finally:
            computing.skipping.set(inside)

    patches.set(Autotuner, "_bench", measure)


def _patch_kernels(computing: Computing, patches: Patches) -> None:
    """Count the launches of Inductor's kernels at the line that calls the compiled region."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    before = CachingAutotuner.run

    @functools.wraps(before)
    def run(self: object, *args: object, **kwargs: object) -> object:
        return computing.placed(before, self, *args, **kwargs)

    patches.set(CachingAutotuner, "run", run)


_OF_A_NODE: Final = 5e6
"""Floating-point operations that take as long as one call or operator of a Triton kernel in the
interpreter: a tenth of a millisecond. Programs of kernels of Liger with 24 and 39 took 2.3 to 3.2
milliseconds on a busy machine."""

_PASSES: Final = 4
"""Passes of a loop in a kernel, of which the number is unknown before."""

_COMPUTES: Final = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.AugAssign)


@functools.cache
def _of_a_program(source: str) -> float:
    """What one program of a kernel counts as, in floating-point operations, by its source."""

    def nodes(part: ast.AST) -> int:
        inner = sum(nodes(one) for one in ast.iter_child_nodes(part))
        inner += isinstance(part, _COMPUTES)
        return inner * (_PASSES if isinstance(part, (ast.For, ast.While)) else 1)

    return _OF_A_NODE * nodes(ast.parse(source))


def _given(kernel: JITFunction, args: Args, kwargs: Kwargs) -> Kwargs:
    """The arguments of a launch by name."""
    names = [parameter.name for parameter in kernel.params]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _programs(kernel: JITFunction, args: Args, kwargs: Kwargs) -> int:
    grid = kwargs["grid"]
    sizes: Iterable[int] = grid(_given(kernel, args, kwargs)) if callable(grid) else grid
    return math.prod(sizes)


def _interpret(kernel: JITFunction, args: Args, kwargs: Kwargs, computing: Computing) -> None:
    """Compute what a launch writes. Raises NotModelled where Triton's interpreter cannot."""
    names = [parameter.name for parameter in kernel.params]
    given = _given(kernel, args, kwargs)
    with computing.below():
        values = {
            name: computing.aliases.of(value)
            if isinstance(value, _Tensor) and value.is_cuda
            else value
            for name, value in given.items()
            if name in names
        }
        try:
            interpret(kernel, kwargs["grid"], values)
        except GpuprobeError:
            raise
        except Exception as error:
            raise NotModelled(
                f"values of the Triton kernel {kernel.fn.__name__} are not computed: Triton's "
                f"interpreter raises {type(error).__name__}: {str(error).partition(chr(10))[0]}",
                hint="use compute='shapes', or a version of it in torch's operators",
            ) from error


def _changed(owner: ModuleType, name: str, value: object) -> Callable[[], None]:
    """Set a setting of a module of settings; return what puts the old one back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def _written_inputs(graph: GraphModule) -> list[int]:
    """Which inputs a compiled graph copies its results to."""
    places = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    found = []
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            for where in plan_of(node.target).written:
                item = node.kwargs.get(where) if isinstance(where, str) else node.args[where]
                if item in places:
                    found.append(places[item])
    return found


def _with_values(
    run: _Region, graph: GraphModule, computing: Computing, unknown: Unknown | None
) -> _Region:
    written = _written_inputs(graph)
    cost = RegionCost(graph)

    @functools.wraps(run)
    def compute(inputs: Sequence[object]) -> Sequence[object]:
        values: Sequence[object] = ()
        changed = [] if unknown is None else [inputs[i] for i in written]
        operations, nbytes = cost(inputs)
        computed = computing.computes(inputs) and computing.allows(operations, nbytes, counted=True)
        if computed:
            with computing.below():
                # Of exact storages: the graph may hold operators that copy all of a storage.
                given = [
                    computing.aliases.exact(item)
                    if isinstance(item, _Tensor) and item.is_cuda
                    else item
                    for item in inputs
                ]
                values = OnCpu(graph, computing, key_of(None, None)).run(*given)
        else:
            computing.allows(operations)
        before = computing.skipping.set(SKIP_DEVICE | SKIP_TO_DEVICE)
        try:
            with computing.compiled_region():
                results = computing.placed(run, inputs)
        finally:
            computing.skipping.set(before)
        if not computed:
            for item in (*changed, *results):
                if isinstance(item, _Tensor) and unknown is not None:
                    unknown(item)
            return results
        with computing.below():
            for target, value in zip(results, values, strict=True):
                if isinstance(target, _Tensor) and isinstance(value, _Tensor) and target.is_cuda:
                    computing.aliases.of(target).copy_(value)
                    computing.written(target)
        return results

    return compute
