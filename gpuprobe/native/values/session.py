"""Computing values around a program: ``with Values(): ...``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor

from gpuprobe.errors import UsageError
from gpuprobe.native.process import loaded
from gpuprobe.native.values import collectives, compiled, graphs, shared
from gpuprobe.native.values.budget import Budget, Cost
from gpuprobe.native.values.computing import Computing
from gpuprobe.native.values.reads import Reads
from gpuprobe.native.values.shapes import ComputingShapes
from gpuprobe.native.values.skipping import Skipping
from gpuprobe.native.values.unknown import follow_logging, follow_math
from gpuprobe.patching import Patches
from gpuprobe.torch_support.memory_history import history
from gpuprobe.torch_support.operator_calls import watch

COMPUTE: Final = ("auto", "real", "shapes")


class Values:
    """Computes the values of tensors on simulated GPUs while it is entered."""

    def __init__(
        self,
        compute: str = "real",
        assume: Iterable[str] = (),
        *,
        reported: bool = False,
        budget: Budget | None = None,
    ) -> None:
        """``assume`` and ``reported`` apply to ``auto`` and ``shapes``: see `Reads`.
        ``budget``: what ``real`` may spend.

        Raises UsageError where the simulated GPU is not loaded, for an unknown ``compute``, and for
        wrong assumptions.
        """
        if compute not in COMPUTE:
            raise UsageError(f"unknown compute {compute!r}", hint=f"one of: {', '.join(COMPUTE)}")
        runtime = loaded()
        if runtime is None:
            raise UsageError("values are computed on a simulated GPU, and none is loaded")
        skipping = Skipping(runtime.libraries.core)
        self.reads = Reads(assume, reported=reported)
        self.cost = Cost(runtime) if budget is None else budget.cost
        """What computing all values costs so far."""
        self.computing: Any = (
            Computing(skipping, runtime.collectives)
            if compute == "real"
            else ComputingShapes(
                skipping, runtime.collectives, self.reads, self.cost, auto=compute == "auto"
            )
        )
        self.computing.budget = budget
        self._patches: Patches | None = None

    def __enter__(self) -> Values:
        if self._patches is not None:
            raise UsageError("Values is entered already")
        self._patches = Patches()
        graphs.follow(self.computing, self._patches)
        shapes = isinstance(self.computing, ComputingShapes)
        unknown = self.computing.knowledge.forget if shapes else None
        collectives.follow(self.computing, self._patches, unknown)
        compiled.follow(self.computing, self._patches, unknown)
        if isinstance(self.computing, ComputingShapes):
            follow_math(self._patches)
            follow_logging(self._patches)
            _follow_reads(self.computing, self.reads, self._patches)
            knowledge = self.computing.knowledge
            shared.follow(knowledge.shared, knowledge.share, self._patches)
        self._patches.add(watch(self.computing.handle, innermost=True))
        self._patches.add(history.install())
        return self

    @property
    def everything(self) -> bool:
        """Whether all values have been computed so far."""
        return bool(getattr(self.computing, "everything", True))

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed about values that were read and not computed."""
        ended = getattr(self.computing, "ended", "")
        return (*((ended,) if ended else ()), *self.reads.notes)

    def __exit__(self, *_: object) -> None:
        patches, self._patches = self._patches, None
        if patches is not None:
            patches.undo()


def _follow_reads(computing: ComputingShapes, reads: Reads, patches: Patches) -> None:
    """Replace the methods by which Python code reads elements of a tensor: an operator returns
    plain numbers, these can return unknown ones.
    """
    knowledge = computing.knowledge
    plain = (torch.Tensor, torch.nn.Parameter)

    def follow(name: str, unknown: Callable[[Any], Any]) -> None:
        before = getattr(torch.Tensor, name)

        @functools.wraps(before)
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if (
                computing.capture is None  # CUDA refuses a read there
                and type(tensor) in plain
                and _single(name, tensor)
                and not knowledge.known(tensor)
            ):
                if tensor.is_cuda and name not in _OF_THE_CPU:
                    computing.wait_for(tensor)
                return unknown(tensor)
            return before(tensor, *args, **kwargs)

        patches.set(torch.Tensor, name, read)

    def item(tensor: Tensor) -> Any:
        return reads.item(tensor, knowledge.most(tensor))

    def number(tensor: Tensor) -> Any:
        return float(reads.scalar(tensor, knowledge.most(tensor)))

    def whole(tensor: Tensor) -> int:
        return int(item(tensor))

    def truth(tensor: Tensor) -> bool:
        return reads.decide("true or false")

    numpy = torch.Tensor.numpy  # the replaced one would find the placeholder, which is unknown

    def array(tensor: Tensor) -> Any:
        return numpy(reads.filled(tensor, knowledge.most(tensor)))

    follow("item", item)
    follow("__float__", number)
    follow("__int__", whole)
    follow("__index__", whole)
    follow("__bool__", truth)
    follow("tolist", lambda tensor: reads.listed(tensor, knowledge.most(tensor)))
    follow("numpy", array)
    follow("__array__", array)
    follow("__repr__", _shown)


_OF_THE_CPU = frozenset(("numpy", "__array__"))
"""What raises an error for a tensor of a GPU."""


def _single(name: str, tensor: Tensor) -> bool:
    """Whether a method reads this tensor: those that read one element fail for others."""
    return name in ("tolist", "numpy", "__array__", "__repr__") or tensor.numel() == 1


def _shown(tensor: Tensor) -> str:
    """The text of an unknown tensor."""
    parts = [f"device='{tensor.device}'"] if tensor.is_cuda else []
    parts += [f"size={tuple(tensor.shape)}", f"dtype={tensor.dtype}"]
    return f"tensor(not computed, {', '.join(parts)})"
