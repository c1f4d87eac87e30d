"""How long convolutions take: as the matrix product that cuDNN's implicit GEMM computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gpuprobe.model.run.work import Work, WorkKind
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time import matmul
from gpuprobe.step_time.price import Factors, Price, Priced, PriceSource
from gpuprobe.step_time.speeds import Speeds, element_bytes

_OVER_PRODUCT: Final = 1.25
"""Time over that of the product, on tensor cores: indices and borders."""
_FACTORS: Final = Factors(0.55, 2.2)
_PLAIN: Final = 1.05
_PLAIN_FACTORS: Final = Factors(0.6, 1.8)
_WINOGRAD: Final = 0.7
_WINOGRAD_FACTORS: Final = Factors(0.4, 2.0)
"""Without tensor cores, and of 3 by 3 kernels, for which cuDNN can multiply less (Winograd): fitted
to the convolutions of NeuSight on P100, T4, V100 and A100, about 5,000 each (github.com/sitar-lab/
NeuSight, scripts/asplos/data/dataset/train/collect/conv, MIT)."""
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
    over, factors = _over(work.dtype, kernel)
    seconds = max(priced.price.expected * passes * over, moved) + _around(work, speeds)
    seconds += matmul.START * max(0, kernels - 1)
    if groups > 1 or channels < 16:
        factors = factors.wider(_FEW_CHANNELS)
    expected: Price = factors.price(seconds, _source(priced.price.source))
    line = f"{priced.provenance}; convolutions as matrix products, estimated"
    return Priced(expected, line)


def _around(work: Work, speeds: Speeds) -> float:
    """Seconds of the passes before and after the kernels that multiply.

    In half precision these take and make channels last: other tensors are transposed before and
    after, read and written once each (NVIDIA's "Convolutional Layers User's Guide", Tensor Layouts
    In Memory). A bias is added to the result where it is, and its gradient is a sum of the
    result's: torch calls cuDNN without it (aten/src/ATen/native/Convolution.cpp).
    """
    moved = 0.0
    if work.dtype in _HALF and work.sizes[5] == 1 and not work.variant.startswith("channels last"):
        moved += 2 * (work.read + work.written)
    if work.variant.endswith("bias"):
        batch, _, out_channels, positions, _, _ = work.sizes
        if work.kind is WorkKind.CONVOLUTION:
            moved += 2 * work.written
        else:
            moved += batch * out_channels * positions * element_bytes(work.dtype)
    return moved / (_PASSES * speeds.bandwidth)


_HALF: Final = ("float16", "bfloat16")
_PASSES: Final = 0.8
"""Of the bandwidth: a little less than that of pointwise kernels (`traffic`)."""


def _over(dtype: str, kernel: int) -> tuple[float, Factors]:
    """Time over that of the product, and its range."""
    if dtype not in ("float32", "float64"):
        return _OVER_PRODUCT, _FACTORS
    if kernel == 9 and dtype == "float32":
        return _WINOGRAD, _WINOGRAD_FACTORS
    return _PLAIN, _PLAIN_FACTORS


def _padded(product: Work) -> Work:
    """The product with its sizes rounded up to what tensor cores take: cuDNN pads channels."""
    groups, rows, columns, inner = product.sizes
    sizes = (groups, rows, -(-columns // 8) * 8, -(-inner // 8) * 8)
    return replace(product, sizes=sizes) if groups == 1 else product


def _source(source: PriceSource) -> PriceSource:
    """No convolution was measured."""
    return PriceSource.MODEL if source is PriceSource.MEASURED else source
