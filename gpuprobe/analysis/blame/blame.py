"""The changed lines that explain what grew, the best first.

A changed line explains the growth of a call path that crosses it, wholly; of a path that does not,
the less the further its statement is from those on the path (`relations`). Lines that only moved
or were renamed explain nothing while any other does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from gpuprobe.analysis.blame.changes import GAP, INDENTED, MOVED, NEW, RENAMED, ChangedLine
from gpuprobe.analysis.blame.relations import Node, SourceGraph
from gpuprobe.model.place import Place, parse_place

_NEARER: Final = 0.6
"""What is left of an explanation with each statement between."""

_FARTHEST: Final = 6

_OUTER: Final = 0.97
"""What is left of an explanation with each call outwards: of two lines on a path, the inner."""

_LEAST: Final = 0.01
"""Of the growth: what a line that only moved must leave unexplained to be looked at."""

_KINDS: Final = {NEW: 1.0, GAP: 0.9, INDENTED: 0.7, RENAMED: 0.5, MOVED: 0.4}
_OTHERWISE: Final = 0.1
"""For a line that makes an optimizer, of memory that no optimizer takes; for one that prints."""

_OF_OPTIMIZERS: Final = frozenset(("optimizer_state", "gradient", "temporary", "workspace"))


class GrowthPath(NamedTuple):
    """Growth of ``bytes`` along a path: the places of the calls, outermost first."""

    path: tuple[str, ...]
    bytes: int
    category: str


@dataclass(frozen=True, slots=True)
class Suspect:
    """``bytes`` are those of the growth that it explains best of all; ``ways`` are their numbers.
    ``score``: bytes, each with the share of it that the line explains."""

    change: ChangedLine
    score: float
    bytes: int
    ways: tuple[int, ...]


class Blame:
    """The changes of one program. ``most``: ways looked at, the largest first."""

    def __init__(self, program: SourceGraph, found: Sequence[ChangedLine], most: int = 200) -> None:
        self.program = program
        self._most = most
        self._changes = self._without_renamings([c for c in found if not self._is_import(c)])
        self._distances: dict[Node, dict[Node, int]] = {}

    def _is_import(self, change: ChangedLine) -> bool:
        facts = self.program.facts.get((change.file, change.statement))
        return facts is not None and facts.is_import and change.kind != GAP

    def _without_renamings(self, found: Sequence[ChangedLine]) -> list[ChangedLine]:
        """A line that was replaced has changed with the function that it calls, where that was
        renamed, or made of lines that were elsewhere."""
        kinds = {(change.file, change.statement): change.kind for change in found}
        elsewhere: set[tuple[str, ...]] = set()
        for node, facts in self.program.facts.items():
            if not facts.opens or kinds.get(node) not in (NEW, RENAMED):
                continue
            body = [kinds.get(inner) for inner in self.program.body(node)]
            if kinds[node] == RENAMED or (body and NEW not in body and MOVED in body):
                elsewhere |= facts.defines
        return [
            replace(change, kind=RENAMED)
            if change.kind == NEW
            and change.removed is not None
            and (at := self.program.facts.get((change.file, change.statement))) is not None
            and not at.opens
            and at.keys & elsewhere
            else change
            for change in found
        ]

    def suspects(self, ways: Iterable[GrowthPath]) -> tuple[Suspect, ...]:
        """Which changes explain the growth, the best first."""
        largest = sorted(ways, key=lambda way: (-way.bytes, way.path))[: self._most]
        total = sum(way.bytes for way in largest)
        real = [c for c in self._changes if c.kind not in (RENAMED, MOVED)]
        found = self._ranked(real, largest)
        if sum(suspect.score for suspect in found) < _LEAST * total:
            found = self._ranked(self._changes, largest)
        return tuple(found)

    def _ranked(self, found: Sequence[ChangedLine], ways: Sequence[GrowthPath]) -> list[Suspect]:
        """The lines with an explanation: the best line of each stretch of changed lines, stretches
        that explain most first; then the others."""
        nodes = [self._nodes(way.path) for way in ways]
        shares = {
            change: [self._share(change, way, at) for way, at in zip(ways, nodes, strict=True)]
            for change in found
        }

        def score(changed: Sequence[ChangedLine]) -> float:
            best = map(max, zip(*(shares[change] for change in changed), strict=True))
            return float(sum(share * way.bytes for share, way in zip(best, ways, strict=True)))

        scores = {change: score([change]) for change in found}
        firsts: list[tuple[float, str, int, ChangedLine]] = []
        others: list[ChangedLine] = []
        for stretch in self._stretches([change for change in found if scores[change] > 0]):
            if not any(change.kind == INDENTED for change in stretch):
                stretch.sort(key=lambda change: (-scores[change], change.line))
            # Else the first of a block that was taken out of another, or put into one.
            first, *rest = stretch
            firsts.append((-score(stretch), first.file, first.line, first))
            others += rest
        order = [item[-1] for item in sorted(firsts, key=lambda item: item[:3])]
        others.sort(key=lambda change: (-scores[change], change.file, change.line))
        order += others
        mine: dict[ChangedLine, list[int]] = {change: [] for change in order}
        for number in range(len(ways)):
            best = max(order, key=lambda change: shares[change][number], default=None)
            if best is not None and shares[best][number] > 0:
                mine[best].append(number)
        return [
            Suspect(
                change,
                scores[change],
                sum(ways[number].bytes for number in mine[change]),
                tuple(mine[change]),
            )
            for change in order
        ]

    def _stretches(self, found: Sequence[ChangedLine]) -> list[list[ChangedLine]]:
        """Changes of statements that follow each other in one function."""
        stretches: list[list[ChangedLine]] = []
        last: tuple[str, int, str] | None = None
        for change in sorted(found, key=lambda item: (item.file, item.statement)):
            here = change.file, change.statement
            scope = self.program.scope(here)
            if last is None or last[0] != here[0] or here[1] - last[1] > 1 or last[2] != scope:
                stretches.append([])
            stretches[-1].append(change)
            last = (*here, scope)
        return stretches

    def _nodes(self, path: Sequence[str]) -> list[Node]:
        """The statements on a path, innermost first."""
        found = []
        for key in reversed(path):
            place = parse_place(key)
            if isinstance(place, Place) and place.file:
                node = self.program.at(place.file, place.line)
                if node is not None:
                    found.append(node)
        return found

    def _share(self, change: ChangedLine, way: GrowthPath, nodes: Sequence[Node]) -> float:
        """How much of a way's growth a change explains, 0 to 1."""
        target = (change.file, change.statement)
        best = 0.0
        for depth, node in enumerate(nodes):
            if node == target:
                best = max(best, _OUTER**depth)
                break
            away = self._from(node).get(target)
            if away is not None:
                best = max(best, _OUTER**depth * _NEARER**away)
        if not best:
            return 0.0
        facts = self.program.facts.get(target)
        if facts is not None and target not in nodes[:1]:
            is_of_optimizer = facts.optimizes and way.category not in _OF_OPTIMIZERS
            if is_of_optimizer or facts.talks:
                best *= _OTHERWISE
        return best * _KINDS[change.kind]

    def _from(self, node: Node) -> Mapping[Node, int]:
        if node not in self._distances:
            self._distances[node] = self.program.distances(node, _FARTHEST)
        return self._distances[node]
