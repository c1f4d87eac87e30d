"""How long collectives take, by the links of the GPUs: within a node of A100, H100, H200, B200 or
B300 by constants fitted to measured ones, else by `gpuprobe.model.plans.links`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpuprobe.model.plans import links
from gpuprobe.model.run.communication import wire_bytes
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


@dataclass(frozen=True, slots=True)
class _Node:
    """The constants of a node's NVLink: ``start + rank * ranks`` (all-reduce: ``+ reducing *
    ranks``) and, in microseconds, ``filling * size / (size + half)`` before the wire is busy;
    then bus bandwidths in GB/s of an all-reduce of 8 ranks, of fewer, and of other collectives.
    """

    start: float
    rank: float
    reducing: float
    filling: float
    half: float
    reduce_by_switch: float
    reduce: float
    others: float

    def seconds(self, op: str, size: int, ranks: int) -> float:
        reducing = op == "all_reduce"
        latency = self.start + self.rank * ranks + self.reducing * ranks * reducing
        latency += self.filling * size / (size + self.half)
        by_switch = self.reduce_by_switch if ranks >= 8 else self.reduce
        bandwidth = by_switch if reducing else self.others
        return latency * 1e-6 + wire_bytes(op, size, ranks) / (bandwidth * GB)


_NODES: Final = {
    "ampere": _Node(9.04, 0.74, 0.91, 47.5, 5.62e6, 213.0, 196.0, 201.0),
    "hopper": _Node(4.26, 0.79, 0.67, 30.0, 7.21e6, 417.0, 309.0, 320.0),
    "blackwell": _Node(7.53, 1.0, 1.0, 38.2, 15.2e6, 690.0, 597.0, 609.0),
}
"""Fitted to the nccl tables of 2 and 8 GPUs of a100_sxm, h100_sxm and b200_sxm in
aiconfigurator-core 0.12.0 (Apache-2.0): all-reduce, all-gather, reduce-scatter, all-to-all, 512
bytes to 512 MiB. Those of 4 GPUs were left out: median error 6.7, 5.2 and 7.1%, 90% within 13, 15
and 19%."""
_NODE_RANGE: Final = Factors(0.87, 1.25)
_BY_NVLINK: Final = 0.72
"""Share of NVLink's rate on other GPUs."""
_BY_PCIE: Final = 12.0
_PCIE_RANGE: Final = Factors(0.3, 4.0)
"""GB/s without NVLink: from 38 of two RTX PRO 6000 to 2 of eight L40S in the same tables, by the
machine's topology."""
_SMALL: Final = 1 << 20
_SMALL_RANGE: Final = Factors(0.35, 1.3)
_RANGE: Final = Factors(links.LOW, links.HIGH)
_TABLES: Final = (
    "collectives of one node: nccl tables of aiconfigurator-core 0.12.0 (2026, Apache-2.0), fitted"
)
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
        return Unavailable(
            f"{work.variant} of {nodes} nodes: their network is not given (--network)"
        )
    together = -(-ranks // max(nodes, 1))
    if nodes <= 1 and speeds.nvlink and speeds.architecture in _NODES and ranks > 1:
        seconds = _NODES[speeds.architecture].seconds(op, work.read, ranks)
        source = PriceSource.MEASURED if speeds.own else PriceSource.MODEL
        return Priced(_NODE_RANGE.price(seconds, source), _TABLES)
    reduce, others, known = _bus(speeds)
    each = links.Links(reduce, others, network)
    seconds = links.seconds(op, work.read, ranks, max(nodes, 1), together, each)
    if not speeds.nvlink and together > 1:
        factors = _PCIE_RANGE
    else:
        factors = _RANGE if known else _GENERIC
    if work.read < _SMALL:
        factors = factors.wider(_SMALL_RANGE)
    source = PriceSource.MODEL if known else PriceSource.GENERIC
    line = f"collectives: the model of links, gpuprobe.model.plans.links; {speeds.source}"
    return Priced(factors.price(seconds, source), line)


def _bus(speeds: Speeds) -> tuple[float, float, bool]:
    """GB/s of an all-reduce, of other collectives, and whether they were measured."""
    if not speeds.nvlink:
        return _BY_PCIE, _BY_PCIE, False
    node = _NODES.get(speeds.architecture)
    if node is not None:
        return node.reduce_by_switch, node.others, True
    rate = _BY_NVLINK * speeds.nvlink / GB
    return rate, rate, False
