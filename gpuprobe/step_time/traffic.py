"""How long calls take whose time is their bytes: elementwise, indexed, compiled kernels, copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpuprobe.model.run.work import Work, WorkKind
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time.price import Factors, Priced, PriceSource
from gpuprobe.step_time.speeds import Speeds

KERNEL: Final = 2.0e-6
"""Seconds of a kernel with little to do, and until the next one starts."""
_KERNEL_RANGE: Final = Factors(0.6, 1.5)

_CACHED: Final = 1.6
"""How much faster bytes move that the L2 holds: what the previous kernel wrote."""


@dataclass(frozen=True, slots=True)
class _Reach:
    """The share of the data sheet's bandwidth that is reached, and the range of the time."""

    share: float
    factors: Factors


_REACH: Final = {
    WorkKind.ELEMENTS: _Reach(0.85, Factors(0.92, 1.25)),
    WorkKind.INDEXED: _Reach(0.5, Factors(0.55, 2.0)),
    WorkKind.COMPILED: _Reach(0.8, Factors(0.85, 1.4)),
}
_SCATTERED: Final = "scattered"
_FAMILIES: Final = (
    ("pointwise", _Reach(0.85, Factors(0.92, 1.12))),
    (_SCATTERED, _Reach(0.85, Factors(0.85, 1.35))),
    ("softmax", _Reach(0.62, Factors(0.7, 1.4))),
    ("norm_backward", _Reach(0.38, Factors(0.7, 1.6))),
    ("layer_norm", _Reach(0.56, Factors(0.65, 1.5))),
    ("rms_norm", _Reach(0.56, Factors(0.65, 1.5))),
    ("group_norm", _Reach(0.5, Factors(0.6, 1.8))),
    ("batch_norm", _Reach(0.5, Factors(0.6, 1.8))),
    ("dropout", _Reach(0.7, Factors(0.8, 1.4))),
)
"""Elementwise calls by their variant, or a part of the operator's name. They read what they need
twice, or reduce columns; each byte counts once here. Pointwise, softmax and layer normalisation
forward: NeuSight's kernels on A100, V100 and T4 (github.com/sitar-lab/NeuSight, scripts/asplos/
data/dataset/train, MIT); the range of pointwise ones: those in ``test`` there, with L4. Backward of
normalisations: Liger-Kernel's benchmark/data/all_benchmark_data.csv, layer_norm of torch on H100.
Group and batch normalisation, dropout: estimated."""
_SHORT: Final = 1024
_LONG: Final = "long softmax"
_LONG_SOFTMAX: Final = _Reach(0.4, Factors(0.8, 1.3))
"""Of longer rows, which torch's kernel reads three times: cross-entropy of torch on A100 with
32,768 to 131,072 columns, forward, in Liger-Kernel's table."""
_BY_PROCESSORS: Final = frozenset(reach for _, reach in _FAMILIES[2:])
_A100: Final = 108 * 1.41e9 / 2039e9
"""Cycles of all processors for each byte, there. These families are bound by instructions as much
as by bytes: where the bandwidth grew more than the processors, their share falls. A model."""
_ELEMENTS: Final = 1.3
"""Of a pointwise kernel that accesses single elements, for each cycle of a processor: bound by
instructions, not bytes. megatron_swiglu and llama4_rope of torch in bfloat16 on H100, in
Liger-Kernel's table, 1.0 to 1.4; not fitted to: rms_norm and rope on A100 there, 1.2 and 1.3."""
_HALF: Final = ("float16", "bfloat16")
_MORE_ELEMENTS: Final = 1.2
_MORE_RANGE: Final = Factors(0.83, 1.25)
"""They were measured in float32: as many bytes of half precision are twice the instructions, which
takes 1 to 1.5 times as long. Fitted to NVIDIA's rows of BERT on one GPU."""
_MEMORY: Final = {"pascal": 0.74, "volta": 0.95, "turing": 0.85, "blackwell": 0.92}
"""Share of the bandwidth that is reached there, of that on other GPUs: by the same kernels of
NeuSight 0.62, 0.78 and 0.72 of the data sheet's, 0.81 on A100; B200 by jsd of torch in Liger-
Kernel's table, forward, against H100 PCIe."""
_HOST_LINK: Final = 0.88
"""Share of PCIe's rate that pinned copies reach: 55.4 of 63 GB/s on H200 (stas00/ml-engineering,
network/README.md)."""
_PAGEABLE: Final = 6e9
"""Bytes a second through the driver's pinned buffers: 3 to 12 GB/s, by processor and memory."""
_NVLINK: Final = 0.88
"""396 of 450 GB/s between two H200 (stas00/ml-engineering, network/README.md)."""
_HOST_START: Final = 8e-6


def price(work: Work, speeds: Speeds, kernels: int) -> Priced:
    """What an elementwise, indexed or compiled call takes."""
    reach = _reach(work)
    share = reach.share * _MEMORY.get(speeds.architecture, 1.0)
    if reach in _BY_PROCESSORS:
        share *= min(1.0, speeds.processor_rate / speeds.bandwidth / _A100)
    moved = (work.read + work.written) / (share * speeds.bandwidth)
    moved /= cached(work.read + work.written, speeds.l2)
    factors = reach.factors
    if work.variant == _SCATTERED and work.sizes:
        moved = max(moved, work.sizes[0] / (_ELEMENTS * speeds.processor_rate))
    if reach in _BY_PROCESSORS and work.dtype in _HALF:
        moved *= _MORE_ELEMENTS
        factors = factors.wider(_MORE_RANGE)
    line = f"memory bandwidth: {speeds.source}; share reached: kernels of NeuSight and Liger-Kernel"
    return _with_kernels(moved, factors, kernels, line, _source(speeds))


def family(work: Work) -> str:
    """Which kernels are alike: a variant, a part of the operator's name, "long softmax", or "" for
    others.
    """
    if work.kind is not WorkKind.ELEMENTS:
        return ""
    if work.variant:
        return work.variant
    if "softmax" in work.operator and work.sizes and work.sizes[0] > _SHORT:
        return _LONG
    return next((name for name, _ in _FAMILIES if name in work.operator), "")


def _reach(work: Work) -> _Reach:
    name = family(work)
    if name == _LONG:
        return _LONG_SOFTMAX
    return dict(_FAMILIES).get(name, _REACH[work.kind])


def cached(size: int, l2: int) -> float:
    """How much faster that many bytes move, for what is in the L2 already: from `_CACHED` at a
    quarter of its size down to 1 at its double.
    """
    if not l2:
        return 1.0
    inside = (2 - size / l2) / (2 - 0.25)
    return 1 + (_CACHED - 1) * min(1.0, max(0.0, inside))


def _source(speeds: Speeds) -> PriceSource:
    return PriceSource.MODEL if speeds.chip else PriceSource.GENERIC


def _with_kernels(
    moved: float, factors: Factors, kernels: int, line: str, source: PriceSource
) -> Priced:
    start = max(kernels, 1) * KERNEL
    low = moved * factors.low + start * _KERNEL_RANGE.low
    high = moved * factors.high + start * _KERNEL_RANGE.high
    total = moved + start
    return Priced(Factors(low / total, high / total).price(total, source), line)


def price_copy(work: Work, speeds: Speeds, kernels: int) -> Priced | Unavailable:
    """What a copy takes, by its direction."""
    size = max(work.read, work.written)
    variant = work.variant.removesuffix(" sync")  # that the host waits is the replay's
    host = f"PCIe: {speeds.source}; share reached: stas00/ml-engineering network/README.md"
    if variant == "d2d":
        moved = 2 * size / (0.85 * speeds.bandwidth) / cached(2 * size, speeds.l2)
        line = f"memory bandwidth: {speeds.source}"
        return _with_kernels(moved, Factors(0.92, 1.25), kernels, line, _source(speeds))
    if variant in ("h2d", "d2h"):
        seconds = size / (_HOST_LINK * speeds.pcie) + _HOST_START
        return Priced(Factors(0.9, 1.4).price(seconds, PriceSource.MODEL), host)
    if variant in ("pageable h2d", "pageable d2h"):
        seconds = size / min(_PAGEABLE, _HOST_LINK * speeds.pcie) + _HOST_START
        return Priced(Factors(0.45, 2.2).price(seconds, PriceSource.GENERIC), host)
    if variant == "peer":
        rate = _NVLINK * speeds.nvlink if speeds.nvlink else 0.75 * speeds.pcie
        factors = Factors(0.9, 1.3) if speeds.nvlink else Factors(0.7, 2.5)
        line = f"links between GPUs: {speeds.source}"
        return Priced(factors.price(size / rate + _HOST_START, PriceSource.GENERIC), line)
    return Unavailable(f"no speed is known of a copy {variant or 'of unknown direction'}")
