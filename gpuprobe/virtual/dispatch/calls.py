"""The lowering table's language: one operator call as CUDA would run it.

The dispatch mode sees every operator below autograd. By itself it charges each new storage to
the allocator, which is what most CUDA kernels do. An `OperatorRow` says what else one operator
does: scratch memory, a result that reuses an input's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gpuprobe.allocator.blocks import PoolBlock
from gpuprobe.virtual.device.virtual_device import VirtualDevice
from gpuprobe.virtual.machine import Machine


@dataclass(slots=True)
class Call:
    """One call of ``func`` on a device. ``result`` is None before it ran."""

    machine: Machine
    device: VirtualDevice
    stream: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None
    _held: list[PoolBlock] = field(default_factory=list)

    def for_result(self, nbytes: int) -> None:
        """Memory of a result, which CUDA allocates before the operator's remaining memory: the next
        result of ``nbytes`` takes it.
        """
        if nbytes > 0:
            block = self.device.malloc(nbytes, self.stream)
            self.machine.local.for_results.append((self.device, nbytes, self.stream, block))

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the operator's schema."""
        if name in self.kwargs:
            return self.kwargs[name]
        for at, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if at < len(self.args):
                    return self.args[at]
                return argument.default_value if argument.has_default_value() else default
        return default

    def scratch(self, nbytes: int) -> None:
        """Memory that the kernel allocates, and gives back when the operator returns."""
        if nbytes > 0:
            self._held.append(self.device.malloc(nbytes, self.stream))

    def contiguous(self, *names: str) -> None:
        """Copies of those arguments that are not contiguous, for a kernel that reads no others
        (``contiguous``, ``expect_contiguous``).
        """
        for name in names:
            given = self.argument(name)
            dense = isinstance(given, torch.Tensor) and given.layout is torch.strided
            if dense and not given.is_contiguous():
                self.scratch(given.numel() * given.element_size())

    def passing(self, nbytes: int) -> None:
        """Memory allocated and freed at once, before whatever comes next."""
        if nbytes > 0:
            self.device.free(self.device.malloc(nbytes, self.stream))

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        """Memory that CUDA allocates, and gives back before the operator returns."""
        block = self.device.malloc(nbytes, self.stream) if nbytes > 0 else None
        try:
            yield
        finally:
            if block is not None:
                self.device.free(block)

    def release(self) -> None:
        """End of the operator: what C++ holds in local variables goes in reverse order, and memory
        of results that the operator did not return.
        """
        for block in reversed(self._held):
            self.device.free(block)
        self._held.clear()
        unused = self.machine.local.for_results
        while unused:
            self.device.free(unused.pop()[3])


class OperatorRow(NamedTuple):
    """One operator (all overloads of one name, or one overload) of the lowering table.

    ``path`` says in words what CUDA does, ``source`` where that was read (file and function in
    torch, or the measurement). ``before`` runs when the inputs are there and no result is yet,
    ``after`` when the results have their memory; scratch memory of both is freed after that.
    ``reuse`` names the argument in whose memory the first result lies, where CUDA would work in
    place; None for a result of its own.
    """

    op: str
    path: str
    source: str
    after: Callable[[Call], None] | None = None
    before: Callable[[Call], None] | None = None
    reuse: Callable[[Call], Any] | None = None
