"""Accesses to blocks of memory, and what is kept of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, NamedTuple

from gpuprobe.hazards import rules
from gpuprobe.hazards.footprint import Footprint
from gpuprobe.model.rules import Rule

HOST: Final = 0
"""The host's index among the actors. Host threads count as one, ordered as Python ran them."""
FEW: Final = 8
"""Accesses of a block that are kept before it is worth pruning them."""


class Access(NamedTuple):
    """One operator's touch of one block. ``time`` counts the actor's operations."""

    actor: int
    time: int
    where: Footprint
    write: bool
    op: Any  # a name, or a name and a shape
    site: Any
    note: str = ""  # "graph", "gradient", "numpy": what else is known of it
    history: Any = None  # of the block, once it was freed


class Sync(NamedTuple):
    """A synchronisation, as it was asked for: ``kind`` record, wait, self-wait, ..."""

    kind: str
    waiter: int
    source: int
    time: int  # of the source, when it was recorded
    site: Any
    event: int = 0
    order: int = 0
    mine: int = 0  # of the waiter, when it waited


class Scope(NamedTuple):
    """A frame of the program when a race was found. ``streams``: expressions by actor;
    ``tensors``: those of the tensors that the race is about.
    """

    file: str
    line: int
    code: Any
    streams: dict[int, tuple[str, ...]]
    tensors: tuple[str, ...]


class RaceContext(NamedTuple):
    """Where a race was found. ``scopes``: innermost first; ``current``: the actors whose streams
    were current; ``blocks``: (stream, stream before) of each open ``with torch.cuda.stream(...)``,
    innermost first, -1 for other streams than the race's; ``created``: the places where streams
    were made, by actor.
    """

    scopes: tuple[Scope, ...]
    current: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    created: dict[int, Any] = {}  # noqa: RUF012 - never changed


class BlockHistory(NamedTuple):
    """What is known of the life of a block that was freed: places where it was allocated and
    freed, and what the program called it where another stream used it.
    """

    allocated: Any = None
    freed: Any = None
    names: tuple[str, ...] = ()


class Race(NamedTuple):
    """Two accesses in no order. ``syncs``: the last synchronisations between the two actors.
    ``owner``: the stream that the block was allocated on, -1 where that is not known. ``later``:
    operations that the first access's stream was given after it.
    """

    rule: Rule
    first: Access
    second: Access
    block: int
    log_index: int
    syncs: tuple[Sync, ...]
    owner: int = -1
    later: int = 0
    context: RaceContext | None = None
    history: BlockHistory | None = None


class TrackedBlock:
    """Live memory, and its accesses that later ones may race with."""

    __slots__ = (
        "address",
        "graphs",
        "inherited",
        "made",
        "maybe",
        "most_reads",
        "most_writes",
        "owner",
        "private",
        "reads",
        "size",
        "touched",
        "uses",
        "writes",
    )

    def __init__(self, address: int, size: int, owner: int = -1, private: bool = False) -> None:
        self.address = address
        self.size = size
        self.owner = owner  # the stream that it was allocated on
        self.private = private  # in a CUDA graph's own pool
        self.writes: list[Access] = []
        self.reads: list[Access] = []
        self.inherited: list[Access] = []
        self.maybe: tuple[Access, ...] = ()  # of memory that this block could have been given
        self.made: Any = None  # where it was allocated
        self.most_reads = self.most_writes = FEW  # before they are pruned
        self.touched = False
        self.uses: set[int] = set()  # actors that record_stream named
        self.graphs: tuple[int, ...] = ()  # captured graphs that use it


def coarser(accesses: list[Access]) -> list[Access]:
    """Half as many: each two neighbours of one actor as one, as late as the later of them."""
    actors: dict[int, list[Access]] = {}
    for access in accesses:
        actors.setdefault(access.actor, []).append(access)
    merged = []
    for one in actors.values():
        one.sort(key=lambda access: access.where)
        for at in range(0, len(one) - 1, 2):
            first, second = one[at], one[at + 1]
            high = max(first.where.high, second.where.high)
            newest = first if first.time >= second.time else second
            merged.append(newest._replace(where=Footprint(first.where.low, high)))
        if len(one) % 2:
            merged.append(one[-1])
    return merged


def rule_of(rule: Rule, first: Access, second: Access) -> Rule:
    """The rule that two accesses break which would break ``rule`` if they were ordinary ones."""
    if rule in (rules.GRAPH_FREED, rules.LATENT, rules.USE_AFTER_FREE):
        return rule
    if first.note == "process" and rule is rules.WRITE_AFTER_READ:
        return rules.SHARED
    if HOST in (first.actor, second.actor):
        if "numpy" in (first.note, second.note):
            return rules.HOST_ALIAS
        return rules.HOST_READ if second.actor == HOST and not second.write else rules.HOST_WRITE
    if first.write and first.note == "gradient":
        return replace(rules.GRADIENT, kind=rule.kind)
    if "graph" in (first.note, second.note):
        return replace(rules.GRAPH, kind=rule.kind)
    return rule
