"""How long convolutions take: as the matrix product that cuDNN's implicit GEMM computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gpuprobe.model.run.work import Work, WorkKind
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time import matmul
from gpuprobe.step_time.price import Factors, Price, Priced, PriceSource
from gpuprobe.step_time.speeds import Speeds

_OVER_PRODUCT: Final = 1.25
"""Time over that of the product: indices, borders, and the layout's conversion (NCHW)."""
_FACTORS: Final = Factors(0.55, 2.2)
_FEW_CHANNELS: Final = Factors(0.5, 3.0)
"""Groups, and few channels: cuDNN has kernels of several kinds."""
_REACH: Final = 0.6


def price(work: Work, speeds: Speeds, kernels: int) -> Priced | Unavailable:
    """What a convolution or its backward pass takes, or why there is no price for it."""
    if len(work.sizes) != 6 or 0 in work.sizes:
        return Unavailable(f"{work.operator}: the sizes of the convolution are unknown")
    batch, channels, out_channels, positions, kernel, groups = work.sizes
    product = replace(
        work,
        kind=WorkKind.MATMUL,
        sizes=(
            groups,
            batch * positions,
            max(1, out_channels // groups),
            max(1, channels // groups * kernel),
        ),
        variant="NT",
    )
    rows, columns, inner = product.sizes[1:]
    one = 2 * groups * rows * columns * inner
    passes = max(1.0, work.flops / one) if one else 1.0
    priced = matmul.price(_padded(product), speeds, 1)
    if isinstance(priced, Unavailable):
        return priced
    moved = (work.read + work.written) / (_REACH * speeds.bandwidth)
    seconds = max(priced.price.expected * passes * _OVER_PRODUCT, moved)
    seconds += matmul.START * max(0, kernels - 1)
    factors = _FACTORS if groups == 1 and channels >= 16 else _FEW_CHANNELS
    expected: Price = factors.price(seconds, _source(priced.price.source))
    line = f"{priced.provenance}; convolutions as matrix products, estimated"
    return Priced(expected, line)


def _padded(product: Work) -> Work:
    """The product with its sizes rounded up to what tensor cores take: cuDNN pads channels."""
    groups, rows, columns, inner = product.sizes
    sizes = (groups, rows, -(-columns // 8) * 8, -(-inner // 8) * 8)
    return replace(product, sizes=sizes) if groups == 1 else product


def _source(source: PriceSource) -> PriceSource:
    """No convolution was measured."""
    return PriceSource.MODEL if source is PriceSource.MEASURED else source
