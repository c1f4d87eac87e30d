"""How long matrix products take: a roofline, and how far measured kernels are from it.

The roofline of (m, k) @ (k, n) is the longer of its multiplications at the peak of the data sheet,
with the part that whole waves of tiles waste, and its bytes at the bandwidth, plus the start of a
kernel. `matmul.json` has, for the GPUs whose kernels were measured, the logarithm of measured time
over roofline on a coarse grid of (m, n, k), fitted to public tables (``benchmarks/
step_time_kernels.py``), which are linear layers: the second factor transposed. Between the points
of the grid it is interpolated in the logarithms of the sizes, outside it stays as at the edge.
"""

from __future__ import annotations

import json
import math
from base64 import b85decode
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from gpuprobe.model.run.work import Work
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time.price import Factors, Priced, PriceSource
from gpuprobe.step_time.speeds import Speeds, element_bytes, sheet_dtype

ROWS: Final = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""The grid's m."""
COLUMNS: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
"""The grid's n, and its k."""
CODE_STEP: Final = 0.02
CODE_LEAST: Final = -0.6
"""A byte of the table is ``(logarithm - CODE_LEAST) / CODE_STEP``."""
START: Final = 2e-6
"""Seconds of a kernel with nothing to do: the shortest measured products take 1.7 to 2.5 µs."""
TILE: Final = (128, 256)
"""Rows and columns of the result that a processor computes at once: cuBLAS's largest tile."""
SIZE_CLASSES: Final = (20e-6, 200e-6)
"""Seconds: the residuals of short, medium and long kernels differ."""

_LAYOUT: Final = {"NT": (1.0, 1.0), "NN": (1.0, 1.05), "TN": (1.02, 1.08), "TT": (1.05, 1.3)}
"""By layout: expected factor, and what it may add. SimuMax (github.com/MooreThreads/SimuMax,
configs/system/a100_pcie.json, 61 shapes in three layouts): in the median NN takes as long as the
linear layer's, TN 3% longer when it also adds into float32."""
_PLAIN: Final = {
    "pascal": (0.6, 0.75, 0.92),
    "volta": (0.8, 0.92, 0.97),
    "turing": (0.5, 0.7, 0.9),
    "ampere": (0.76, 0.84, 0.94),
    "ampere-consumer": (0.5, 0.68, 0.9),
    "ampere-professional": (0.45, 0.65, 0.9),
    "ada": (0.45, 0.65, 0.9),
    "ada-consumer": (0.5, 0.68, 0.9),
    "hopper": (0.65, 0.78, 0.92),
    "blackwell": (0.6, 0.75, 0.92),
    "blackwell-consumer": (0.45, 0.65, 0.9),
    "blackwell-professional": (0.45, 0.65, 0.9),
}
"""Share of the peak that products without tensor cores reach: low, expected, high. Pascal, Volta,
A100 and T4: fitted to the linear layers and batched products of NeuSight (github.com/sitar-lab/
NeuSight, scripts/asplos/data/dataset/train, MIT). The others are estimated: where the peak counts
units that also compute integers (GA102 and later), less."""
_PLAIN_TILE: Final = 64
_PLAIN_FILL: Final = 0.2
_PLAIN_DEPTH: Final = 30
"""What small results and few columns cost, fitted to the same."""
_PLAIN_BANDWIDTH: Final = 0.8
_PLAIN_RANGE: Final = Factors(0.8, 1.25)
_PLAIN_SMALL: Final = Factors(0.6, 1.8)
_SAME_CHIP: Final = Factors(0.94, 1.08)
"""Tables of the same GPU and shape from different machines differ by 2 to 4%."""
_GENERIC: Final = Factors(0.82, 1.22)
_LARGE: Final = (8192, 8192, 8192)
"""The product that reaches the share of the peak which `Speeds.sustained` has."""
_TF32: Final = Factors(0.85, 1.25)
_BATCHED: Final = Factors(0.8, 1.4)
_BATCHED_REACH: Final = 0.65
"""Of the bandwidth, where the matrices of a batch are more than the L2 holds: tables of single
products have results that it does. As A100's table at a depth of 64, 0.5 to 0.6; estimated."""
_MISALIGNED: Final = {
    2: (2.0, Factors(0.6, 1.8)),
    4: (1.6, Factors(0.7, 1.9)),
    8: (1.25, Factors(0.85, 1.9)),
}
"""By the bytes that divide all rows, where 16 do not: NVIDIA's "Matrix Multiplication Background
User's Guide" (tensor cores are used less efficiently); github.com/karpathy/nanoGPT pads its
vocabulary for it. 2: the logits of 50,257 tokens in mosaicml-examples' rows of A100 40 GB, where it
is 1.3 to 2.5; the others are estimated."""

_OLD_KERNELS: Final = {"hopper": 0.63, "blackwell": 0.63}
"""Share of the peak that the instructions of older tensor cores reach (arXiv 2402.13499, section
IV-C, on H100): the newer ones are fed in units of 16 aligned bytes (TMA), so that such products run
on kernels of A100."""


@dataclass(frozen=True, slots=True)
class Roof:
    """What a roofline is computed from. ``wave``: the share of the last wave's idle processors that
    costs time, 0 to 1, as fitted.
    """

    peak: float
    bandwidth: float
    processors: int
    wave: float


@dataclass(frozen=True, slots=True)
class MatmulTable:
    """Measured over roofline. ``ranges``: for each class of `SIZE_CLASSES` the factors that 8 of 10
    measured kernels are within, of shapes that the table was not fitted to.
    """

    codes: bytes
    wave: float
    ranges: tuple[Factors, ...]
    provenance: str


def roofline(roof: Roof, m: int, n: int, k: int, size: int, out: int, batch: int = 1) -> float:
    """Seconds. ``size`` and ``out``: bytes of an element of the factors and of the result."""
    flops = 2 * batch * m * n * k
    tiles = batch * math.ceil(m / TILE[0]) * math.ceil(n / TILE[1])
    waves = math.ceil(tiles / roof.processors) * roof.processors * TILE[0] * TILE[1]
    idle = waves / (batch * m * n) - 1
    moved = batch * (size * (m * k + k * n) + out * m * n)
    return max(flops / roof.peak * (1 + roof.wave * idle), moved / roof.bandwidth) + START


def corners(m: int, n: int, k: int) -> list[tuple[int, float]]:
    """The points of the grid around a shape, and the share of each."""
    weighted = [(0, 1.0)]
    for grid, size in ((ROWS, m), (COLUMNS, n), (COLUMNS, k)):
        place, share = _place(grid, size)
        weighted = [
            (index * len(grid) + place + step, weight * part)
            for index, weight in weighted
            for step, part in ((0, 1 - share), (1, share))
        ]
    return weighted


def _place(grid: Sequence[int], size: int) -> tuple[int, float]:
    size = min(max(size, grid[0]), grid[-1])
    place = min(bisect_right(grid, size), len(grid) - 1) - 1
    return place, math.log(size / grid[place]) / math.log(grid[place + 1] / grid[place])


@lru_cache(maxsize=1)
def tables() -> Mapping[tuple[str, str], MatmulTable]:
    """By GPU and dtype."""
    text = Path(__file__).with_name("matmul.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return {
        (entry["gpu"], entry["dtype"]): MatmulTable(
            b85decode(entry["codes"]),
            entry["wave"],
            tuple(Factors(low, high) for low, high in entry["ranges"]),
            entry["source"],
        )
        for entry in document["tables"]
    }


def excess(table: MatmulTable, m: int, n: int, k: int) -> float:
    """Measured time over roofline at a shape."""
    logarithm = sum(
        weight * (CODE_LEAST + CODE_STEP * table.codes[index])
        for index, weight in corners(m, n, k)
        if weight
    )
    return math.exp(logarithm)


def price(work: Work, speeds: Speeds, kernels: int) -> Priced | Unavailable:
    """What a product of matrices takes, or why there is no price for it."""
    if len(work.sizes) != 4 or 0 in work.sizes:
        return Unavailable(f"{work.operator}: the sizes of the product are unknown")
    batch, m, n, k = work.sizes
    name = sheet_dtype(work.dtype)
    if name == "tf32" and name not in speeds.peak:
        name = "float32"  # what torch computes in where the GPU has no TF32
    peak = speeds.rate(name)
    if isinstance(peak, Unavailable):
        return peak
    layout, added = _LAYOUT.get(work.variant, (1.05, 1.3))
    tensor_cores = name not in ("float32", "float64") and speeds.architecture != "pascal"
    priced = (
        _on_tensor_cores(speeds, peak, name, batch, m, n, k)
        if tensor_cores
        else _plain(speeds, peak, name, batch, m, n, k)
    )
    seconds, factors, source, provenance = priced
    seconds = seconds * layout + START * max(0, kernels - 1)
    factors = factors.wider(Factors(1.0, added))
    aligned = _aligned(work.variant, m, n, k, element_bytes(name))
    if tensor_cores and aligned in _MISALIGNED:
        slower, added_range = _MISALIGNED[aligned]
        seconds *= slower / _OLD_KERNELS.get(speeds.architecture, 1.0)
        factors = factors.wider(added_range)
    return Priced(factors.price(seconds, source), provenance)


_Result = tuple[float, Factors, PriceSource, str]


def _on_tensor_cores(
    speeds: Speeds, peak: float, name: str, batch: int, m: int, n: int, k: int
) -> _Result:
    own = tables().get((speeds.table, name))
    table = own or tables()[speeds.table, "bfloat16"]
    size = element_bytes(name)
    low, high = speeds.sustained
    if not speeds.chip:  # of the table only how the speed depends on the sizes
        reached = excess(table, *_LARGE)
        low, high = low * reached, high * reached
    kept = (low + high) / 2
    roof = Roof(peak * kept, speeds.bandwidth, speeds.processors, table.wave)
    seconds = roofline(roof, m, n, k, size, max(size, 2), batch) * excess(table, m * batch, n, k)
    # Some boards run at higher clocks than the data sheet's, as steps of training show.
    most = peak if speeds.chip and not speeds.steps else peak * max(1.0, speeds.sustained[1])
    seconds = max(seconds, 2 * batch * m * n * k / most + START)
    moved = batch * (size * (m * k + k * n) + max(size, 2) * m * n)
    if batch > 1 and moved > 2 * speeds.l2:
        seconds = max(seconds, moved / (_BATCHED_REACH * speeds.bandwidth) + START)
    factors = table.ranges[bisect_right(SIZE_CLASSES, seconds)]
    factors = factors.wider(Factors(kept / high, kept / low))
    if batch > 1:
        factors = factors.wider(_BATCHED)
    measured = own is not None or name == "float16"  # as fast as bfloat16
    if not measured:
        factors = factors.wider(_TF32)
    load = f"; share kept under load: {speeds.steps}" if speeds.steps else ""
    if speeds.own and measured and batch == 1:
        return seconds, factors, PriceSource.MEASURED, table.provenance + load
    if speeds.chip:
        if not speeds.own:
            factors = factors.wider(_SAME_CHIP)
        line = f"{table.provenance}; scaled by peak and bandwidth: {speeds.source}{load}"
        return seconds, factors, PriceSource.MODEL, line
    line = f"{speeds.source}; by size as in: {table.provenance}{load}"
    if speeds.steps:
        return seconds, factors.wider(_SAME_CHIP), PriceSource.MODEL, line
    return seconds, factors.wider(_GENERIC), PriceSource.GENERIC, line


def _plain(speeds: Speeds, peak: float, name: str, batch: int, m: int, n: int, k: int) -> _Result:
    low, expected, high = speeds.plain or _PLAIN[speeds.architecture]
    size = element_bytes(name)
    tiles = batch * math.ceil(m / _PLAIN_TILE) * math.ceil(n / _PLAIN_TILE)
    computed = 2 * tiles * _PLAIN_TILE**2 * k / (peak * expected)
    computed *= (1 + _PLAIN_FILL * speeds.processors / tiles) * (1 + _PLAIN_DEPTH / k)
    moved = batch * size * (m * k + k * n + m * n) / (_PLAIN_BANDWIDTH * speeds.bandwidth)
    seconds = max(computed, moved) + START
    factors = _PLAIN_RANGE if seconds >= SIZE_CLASSES[1] else _PLAIN_SMALL
    factors = factors.wider(Factors(expected / high, expected / low))
    line = f"{speeds.source}; share of its peak: NeuSight's kernels, estimated by architecture"
    return seconds, factors, PriceSource.GENERIC, line


def _aligned(variant: str, m: int, n: int, k: int, size: int) -> int:
    """The largest power of two, at most 16, that divides the bytes of the rows of both factors and
    of the result.
    """
    first = m if variant[:1] == "T" else k
    second = k if variant[1:] == "T" else n
    return math.gcd(16, *(row * size for row in (first, second, n) if row > 1))
