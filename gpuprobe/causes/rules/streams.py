"""Memory in the allocator's cache of streams that are not used any more."""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.cache import DEFAULT_POOL, Cache, CachedMemory
from gpuprobe.model.memory import Segment
from gpuprobe.model.text import human_bytes, plural


def diagnose(cache: Cache) -> Iterator[CachedMemory]:
    """Streams that are not used any more: blocks of one stream serve no other."""
    by_stream: dict[int, list[Segment]] = {}
    for segment in cache.trace.segments:
        if segment.pool_id == DEFAULT_POOL and segment.stream:
            by_stream.setdefault(segment.stream, []).append(segment)
    used = cache.used()
    last = max((used[one][0] for one in by_stream if one in used), default=0)
    old = [
        stream
        for stream, segments in by_stream.items()
        if used.get(stream, (-1, -1))[1] < last and all(map(cache.is_idle, segments))
    ]
    segments = [segment for stream in old for segment in by_stream[stream]]
    size = sum(segment.total_size for segment in segments)
    if len(old) < 2 or 3 * size < cache.beyond:
        return
    line = cache.line(segments)
    yield CachedMemory(
        Answer(
            "old-streams",
            f"{human_bytes(size)} stay in the allocator's cache of {plural(len(old), 'stream')} "
            f"without further use: what was allocated on one stream (at {line}) serves no other",
            "create the streams once, and reuse them in each call or epoch",
        ),
        size,
        len(segments),
        line,
    )
