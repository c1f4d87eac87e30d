"""Which ranks of a job behave alike, told from what the ranks that were run report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class Classes:
    """A partition of the ranks of a job. It begins as one class, and every report of a rank
    (`gpuprobe.torch_support.traffic`) may split it.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._labels: list[tuple[Any, ...]] = [()] * ranks
        self._groups: dict[tuple[int, ...], None] = {}

    def report(self, rank: int, document: dict[str, Any]) -> None:
        """Split by what ``rank`` has found: by the stages of its pipeline all ranks, by its uneven
        shards those that are in its class then.
        """
        for group in [range(self._ranks), *document["groups"]]:
            self._groups.setdefault(tuple(group))
        for stage in document["stages"]:
            self._split(range(self._ranks), stage, range(len(stage)))
        for group, labels in document["shards"]:
            self._split(self.of(rank), group, labels)

    def of(self, rank: int) -> list[int]:
        """The ranks that are alike with ``rank``, and itself."""
        label = self._labels[rank]
        return [other for other in range(self._ranks) if self._labels[other] == label]

    def all(self) -> list[list[int]]:
        """Every class, by its first rank."""
        found: dict[tuple[Any, ...], list[int]] = {}
        for rank, label in enumerate(self._labels):
            found.setdefault(label, []).append(rank)
        return list(found.values())

    def _split(self, members: Iterable[int], group: Sequence[int], labels: Sequence[int]) -> None:
        """By the place that each has in a group like ``group``: as large, and as wide apart."""
        places: dict[int, int] = {}
        shape = _shape(group)
        for other in self._groups:
            if _shape(other) == shape:
                for index, rank in enumerate(other):
                    places.setdefault(rank, index)
        for rank in members:
            place = places.get(rank)
            self._labels[rank] += (None if place is None else labels[place],)


def _shape(group: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank - group[0] for rank in group)
