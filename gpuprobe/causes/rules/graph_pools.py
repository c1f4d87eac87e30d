"""The memory of captured CUDA graphs, in private pools."""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import EXPECTED, Answer, Expected
from gpuprobe.causes.cache import DEFAULT_POOL, Cache, CachedMemory, free_in
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.model.memory import Segment
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import GRAPH_REPLAY


def replayed(group: HeldGroup) -> Expected | None:
    """What the last replay of a graph used: the next one uses it again, at the same place."""
    used = sum(block.bytes for block in group.blocks if block.by == GRAPH_REPLAY)
    return EXPECTED if 2 * used > group.bytes else None


def diagnose(cache: Cache) -> Iterator[CachedMemory]:
    """Private pools of captured graphs: blocks of one serve no other, and none is released."""
    pools: dict[tuple[int, int], list[Segment]] = {}
    for segment in cache.trace.segments:
        if segment.pool_id != DEFAULT_POOL:
            pools.setdefault(segment.pool_id, []).append(segment)
    segments = [segment for pool in pools.values() for segment in pool]
    free = sum(map(free_in, segments))
    if not segments or 3 * free < cache.beyond:
        return
    line = cache.line(segments)
    if len(pools) > 1:
        what = f"are free in the {len(pools)} private pools of captured graphs: each has its own"
        remedy = (
            "capture all graphs with one shared graph pool, the largest first: "
            "torch.cuda.graph(graph, pool=pool) with pool = torch.cuda.graph_pool_handle()"
        )
    else:
        what = (
            "are free in the private pool of the graphs: blocks of a smaller graph are too small "
            "for the larger ones that are captured after it"
        )
        remedy = "capture the largest graph first: the others then reuse its blocks"
    yield CachedMemory(
        Answer("private-pools", f"{human_bytes(free)} {what}", remedy),
        free,
        len(segments),
        line,
        common=cache.common_lines(segments),
        in_order=len(pools) == 1,
    )
