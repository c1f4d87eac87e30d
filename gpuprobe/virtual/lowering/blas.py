"""cuBLAS and cuBLASLt: the workspace that the first matrix product of a handle leaves behind."""

from __future__ import annotations

import functools
import os
from typing import Final

import torch

from gpuprobe.catalogue.gpu_model import chosen_workspace, cublas_workspace
from gpuprobe.virtual.dispatch.calls import Call, OperatorRow

_SOURCE: Final = "aten/src/ATen/cuda/CublasHandlePool.cpp: getCurrentCUDABlasHandle"
_KIB: Final = 1024


workspace_bytes = functools.cache(chosen_workspace)


@functools.cache
def lt_workspace_bytes(version: tuple[int, int]) -> int:
    """cuBLASLt's own workspace, taken for one call; 0 where torch shares cuBLAS's (since 2.7).

    ``version``: torch's (major, minor). Source: ``_parseChosenWorkspaceSize`` in
    ``aten/src/ATen/cuda/CUDABlas.cpp`` of 2.6: 1 MiB, or ``CUBLASLT_WORKSPACE_SIZE`` in KiB. (More
    on compute capability 9.0 was tried and taken back: torch's pull requests 120925 and 139300. The
    peaks of `benchmarks/published_peaks.py` on H100 agree.)
    """
    if version >= (2, 7):
        return 0
    chosen = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    if chosen.isdecimal():
        return int(chosen) * _KIB
    return _KIB * _KIB


def _readable(matrix: torch.Tensor) -> bool:
    """Whether cuBLAS can read a matrix, or each of a batch: rows or columns that lie side by side.
    Source: ``prepare_matrix_for_cublas`` and ``prepare_batch_matrix_for_cublas``.
    """
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    if matrix.is_contiguous():
        return matrix.dim() == 2 or (down != 0 and across != 0)
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _product(call: Call) -> None:
    """Factors that cuBLAS cannot read are copied first."""
    matrices = [call.argument(name) for name in ("mat1", "mat2", "batch1", "batch2")]
    if call.func._schema.name in ("aten::mm", "aten::bmm"):
        matrices.append(call.argument("self"))
    for matrix in matrices:
        if matrix is not None and matrix.layout is torch.strided and not _readable(matrix):
            call.scratch(matrix.numel() * matrix.element_size())
    _workspace(call)


def _workspace(call: Call) -> None:
    # Handles belong to threads, and on CUDA the backward pass has a thread of its own.
    backward = torch._C._current_autograd_node() is not None
    model = call.device.model
    size = workspace_bytes(cublas_workspace(model.capability, call.machine.torch))
    call.device.workspace(
        ("cublas", backward, call.stream), size, call.stream, "at::cuda::CUDABlasWorkspace"
    )


def _with_bias(call: Call) -> None:
    """A bias added by the product itself: cuBLASLt."""
    bias = call.argument("self")
    if bias is not None and bias.dim() == 1 and call.result.dim() == 2:
        call.scratch(lt_workspace_bytes(call.machine.torch))
    _product(call)


ROWS: Final = (
    *(
        OperatorRow(
            name,
            "a copy of each factor of which neither rows nor columns lie side by side; a cuBLAS "
            "workspace per thread and stream, allocated after the first result, kept",
            f"aten/src/ATen/native/cuda/Blas.cpp: prepare_matrix_for_cublas; {_SOURCE}",
            after=_product,
        )
        for name in ("mm", "bmm", "baddbmm")
    ),
    *(
        OperatorRow(
            name,
            "a cuBLAS workspace per thread and stream, allocated after the first result, kept",
            _SOURCE,
            after=_workspace,
        )
        for name in (
            "mv",
            "addmv",
            "dot",
            "vdot",
            "addbmm",
            "addr",
            "_scaled_mm",
            "_int_mm",
        )
    ),
    *(
        OperatorRow(
            name,
            "as mm; with a bias cuBLASLt, whose workspace was its own before torch 2.7",
            f"{_SOURCE}; aten/src/ATen/native/cuda/Blas.cpp: addmm_out_cuda_impl",
            after=_with_bias,
        )
        for name in ("addmm", "_addmm_activation")
    ),
)
