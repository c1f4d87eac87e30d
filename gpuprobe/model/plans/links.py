"""How long a collective takes over given links: a model, with figures that were published.

``nvlink:h100,ib:ndr`` names links of the tables below; ``nvlink:300,ib:20`` gives bus bandwidths in
GB/s (10^9 bytes) of a whole group and of one GPU's network adapter.

The time is ``a0 + a2 * S / (S + s2) + a1 * S / (S + s1) + wire / bandwidth``: a latency, what
NCCL's protocols for small messages add, what filling its pipeline adds, and the bytes on the wire
(`gpuprobe.model.run.communication.wire_bytes`). The constants were fitted to three published runs
of nccl-tests on 16, 32 and 64 H100 GPUs, and are checked on six other ones:
``benchmarks/link_model.py``. Only all-reduce was checked, on NVLink of H100 and NDR InfiniBand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from gpuprobe.errors import UsageError
from gpuprobe.model.run.communication import wire_bytes
from gpuprobe.model.values import Count, Nanoseconds, World

_REDUCED_BY_SWITCH: Final = {"h100": 480.0, "h200": 480.0}
"""Bus bandwidth of an all-reduce that NVSwitch adds up, GB/s: issues 212 (H100) and 272 (H200, 475)
of github.com/NVIDIA/nccl-tests."""
_NVLINK: Final = {"h100": 370.0, "h200": 370.0}
"""Of other operations: the first of these."""
_NETWORK: Final = {"ndr": 45.0, "hdr": 22.5}
"""Of one GPU's adapter: 400 Gb/s InfiniBand reaches 46 to 48 GB/s (github.com/NVIDIA/nccl-tests/
issues/290), 45 in the runs that the model was fitted to; 200 Gb/s half."""
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
    network adapter of each GPU, 0 if there is none. ``text`` is what they were made of.
    """

    text: str
    reduce: float
    nvlink: float
    network: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkTime:
    """How long operations of one kind take in a step by the model, in nanoseconds. ``overlaps``:
    they are asynchronous or on a separate stream, so that computation can hide them.
    """

    op: str
    axis: str
    ranks: World
    nodes: World
    count: Count
    overlaps: Annotated[bool, "computation can hide it"]
    low_ns: Nanoseconds
    high_ns: Nanoseconds


def parse_links(text: str) -> Links:
    """What ``--link`` describes. Raises UsageError for links and figures that are unknown."""
    found: dict[str, str] = {}
    for part in text.split(","):
        kind, colon, value = part.strip().partition(":")
        if kind not in ("nvlink", "ib") or not colon or kind in found:
            raise UsageError(f"unknown link {part.strip()!r}", hint=_HINT)
        found[kind] = value
    if "nvlink" not in found:
        raise UsageError(f"{text!r} has no nvlink", hint=_HINT)
    nvlink = found["nvlink"]
    return Links(
        text,
        _figure(nvlink, _REDUCED_BY_SWITCH),
        _figure(nvlink, _NVLINK),
        _figure(found["ib"], _NETWORK) if "ib" in found else 0.0,
    )


_HINT: Final = (
    f"nvlink:{'|'.join(_NVLINK)}, and for several nodes ib:{'|'.join(_NETWORK)}; or GB/s, as in "
    "nvlink:300,ib:20"
)


def _figure(text: str, table: dict[str, float]) -> float:
    if text in table:
        return table[text]
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise UsageError(f"unknown link {text!r}", hint=_HINT)
    return found


def node_shape(ranks: Sequence[int], per_node: int) -> tuple[int, int]:
    """On how many nodes the ranks of a group are, and how many of them on one at most."""
    counts: dict[int, int] = {}
    for rank in ranks:
        counts[rank // per_node] = counts.get(rank // per_node, 0) + 1
    return len(counts), max(counts.values())


def seconds(op: str, payload: int, ranks: int, nodes: int, together: int, links: Links) -> float:
    """How long an operation takes, in the middle of the range (`LOW`, `HIGH`). ``together``: the
    most ranks of the group on one node.

    Raises UsageError for a group on several nodes without a network.
    """
    if ranks < 2:
        return 0.0
    if nodes > 1 and not links.network:
        raise UsageError("a group spans several nodes, and --link has no ib", hint=_HINT)
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
