"""What computing a compiled region costs, from its graph, before any of it is computed."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from gpuprobe.native.values.arguments import Args
from gpuprobe.native.values.budget import operations_of

_Tensor: Final = torch.Tensor


class RegionCost:
    """Floating-point operations, and the peak of the bytes that the host has for them, without the
    inputs. The compiler's tensors of the graph have the shapes, with symbols for sizes that
    differ from call to call.
    """

    def __init__(self, graph: GraphModule) -> None:
        self._nodes = list(graph.graph.nodes)
        self._inputs = [node.meta.get("val") for node in self._nodes if node.op == "placeholder"]
        self._last: dict[int, Node] = {}
        """The node that uses a storage last."""
        for node in self._nodes:
            for argument in node.all_input_nodes:
                self._last.update(dict.fromkeys(_storages(argument), node))
        self._known: dict[tuple[tuple[str, int], ...], tuple[float, int]] = {}

    def __call__(self, inputs: Args) -> tuple[float, int]:
        sizes = self._sizes(inputs)
        key = tuple((str(symbol), size) for symbol, size in sizes.items())
        if key not in self._known:
            self._known[key] = self._count(_Shapes(sizes))
        return self._known[key]

    def _sizes(self, inputs: Args) -> dict[Any, int]:
        """The values of the symbols in this call."""
        sizes: dict[Any, int] = {}
        for value, given in zip(self._inputs, inputs, strict=False):
            pairs = [(value, given)]
            if isinstance(value, _Tensor) and isinstance(given, _Tensor):
                pairs = list(zip(value.shape, given.shape, strict=True))
            for size, actual in pairs:
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    sizes[size.node.expr] = int(actual)
        return sizes

    def _count(self, shapes: _Shapes) -> tuple[float, int]:
        operations, most, alive = 0.0, 0, 0
        given = {
            storage
            for node in self._nodes
            if node.op == "placeholder"
            for storage in _storages(node)
        }
        held: dict[int, int] = {}
        for node in self._nodes:
            if node.op == "call_function":
                for storage, tensor in _storages(node).items():
                    if storage not in held and storage not in given:
                        held[storage] = shapes.nbytes(tensor)
                        alive += held[storage]
                operations += _operations(node, shapes)
            most = max(most, alive)
            for storage in [item for item in held if self._last.get(item) is node]:
                alive -= held.pop(storage)
        return operations, most


def _operations(node: Node, shapes: _Shapes) -> float:
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    args, kwargs = (
        tree_map(shapes.concrete, torch.fx.map_arg(part, lambda item: item.meta.get("val")))
        for part in (node.args, node.kwargs)
    )
    result = tree_map(shapes.concrete, node.meta.get("val"))
    results = result if isinstance(result, (tuple, list)) else (result,)
    return operations_of(node.target, args, kwargs, results)


class _Shapes:
    """Sizes of one call in place of the symbols."""

    def __init__(self, sizes: dict[Any, int]) -> None:
        self._sizes = sizes

    def number(self, size: int | torch.SymInt) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        made = size.node.expr.xreplace(self._sizes)
        if getattr(made, "free_symbols", None):  # depends on values
            return int(size.node.hint or 1)
        return int(made)

    def nbytes(self, tensor: Tensor) -> int:
        count = tensor.element_size()
        for size in tensor.shape:
            count *= self.number(size)
        return int(count)

    def concrete(self, value: object) -> object:
        if isinstance(value, _Tensor):
            shape = [self.number(size) for size in value.shape]
            return torch.empty(shape, dtype=value.dtype, device="meta")
        return self.number(value) if isinstance(value, torch.SymInt) else value


def _storages(node: Node) -> dict[int, Tensor]:
    """The tensors of a node by the storages that they are in."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return {
        item.untyped_storage()._cdata: item
        for item in values
        if isinstance(item, _Tensor) and item.layout is torch.strided
    }
