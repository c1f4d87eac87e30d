"""The lowering table: what CUDA does where the same line of Python takes another path on a CPU.

``rows`` are operators below autograd (scratch memory, workspaces, results in an argument's
memory); ``functions`` are composite functions that CUDA runs as one kernel. An operator without a
row allocates its results and nothing else, as most CUDA kernels do.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuprobe.virtual.dispatch.calls import OperatorRow
from gpuprobe.virtual.lowering import (
    accumulate,
    attention,
    blas,
    convolutions,
    gather,
    pointwise,
    reduce,
    sorting,
)

__all__ = ["rows", "table"]


def table() -> tuple[OperatorRow, ...]:
    """Every row, in the order of the documentation."""
    return (
        *blas.ROWS,
        *accumulate.ROWS,
        *attention.ROWS,
        *convolutions.ROWS,
        *gather.ROWS,
        *pointwise.ROWS,
        *reduce.ROWS,
        *sorting.ROWS,
    )


def rows() -> Mapping[str, OperatorRow]:
    """The rows by operator, ``name`` or ``name.overload``."""
    return {row.op: row for row in table()}
