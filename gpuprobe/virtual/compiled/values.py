"""What a compiled graph was made from, run operator by operator: for values, or in its place."""

from __future__ import annotations

import copy
from typing import Any

import torch

from gpuprobe.virtual.compiled import kernels
from gpuprobe.virtual.lowering.functions import uncharged
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.torch_patches.intercept import placed_on

_CPU = torch.device("cpu")


class Values:
    """The graph as AOTAutograd gave it to Inductor, for the host."""

    def __init__(self, machine: Machine, module: Any) -> None:
        self._machine = machine
        self.place = -1
        self._random = False
        graph = copy.deepcopy(module.graph)
        for node in graph.nodes:
            self._for_the_host(node)
        self._module = torch.fx.GraphModule(module, graph)

    def _for_the_host(self, node: Any) -> None:
        def on_host(item: Any) -> Any:
            if not isinstance(item, torch.device) or item.type != "cuda":
                return item
            self.place = item.index or 0
            return _CPU

        node.args, node.kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), on_host)
        if node.op == "call_function":
            node.target = kernels.ON_HOST.get(node.target, node.target)

    def run(self, given: list[Any], place: int) -> Any:
        """The results, of arguments that stay as they are but for what the graph writes to."""
        machine = self._machine
        with uncharged(machine), machine.generators.draw(place, ()), torch.no_grad():
            return self.compute(*given)

    def compute(self, *given: Any) -> Any:
        """As `run`, where the caller has seen to generators and to what is charged."""
        return torch.fx.Interpreter(self._module).run(*given)

    def written(self, given: list[Any]) -> list[Any]:
        """The arguments that the graph writes to. What an operator without a schema, such as a
        Triton kernel's, is given counts as written.
        """
        nodes = [node for node in self._module.graph.nodes if node.op == "placeholder"]
        value_of = dict(zip(nodes, given, strict=True))
        found: dict[Any, None] = {}
        for node in self._module.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if node.op != "call_function" or (schema is None and not _of_higher_order(node)):
                continue
            if schema is None:
                found.update(dict.fromkeys(node.all_input_nodes))
            elif schema.is_mutable:
                for at, argument in enumerate(schema.arguments):
                    if argument.alias_info is not None and argument.alias_info.is_write:
                        item = node.args[at] if at < len(node.args) else None
                        item = node.kwargs.get(argument.name, item)
                        torch.fx.node.map_arg(item, lambda one: found.setdefault(one))
        return [value_of[node] for node in nodes if node in found]


def _of_higher_order(node: Any) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)


class Eagerly(torch.fx.Interpreter):
    """A graph that could not be compiled. Its operators are charged like any others."""

    def __init__(self, machine: Machine, module: Any) -> None:
        super().__init__(module)
        self._machine = machine

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """One operator. ATen's find their way to the device by themselves; those of ``prims``, such
        as ``iota`` for an ``arange``, have no kernel for it.
        """
        if getattr(target, "namespace", "") != "prims":
            return super().call_function(target, args, kwargs)
        if target is torch.ops.prims.inductor_lookup_seed.default:
            seeds, index = args  # in early versions (2.6) a view, which an operator may not return
            return seeds[index].clone()
        host = torch.device("meta") if self._machine.shapes else _CPU
        named: list[Any] = []

        def moved(item: Any) -> Any:
            if isinstance(item, torch.device) and item.type == "cuda":
                named.append(item.index or 0)
                return host
            return item

        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), moved)
        if not named:
            return super().call_function(target, args, kwargs)
        with placed_on(self._machine, named[0]):
            return super().call_function(target, args, kwargs)
