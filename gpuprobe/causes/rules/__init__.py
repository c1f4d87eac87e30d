"""The rules, in the order in which they are called.

`RULES` are about groups of memory that is not needed; the first that knows a group names its cause.
A rule is a function from a `HeldGroup` to an `Answer`, to `EXPECTED` if the group is as it must be,
or None. `LARGER` are about memory that is larger than it must be: functions from a `LiveMemory` to
each `Excess`. `CACHED` are about memory in the allocator's cache; the first that knows it counts.
To add one: a file here, and a line in one of the three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from gpuprobe.causes.answer import Answer, Expected
from gpuprobe.causes.cache import Cache, CachedMemory
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.causes.rules import (
    activations,
    attention,
    autocast,
    broadcasts,
    conversions,
    cycles,
    data_parallel,
    early,
    embeddings,
    exceptions,
    files,
    fragments,
    gradients,
    graph_pools,
    graphs,
    holders,
    joins,
    log_softmaxes,
    loss_results,
    losses,
    one_hot,
    optimizer_state,
    optimizers,
    padding,
    partly_used,
    recomputed,
    reduced,
    repeats,
    streams,
    unpacked,
    unread,
    unread_saved,
    vmapped,
)

RULES: Final[tuple[Callable[[HeldGroup], Answer | Expected | None], ...]] = (
    graph_pools.replayed,
    loss_results.diagnose,
    early.diagnose,
    gradients.diagnose,
    cycles.diagnose,
    exceptions.diagnose,
    autocast.diagnose,
    files.diagnose,
    optimizer_state.diagnose,
    graphs.diagnose,
    holders.diagnose,
)

LARGER: Final[tuple[Callable[[LiveMemory], Iterator[Excess]], ...]] = (
    unread.diagnose,
    repeats.diagnose,
    repeats.gathered,
    broadcasts.diagnose,
    joins.diagnose,
    partly_used.diagnose,
    conversions.diagnose,
    conversions.kept_wide,
    one_hot.diagnose,
    optimizers.diagnose,
    recomputed.diagnose,
    vmapped.diagnose,
    data_parallel.diagnose,
    losses.diagnose,
    log_softmaxes.diagnose,
    padding.diagnose,
    reduced.diagnose,
    embeddings.diagnose,
    activations.diagnose,
    attention.diagnose,
    unpacked.diagnose,
    unread_saved.diagnose,
    autocast.between_steps,
)

CACHED: Final[tuple[Callable[[Cache], Iterator[CachedMemory]], ...]] = (
    streams.diagnose,
    graph_pools.diagnose,
    fragments.diagnose,
)
