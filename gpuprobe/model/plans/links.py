"""How long a collective takes over given links: a model, with figures that were published.

The time is ``a0 + a2 * S / (S + s2) + a1 * S / (S + s1) + wire / bandwidth``: a latency, what
NCCL's protocols for small messages add, what filling its pipeline adds, and the bytes on the wire
(`gpuprobe.model.run.communication.wire_bytes`). The constants were fitted to three published runs
of nccl-tests on 16, 32 and 64 H100 GPUs, and are checked on six other ones:
``tests/estimate/test_link_times.py``. Only all-reduce was checked, on NVLink of H100 and NDR
InfiniBand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from gpuprobe.model.run.communication import wire_bytes

_TREE: Final = 0.98
"""Two nodes exchange each byte once: NVSwitch is the limit, at 470 of its 480 GB/s (issue 309)."""

_KIB: Final = 1024
_SMALL: Final = 300 * _KIB
_PIPELINE: Final = 64 * _KIB**2
LOW: Final = 0.85
HIGH: Final = 1.3
"""The range, as factors: 9 of 10 published times are in it."""


@dataclass(frozen=True, slots=True)
class Links:
    """Bus bandwidths in GB/s: of an all-reduce within a node, of other operations there, and of the
    network adapter of each GPU, 0 if there is none.
    """

    reduce: float
    nvlink: float
    network: float = 0.0


def seconds(op: str, payload: int, ranks: int, nodes: int, together: int, links: Links) -> float:
    """How long an operation takes, in the middle of the range (`LOW`, `HIGH`). ``together``: the
    most ranks of the group on one node; several nodes need a network.
    """
    if ranks < 2:
        return 0.0
    steps = math.log2(nodes)
    latency = 19 + 10 * steps
    if op in ("send", "recv"):
        rate = links.network if nodes > 1 else links.nvlink
        return latency * 1e-6 + payload / rate / 1e9
    latency += (25 + 9 * steps) * payload / (payload + _SMALL)
    latency += (111 + 54 * steps) * payload / (payload + _PIPELINE / nodes)
    wire = wire_bytes(op, payload, ranks)
    return latency * 1e-6 + wire / _bandwidth(op, ranks, nodes, together, links) / 1e9


def _bandwidth(op: str, ranks: int, nodes: int, together: int, links: Links) -> float:
    inside = links.reduce if op == "all_reduce" else links.nvlink
    if nodes == 1:
        return inside
    network = links.network * together
    if op == "all_to_all":  # every rank sends to those on other nodes through its own adapter
        return links.network * (ranks - 1) / (ranks - together)
    if together == 1:
        return network
    if op == "all_reduce" and nodes == 2:
        return min(_TREE * inside, 2 * network)
    return min(inside, network)
