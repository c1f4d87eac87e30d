"""The memory of CUDA graphs."""

from __future__ import annotations

from gpuprobe.causes.answer import EXPECTED, Expected
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.model.trace import GRAPH_REPLAY


def diagnose(group: HeldGroup) -> Expected | None:
    """What the last replay of a CUDA graph used: the next one uses it again, at the same place."""
    replayed = sum(block.bytes for block in group.blocks if block.by == GRAPH_REPLAY)
    return EXPECTED if 2 * replayed > group.bytes else None
