"""How long collectives take, by the links of the GPUs: `gpuprobe.model.plans.links`."""

from __future__ import annotations

from typing import Final

from gpuprobe.model.plans import links
from gpuprobe.model.run.work import Work
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time.price import Factors, Priced, PriceSource
from gpuprobe.step_time.speeds import GB, Speeds

_NAMES: Final = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "AlltoAll": "all_to_all",
    "Gather": "gather",
    "Scatter": "scatter",
    "Send": "send",
    "Recv": "recv",
    "SendRecv": "send",
}

_BUS: Final = {
    "ampere": (225.0, 210.0),
    "hopper": (450.0, 340.0),
    "blackwell": (700.0, 610.0),
}
"""Bus bandwidth in GB/s over NVLink of 8 GPUs: all-reduce, others. aiconfigurator-core 0.12.0, nccl
tables of a100_sxm, h100_sxm and b200_sxm at 512 MiB."""
_FEW: Final = {"ampere": 215.0, "hopper": 340.0, "blackwell": 600.0}
"""All-reduce of fewer than 8 GPUs, where NVSwitch does not add up: the same tables."""
_BY_NVLINK: Final = 0.72
"""Share of NVLink's rate on other GPUs."""
_BY_PCIE: Final = 12.0
_PCIE_RANGE: Final = Factors(0.3, 4.0)
"""GB/s without NVLink: 23 to 2 over 8 GPUs in the same tables, by the machine's topology."""
_SMALL: Final = 1 << 20
_SMALL_RANGE: Final = Factors(0.35, 1.3)
_RANGE: Final = Factors(links.LOW, links.HIGH)
_GENERIC: Final = Factors(0.7, 1.6)


def price(work: Work, speeds: Speeds, network: float) -> Priced | Unavailable:
    """What a collective takes once all ranks called it. ``network``: GB/s of each GPU's adapter, 0
    if unknown.
    """
    op = _NAMES.get(work.variant)
    if op is None or len(work.sizes) != 2:
        return Unavailable(f"no speed is known of the collective {work.variant or work.operator}")
    ranks, nodes = work.sizes
    if nodes > 1 and not network:
        return Unavailable(f"{work.variant} of {nodes} nodes: their network is not given")
    together = -(-ranks // max(nodes, 1))
    reduce, others, known = _bus(speeds, ranks)
    each = links.Links(speeds.name, reduce, others, network)
    seconds = links.seconds(op, work.read, ranks, max(nodes, 1), together, each)
    if not speeds.nvlink and together > 1:
        factors = _PCIE_RANGE
    else:
        factors = _RANGE if known else _GENERIC
    if work.read < _SMALL:
        factors = factors.wider(_SMALL_RANGE)
    source = PriceSource.MODEL if known else PriceSource.GENERIC
    line = (
        "collectives: gpuprobe's link model, bus bandwidths of nccl tables in aiconfigurator-core "
        f"0.12.0; {speeds.source}"
    )
    return Priced(factors.price(seconds, source), line)


def _bus(speeds: Speeds, ranks: int) -> tuple[float, float, bool]:
    """GB/s of an all-reduce, of other collectives, and whether they were measured."""
    if not speeds.nvlink:
        return _BY_PCIE, _BY_PCIE, False
    if speeds.architecture in _BUS and speeds.chip:
        reduce, others = _BUS[speeds.architecture]
        return (reduce if ranks >= 8 else _FEW[speeds.architecture]), others, True
    rate = _BY_NVLINK * speeds.nvlink / GB
    return rate, rate, False
