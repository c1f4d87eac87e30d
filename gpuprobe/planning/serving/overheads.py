"""Memory of a vLLM process outside of torch's allocator, which no simulation can find out.

The figures are those of vLLM 0.19.0 on one H100 80GB, from public start-up logs. Of other GPUs the
catalogue has the context, which is divided in the same proportion.

Source: llm-d-incubation/llm-d-planner, pull request 205, `accuracy/results/v0.19.0/logs`: 43 starts
on one GPU, split by model. The median of one half (29 starts) is used: 0.51 GiB at the start and
0.25 GiB more after the profiling run. In the other half (14 starts) the sum is off by 0.02 GiB on
average. `tests/recorded/vllm/public_logs.json` has the figures and the rule of the split, and
`tests/serving/test_serving_constants.py` repeats this.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gpuprobe.catalogue.gpu_model import GpuModel

_GIB: Final = 1 << 30
_START: Final = 0.51 * _GIB
"""Bytes in use when vLLM takes its first snapshot: of the CUDA context."""
_FIRST_USE: Final = 0.25 * _GIB
"""Bytes more after its profiling run: the code of kernels, handles of libraries."""
_BELOW: Final = 0.02 * _GIB
_ABOVE: Final = 0.22 * _GIB
"""The least and the most of the public logs lie so far from the sum of both."""
_REFERENCE: Final = "NVIDIA H100 80GB HBM3"


class Overheads(NamedTuple):
    """Bytes of one process on one GPU: at the start, more after the profiling run, and the range
    of both together.
    """

    start: int
    first_use: int
    low: int
    high: int


def overheads(gpu: GpuModel) -> Overheads:
    """Those of a GPU of the catalogue. One that the catalogue has no context of is taken for an
    H100.
    """
    total = _START + _FIRST_USE
    low, high = total - _BELOW, total + _ABOVE
    if gpu.title != _REFERENCE and gpu.context_high:
        middle = (gpu.context_low + gpu.context_high) / 2
        low, high = min(gpu.context_low, middle - _BELOW), max(gpu.context_high, middle + _ABOVE)
        total = middle
    start = int(total * _START / (_START + _FIRST_USE))
    return Overheads(start, int(total) - start, int(low), int(high))
