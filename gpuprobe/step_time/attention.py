"""How long fused attention takes: its multiplications at a share of the peak, by implementation.

The share is ``plateau * s / (s + s0) * fill``: ``s`` is the number of keys, ``fill`` how evenly
the blocks of queries occupy the GPU. Plateaus, ``s0`` and the shares of causal masks are those of
published figures. A100: the forward tables of aiconfigurator-core 0.12.0 (FlashAttention-2, head
size 128), and SimuMax's ``configs/system/a100_pcie.json`` (backward, 32 to 4 heads). B200: the same
tables, and SimuMax's ``b200_bf16_ceperm.json`` (cuDNN). H100: figures 5 and 6 of the
FlashAttention-3 paper (arXiv 2407.08608), which also have FlashAttention-2 and cuDNN, forward and
backward. `scaled_dot_product_attention` calls FlashAttention-2 on all GPUs. The backward pass has
2.5 times the multiplications of the forward pass (FlashAttention-2, arXiv 2307.08691, section 4.1).
"""

from __future__ import annotations

from typing import Final

from gpuprobe.model.run.work import Work, WorkKind
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time.matmul import START
from gpuprobe.step_time.price import Factors, Priced, PriceSource
from gpuprobe.step_time.speeds import Speeds

_BACKWARD: Final = 2.5
_BLOCK: Final = 128
"""Queries that one block of threads computes."""

_Plateaus = dict[int, tuple[float, float]]
"""By head size: share of the peak in the forward and the backward pass, long and not causal."""

_FLASH: Final[dict[str, _Plateaus]] = {
    "ampere": {64: (0.63, 0.55), 128: (0.74, 0.66), 192: (0.71, 0.56), 256: (0.64, 0.5)},
    "ampere-professional": {64: (0.55, 0.45), 128: (0.6, 0.48), 256: (0.5, 0.38)},
    "ampere-consumer": {64: (0.85, 0.68), 128: (0.88, 0.7), 256: (0.75, 0.55)},
    "ada": {64: (0.53, 0.43), 128: (0.6, 0.48), 192: (0.6, 0.46), 256: (0.63, 0.45)},
    "ada-consumer": {64: (0.85, 0.7), 128: (0.9, 0.72), 256: (0.8, 0.6)},
    "hopper": {64: (0.328, 0.294), 128: (0.374, 0.326), 256: (0.33, 0.27)},
    "blackwell": {64: (0.17, 0.14), 128: (0.2, 0.16), 256: (0.18, 0.14)},
    "blackwell-professional": {
        64: (0.6, 0.48),
        128: (0.69, 0.54),
        192: (0.69, 0.5),
        256: (0.73, 0.5),
    },
    "blackwell-consumer": {64: (0.85, 0.7), 128: (0.9, 0.72), 256: (0.8, 0.6)},
}
_CUDNN: Final[dict[str, _Plateaus]] = {
    "hopper": {64: (0.417, 0.438), 128: (0.61, 0.525), 256: (0.587, 0.45)},
    "blackwell": {64: (0.41, 0.35), 128: (0.67, 0.57), 192: (0.66, 0.45), 256: (0.74, 0.5)},
}
"""On GPUs before Hopper as FlashAttention-2."""
_EFFICIENT: _Plateaus = {64: (0.5, 0.45), 128: (0.5, 0.45)}
"""Of FlashAttention-2's speed: xformers in figures 4 to 6 of the FlashAttention-2 paper."""
_EFFICIENT_ALONE: Final[_Plateaus] = {128: (0.35, 0.24)}
"""Of the peak, on GPUs that FlashAttention-2 does not support."""
_NOT_FLASH: Final = ("pascal", "volta", "turing")
_PUBLISHED: Final = {"flash": ("ampere", "hopper"), "cudnn": ("ampere", "hopper", "blackwell")}
"""What figures of both passes are published for; the other plateaus are forward tables of
aiconfigurator-core (L40S, RTX PRO 6000), and estimates."""

_CAUSAL: Final = 0.91
_KEYS: Final = {(False, False): 80, (False, True): 240, (True, False): 300, (True, True): 420}
"""``s0`` by causal, backward."""
_KEYS_BLACKWELL: Final = 900
"""``s0`` of the forward pass there: kernels twice as fast take as long to start."""
_UNEVEN: Final = {(False, False): 0.5, (False, True): 0.6, (True, False): 1.5, (True, True): 0.8}
"""Blocks for each processor that are lost at the end of a kernel, by causal, backward."""
_FULL: Final = 15.5
"""Blocks for each processor in the published figures."""

_MODEL: Final = {"flash": Factors(0.84, 1.2), "cudnn": Factors(0.84, 1.25)}
_GENERIC: Final = {"flash": Factors(0.7, 1.45), "cudnn": Factors(0.7, 1.5)}
_WIDE: Final = Factors(0.6, 1.6)
_EFFICIENT_RANGE = _WIDE
_FLOAT32: Final = 0.7
"""Share of the float32 peak: "efficient" computes float32 in three products of TF32, or without
tensor cores."""

_LINE: Final = (
    "attention: FlashAttention-2 and -3 papers (arXiv 2307.08691, 2407.08608), "
    "aiconfigurator-core 0.12.0, SimuMax a100_pcie.json"
)


def multiplications(work: Work) -> float:
    """Multiplications and additions of a call: as recorded, which leaves out what a mask or window
    does, else by its sizes, with a causal mask those of the pairs that it keeps.
    """
    if work.flops:
        return float(work.flops)
    batch, heads, _, queries, keys, size, value_size = work.sizes
    pairs = float(queries * keys)
    if work.variant.endswith(" causal"):
        kept = min(queries, keys)
        pairs = kept * (kept + 1) / 2 + max(0, queries - keys) * keys
    flops = 2 * batch * heads * pairs * (size + value_size)
    return flops * (_BACKWARD if work.kind is WorkKind.ATTENTION_BACKWARD else 1)


def price(work: Work, speeds: Speeds, kernels: int) -> Priced | Unavailable:
    """What a call of fused attention takes, or why there is no price for it."""
    if len(work.sizes) != 7 or 0 in work.sizes:
        return Unavailable(f"{work.operator}: the sizes of the attention are unknown")
    implementation, _, mask = work.variant.partition(" ")
    causal, backward = mask == "causal", work.kind is WorkKind.ATTENTION_BACKWARD
    share = _plateau(work, speeds, implementation, backward)
    if isinstance(share, Unavailable):
        return share
    plateau, peak, source, factors = share
    low, high = speeds.kept
    kept = (low + high) / 2
    batch, heads, _, queries, keys, _, _ = work.sizes
    reach = keys / (keys + _keys(speeds.architecture, causal, backward))
    blocks = batch * heads * -(-queries // _BLOCK) / speeds.processors
    speed = peak * kept * plateau * reach * (_CAUSAL if causal else 1.0)
    speed *= _fill(blocks, causal, backward) / _fill(_FULL, causal, backward)
    # A block computes all its rows, however few are queries.
    rows = min(_BLOCK, -(-queries // 16) * 16) / min(queries, _BLOCK)
    seconds = multiplications(work) * rows / speed
    moved = (work.read + work.written) / (0.8 * speeds.bandwidth)
    seconds = max(seconds, moved) + START * max(kernels, 1)
    if queries < _BLOCK:
        factors = factors.wider(_WIDE)
    factors = factors.wider(Factors(kept / high, kept / low))
    return Priced(factors.price(seconds, source), _LINE)


def _keys(architecture: str, causal: bool, backward: bool) -> int:
    if architecture == "blackwell" and not backward:
        return _KEYS_BLACKWELL
    return _KEYS[causal, backward]


def _fill(blocks: float, causal: bool, backward: bool) -> float:
    return blocks / (blocks + _UNEVEN[causal, backward])


_Share = tuple[float, float, PriceSource, Factors]


def _plateau(
    work: Work, speeds: Speeds, implementation: str, backward: bool
) -> _Share | Unavailable:
    """Share of a peak, the peak, where they are from, and their range."""
    architecture = speeds.architecture
    old = architecture in _NOT_FLASH
    if implementation not in ("flash", "efficient", "cudnn"):
        return Unavailable(
            f"no speed is known of attention by {implementation or 'unknown kernels'}"
        )
    if implementation != "efficient" and old:
        return Unavailable(f"{implementation} attention does not run on {speeds.title}")
    if work.dtype == "float32":
        peak = speeds.rate("float32")
        if isinstance(peak, Unavailable):
            return peak
        return _FLOAT32, peak, PriceSource.GENERIC, _WIDE
    if work.dtype not in ("float16", "bfloat16"):
        return Unavailable(f"no speed is known of attention in {work.dtype or 'unknown type'}")
    peak = speeds.rate(work.dtype)
    if isinstance(peak, Unavailable):
        return peak
    size = max(work.sizes[5], work.sizes[6])
    if implementation == "efficient" and old:
        return _at(_EFFICIENT_ALONE, size)[backward], peak, PriceSource.GENERIC, _WIDE
    efficient = implementation == "efficient"
    published = architecture in _PUBLISHED["flash" if efficient else implementation]
    source = PriceSource.MODEL if published else PriceSource.GENERIC
    if efficient:
        share = _at(_FLASH[architecture], size)[backward]
        share *= _EFFICIENT[64 if size <= 64 else 128][backward]
        return share, peak, source, _EFFICIENT_RANGE
    plateaus = _FLASH[architecture]
    if implementation == "cudnn":
        plateaus = _CUDNN.get(architecture, plateaus)
    ranges = _MODEL if published else _GENERIC
    return _at(plateaus, size)[backward], peak, source, ranges[implementation]


def _at(plateaus: _Plateaus, size: int) -> tuple[float, float]:
    """Of the next larger head size that is known: for those between, part of a kernel is idle."""
    known = min((each for each in plateaus if each >= size), default=max(plateaus))
    idle = min(1.0, size / known) if size > known // 2 else 0.5
    forward, backward = plateaus[known]
    share = 0.5 + 0.5 * idle
    return forward * share, backward * share
