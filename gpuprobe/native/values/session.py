"""Computing values around a program: ``with Values(): ...``."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal

import torch

from gpuprobe.errors import UsageError
from gpuprobe.native.process import loaded
from gpuprobe.native.values import assignments, collectives, compiled, graphs
from gpuprobe.native.values.budget import Budget
from gpuprobe.native.values.computing import Computing
from gpuprobe.native.values.reads import ARRAY, Reads, fill
from gpuprobe.native.values.shapes import ComputingShapes
from gpuprobe.native.values.skipping import Skipping
from gpuprobe.patching import Patches
from gpuprobe.torch_support.operator_calls import watch


class Values:
    """Computes the values of tensors on the devices of the native engine while it is entered."""

    def __init__(
        self,
        compute: Literal["real", "shapes"] = "real",
        assume: Iterable[str] = (),
        *,
        unknown_as_nan: bool = False,
        bounded: bool = False,
    ) -> None:
        """``assume`` and ``unknown_as_nan`` apply to ``shapes``: see `Reads`.
        ``bounded``: raise TooLarge beyond what ``--compute auto`` may compute.

        Raises UsageError where the native engine is not loaded, and for wrong assumptions.
        """
        runtime = loaded()
        if runtime is None:
            raise UsageError("values are computed on a simulated GPU, and none is loaded")
        skipping = Skipping(runtime.libraries.core)
        self.reads = Reads(assume, unknown_as_nan=unknown_as_nan)
        self.computing: Any = (
            Computing(skipping) if compute == "real" else ComputingShapes(skipping, self.reads)
        )
        if bounded:
            self.computing.budget = Budget(runtime)
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
            self._follow_arrays(self.computing, self._patches)
        self._patches.add(watch(self.computing.handle))
        return self

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed about values that were read and not computed."""
        return tuple(self.reads.notes)

    def _follow_arrays(self, computing: ComputingShapes, patches: Patches) -> None:
        """NumPy and lists read host memory without an operator."""

        def checked(name: str) -> None:
            before = getattr(torch.Tensor, name)

            @functools.wraps(before)
            def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                if type(tensor) in (
                    torch.Tensor,
                    torch.nn.Parameter,
                ) and not computing.knowledge.known(tensor):
                    tensor = fill(self.reads, tensor, ARRAY)
                return before(tensor, *args, **kwargs)

            patches.set(torch.Tensor, name, read)

        for name in ("numpy", "tolist", "__array__"):
            checked(name)
        assignments.install(
            patches,
            lambda: bool(self.reads.given_nan),
            lambda text: self.reads.notes.update({text: None}),
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        patches, self._patches = self._patches, None
        if patches is not None:
            patches.undo()
