"""What a virtual GPU takes for granted, for a recording that is made on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_sources: list[Callable[[], Iterable[str]]] = []


def made_by(source: Callable[[], Iterable[str]]) -> Callable[[], None]:
    """Have ``source`` asked for its assumptions. Returns what ends that."""
    _sources.append(source)
    return lambda: _sources.remove(source)


def in_force() -> tuple[str, ...]:
    """All that were made so far, each once."""
    return tuple(dict.fromkeys(text for source in _sources for text in source()))
