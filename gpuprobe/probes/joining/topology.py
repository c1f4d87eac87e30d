"""One topology out of what NVML and the CUDA driver each report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuprobe.model.machine.devices import TopologyCell, TopologyMatrix
from gpuprobe.model.values import Reading, ReadStatus, Unavailable
from gpuprobe.probes.base import SourceView

_NOT_SEEN: Reading[bool] = Reading(
    Unavailable("not both are visible to CUDA", ReadStatus.UNSUPPORTED), "cuda"
)


def join_topology(views: Sequence[SourceView]) -> TopologyMatrix | None:
    """NVML's matrix with CUDA's peer access in it; either alone; None where neither has one."""
    by_source = {view.source: view.topology for view in views if view.topology is not None}
    paths, peers = by_source.get("nvml"), by_source.get("cuda")
    if paths is None or peers is None:
        return paths or peers
    known = {
        (a, b): peers.cells[i][j]
        for i, a in enumerate(peers.devices)
        for j, b in enumerate(peers.devices)
    }

    def joined(a: str, b: str, cell: TopologyCell | None) -> TopologyCell | None:
        if cell is None:
            return None
        seen = known.get((a, b))
        return replace(cell, peer=_NOT_SEEN if seen is None else seen.peer)

    return TopologyMatrix(
        paths.devices,
        tuple(
            tuple(joined(a, b, cell) for b, cell in zip(paths.devices, row, strict=True))
            for a, row in zip(paths.devices, paths.cells, strict=True)
        ),
    )
