"""What a step gives a GPU to do: each operator with its sizes, and the order of launches.

The recorder writes it, `gpuprobe.step_time` puts a price on it and plays it in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final

from gpuprobe.model.values import AtMost, Count, Size, Unavailable

MOST_WORK: Final = 1_000_000
"""Entries that a recording has of one step. A step of a 70B model has some hundred thousand."""

NOT_FOLLOWED: Final = Unavailable("not followed")


class WorkKind(Enum):
    """What an operator computes, as far as the time of its kernels depends on it."""

    MATMUL = "matrix product"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention, backward"
    CONVOLUTION = "convolution"
    CONVOLUTION_BACKWARD = "convolution, backward"
    ELEMENTS = "elementwise"
    """Pointwise operators, reductions, normalisations, optimizers: bound by bytes."""
    INDEXED = "indexed"
    """Gathers, scatters, embeddings, sorts: bound by bytes that are not in order."""
    COMPILED = "compiled"
    """A kernel of Triton: of Inductor, or of the program."""
    COPY = "copy"
    COLLECTIVE = "collective"
    OTHER = "other"
    """Calls of libraries and kernels whose work is unknown: there is no price for it."""


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of operator call.

    ``sizes`` is, by kind:

    * matrix product: batch, m, n, k of ``batch`` products (m, k) @ (k, n)
    * attention: batch, query heads, key heads, queries, keys, size of a query's head, of a value's
    * convolution: batch, input channels, output channels, output positions, kernel positions,
      groups
    * collective: ranks, nodes
    * anything else: empty

    ``variant``: of a matrix product the layouts of both factors, "N" if the last dimension is
    contiguous, else "T", as "NT"; of attention the implementation ("flash", "efficient", "cudnn",
    "math"), followed by " causal" where it is; of a copy "h2d", "d2h", "d2d", "peer" and
    "pageable h2d", "pageable d2h"; of a collective NCCL's name of it ("AllReduce").

    ``dtype`` is the type that is multiplied or moved, as torch names it ("bfloat16"); "tf32" for
    float32 that is multiplied in TF32. ``flops``: multiplications and additions, two for each pair;
    0 where bytes decide. ``read`` and ``written``: bytes, each once; of a collective ``read`` is
    its message.
    """

    operator: str
    kind: WorkKind
    dtype: str = ""
    sizes: Annotated[tuple[Count, ...], AtMost(8)] = ()
    variant: str = ""
    flops: Count = 0
    read: Size = 0
    written: Size = 0
