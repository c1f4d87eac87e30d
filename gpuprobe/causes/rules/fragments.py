"""Free blocks in the allocator's cache that requests cannot use."""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.cache import DEFAULT_POOL, Cache, CachedMemory
from gpuprobe.model.place import Place
from gpuprobe.model.text import human_bytes

FRAGMENTS = "fragments"


def diagnose(cache: Cache) -> Iterator[CachedMemory]:
    """Free blocks that are too small for what is requested, or that a setting keeps unused."""
    segments = [one for one in cache.trace.segments if one.pool_id == DEFAULT_POOL]
    settings = cache.trace.settings
    if not segments or settings is None:
        return
    line = cache.failed_at() if cache.failed else cache.line(segments)
    size = max(cache.beyond, cache.free if cache.failed else 0)
    text = f"{human_bytes(size)} in the allocator's cache are free blocks that requests cannot use"
    if cache.failed:
        text += f": {human_bytes(cache.failed)} at {line} failed although as much was free in sum"
    limited = settings.max_split_size >= 0
    option = "max_split_size_mb" if limited and settings.expandable_segments else ""
    if option:
        text += f": {option} keeps large ones from being split, though segments are expandable"
    between = cache.between(segments) if cache.failed else None
    if isinstance(between, Place):
        text += f"; blocks from {between} are allocated between them"
    yield CachedMemory(
        Answer(
            FRAGMENTS,
            text if cache.failed else f"{text}; most was reserved at {line}",
            f"set no {option}" if option else "let segments grow: expandable_segments:True",
            code="" if option else "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        size,
        len(segments),
        line,
        kept_at=between if isinstance(between, Place) else None,
        setting="" if option else "expandable_segments:True",
        option=option,
    )
