"""Tensors that torch.compile keeps of the calls it compiles, until Python's next full collection.

Published peaks of 2024 and early 2025 are higher by what older versions of torch left in reference
cycles. This program lists those tensors, with the torch that runs it; it needs no GPU and
nothing of gpuprobe's:

    python benchmarks/compile_leftovers.py

Up to torch 2.4 a compiled module is part of the graph (``inline_inbuilt_nn_modules``), up to 2.5 a
function within the compiled one knows the translator that met it (``closure_scope`` of
``NestedUserFunctionVariable`` in ``torch/_dynamo/variables/functions.py``), and with it the
arguments. Neither leaves anything since 2.6.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import nn


def of_a_module() -> None:
    module = nn.Embedding(64, 32)
    compiled = torch.compile(module, backend="aot_eager")
    compiled(torch.zeros(4, 16, dtype=torch.long)).sum().backward()


def of_a_function() -> None:
    """As the chunked losses of liger-kernel: gradients are taken within the compiled function."""
    weight = nn.Parameter(torch.randn(64, 32))

    def loss(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (given @ weight.t()).logsumexp(-1).sum()

    def chunk(given: torch.Tensor) -> torch.Tensor:
        return torch.func.grad_and_value(loss, argnums=(0, 1))(given, weight)

    with torch.no_grad():
        torch.compile(chunk, backend="aot_eager")(torch.randn(4, 32))


def kept(program: Callable[[], None]) -> list[str]:
    """The shapes of tensors that are left when a program has returned."""
    gc.collect()
    gc.disable()
    try:
        before = {id(found) for found in _tensors()}
        program()
        return sorted(str(tuple(found.shape)) for found in _tensors() if id(found) not in before)
    finally:
        gc.enable()


def _tensors() -> list[torch.Tensor]:
    plain = (torch.Tensor, nn.Parameter)
    return [found for found in gc.get_objects() if type(found) in plain and _has_memory(found)]


def _has_memory(tensor: torch.Tensor) -> bool:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if wrapped or torch._is_functional_tensor(tensor):
        return False
    return tensor.device.type == "cpu" and tensor.numel() > 0


def main() -> None:
    print(f"torch {torch.__version__}")
    for name, program in (("a module", of_a_module), ("a function", of_a_function)):
        program()  # what the first compilation of a process leaves in torch itself
        torch._dynamo.reset()
        found = kept(program)
        print(f"{name}: {', '.join(found) if found else 'nothing'}")


if __name__ == "__main__":
    main()
