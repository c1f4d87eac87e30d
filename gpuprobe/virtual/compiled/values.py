"""The values of a compiled graph: what it was made from, run on the host operator by operator."""

from __future__ import annotations

import copy
from typing import Any

import torch

from gpuprobe.virtual.compiled import kernels
from gpuprobe.virtual.lowering.functions import uncharged
from gpuprobe.virtual.machine import Machine

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
        device = node.kwargs.get("device")
        if isinstance(device, torch.device) and device.type == "cuda":
            self.place = device.index or 0
            node.kwargs = {**node.kwargs, "device": _CPU}
        node.args = torch.fx.node.map_aggregate(
            node.args,
            lambda item: _CPU if isinstance(item, torch.device) and item.type == "cuda" else item,
        )
        if node.op == "call_function":
            node.target = kernels.ON_HOST.get(node.target, node.target)

    def run(self, given: list[Any], place: int) -> Any:
        """The results, of arguments that stay as they are but for what the graph writes to."""
        machine = self._machine
        with uncharged(machine), machine.generators.draw(place, ()), torch.no_grad():
            return torch.fx.Interpreter(self._module).run(*given)
