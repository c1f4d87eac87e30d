"""Accesses to blocks of memory, the blocks that keep them, and races between two of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from types import CodeType
from typing import Final, Literal, NamedTuple

from gpuprobe.hazards import rules
from gpuprobe.hazards.events import HOST, Operator, Site
from gpuprobe.hazards.footprint import Footprint
from gpuprobe.hazards.untracked import untrack
from gpuprobe.model.rules import Rule

_NONE: Final[frozenset[int]] = frozenset()
FEW: Final = 8
"""Accesses that a block keeps before it is worth pruning them."""


class BlockHistory:
    """The life of a block: the places where it was allocated and freed. Its accesses share it."""

    __slots__ = ("allocated", "freed")

    def __init__(self) -> None:
        self.allocated: Site = None
        self.freed: Site = None


class Access(NamedTuple):
    """One operator's touch of one block. ``time`` counts the actor's operations."""

    actor: int
    time: int
    where: Footprint
    write: bool
    op: Operator
    site: Site
    note: str = ""  # "graph", "gradient", "numpy", "process": the kind of its operation
    history: BlockHistory | None = None


class Sync(NamedTuple):
    """A synchronisation that the program requested."""

    kind: Literal["record", "wait", "self-wait", "wait-unrecorded", "host-wait"]
    waiter: int
    source: int
    source_time: int  # when it was recorded
    site: Site
    event: int = 0
    waiter_time: int = 0  # when it waited


class Scope(NamedTuple):
    """A frame of the program when a race was found. ``streams``: expressions by actor;
    ``tensors``: those of the tensors that race.
    """

    file: str
    line: int
    code: CodeType
    streams: dict[int, tuple[str, ...]]
    tensors: tuple[str, ...]


class RaceContext(NamedTuple):
    """Where a race was found. ``scopes``: innermost first; ``current``: the actors whose streams
    were current; ``blocks``: (stream, stream before) of each open ``with torch.cuda.stream(...)``,
    innermost first, -1 for other streams than the race's; ``created``: the places where streams
    were created, by actor.
    """

    scopes: tuple[Scope, ...]
    current: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    created: dict[int, Site] = {}  # noqa: RUF012 - never changed


class Race(NamedTuple):
    """Two unordered accesses. ``log_index``: the event of the second one, -1 without a log;
    ``syncs``: the last synchronisations between the two actors; ``owner``: the stream that the
    block was allocated on, -1 if unknown; ``later``: operations that the first access's stream got
    after it.
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

    @property
    def history(self) -> BlockHistory | None:
        """The life of the block that the first access touched."""
        return self.first.history

    @property
    def identity(self) -> Hashable:
        """Equal for the same race in another replay of the log."""
        return (self.rule.id, self.first.actor, self.first.time, self.block, self.second.site)


class TrackedBlock:
    """Live memory, and its accesses that later ones may race with."""

    __slots__ = (
        "address",
        "graphs",
        "history",
        "inherited",
        "most_reads",
        "most_writes",
        "owner",
        "private",
        "reads",
        "recorded",
        "reusable",
        "size",
        "writes",
    )

    def __init__(self, address: int, size: int, owner: int = -1, private: bool = False) -> None:
        self.address = address
        self.size = size
        self.owner = owner  # the stream that it was allocated on
        self.private = private  # in a CUDA graph's own pool
        self.writes: list[Access] = []
        self.reads: list[Access] = []
        self.inherited: Sequence[Access] = ()  # of the former owners of its bytes
        self.reusable: tuple[Access, ...] = ()  # of memory that this block could have got
        self.history = BlockHistory()
        self.most_reads = self.most_writes = FEW  # before they are pruned
        self.recorded: frozenset[int] = _NONE  # actors of `RecordStream`
        self.graphs: tuple[int, ...] = ()  # captured graphs that use it
        for part in (self, self.writes, self.reads, self.history):
            untrack(part)

    def uses(self) -> list[Access]:
        """Its own accesses."""
        return self.writes + self.reads


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
