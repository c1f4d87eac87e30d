"""The state of an allocator: pools, blocks in use, and counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpuprobe.allocator.blocks import BlockPool, FreeList, PoolBlock, PrivatePool, TieRule
from gpuprobe.allocator.driver import Driver, SimulatedDriver
from gpuprobe.allocator.rules import NO_LIMIT, limit
from gpuprobe.allocator.settings import memory_fraction
from gpuprobe.model.trace import AllocatorSettings

Listener = Callable[[int, int, int, int, int], None]
"""Called with (action code, address, size, stream, pool index) for each trace entry that torch
would record, in torch's order."""

# Device memory that sizes an expandable segment if the real amount is unknown: 1 TiB, more than any
# device has, so that the range never fills up.
_UNKNOWN_DEVICE: Final = 1 << 40


class AllocatorState:
    """The state of one device's caching allocator, without its rules.

    ``device_memory`` (bytes, None: unknown) sizes expandable segments, and with
    ``per_process_memory_fraction`` the allowed maximum that garbage collection needs.
    ``tie_rule`` decides between equal blocks.

    Counters, in bytes: ``allocated``, ``active`` (allocated and pending), ``requested``
    (before rounding, of active blocks), ``reserved``; in calls: ``device_allocs``,
    ``device_frees``, ``retries``, ``ooms``. ``live`` maps addresses to active blocks.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        driver: Driver | None = None,
        *,
        device_memory: int | None = None,
        tie_rule: TieRule = "address",
        listener: Listener | None = None,
    ) -> None:
        self.driver: Driver = driver if driver is not None else SimulatedDriver()
        self.listener = listener
        self.tie_rule = tie_rule
        self.device_memory = device_memory if device_memory is not None else _UNKNOWN_DEVICE
        self._fraction_of = device_memory
        self._fraction = 1.0
        self.allowed_maximum: int | None = None
        self.configure(settings if settings is not None else AllocatorSettings())
        self.pools: dict[int, PrivatePool] = {0: PrivatePool(0, tie_rule)}
        self.live: dict[int, PoolBlock] = {}
        self.orders = 0
        # Captures in progress: pool, and the streams that are directed to it (None: all).
        self.captures: list[tuple[int, frozenset[int] | None]] = []

        self.allocated = 0
        self.active = 0
        self.requested = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        self.active_at_peak = 0  # active bytes when reserved first reached its peak
        self.device_allocs = 0
        self.device_frees = 0
        self.retries = 0
        self.ooms = 0

    def configure(self, settings: AllocatorSettings) -> None:
        """Use these settings from now on. A limit that was set separately stays, unless the
        settings name a different one than before.
        """
        fraction = memory_fraction(settings)
        if fraction != self._fraction:
            self._fraction = fraction
            self.allowed_maximum = None
            if fraction < 1.0 and self._fraction_of is not None:
                self.allowed_maximum = int(fraction * self._fraction_of)
        self.settings = settings
        self.gc_enabled = (
            self.allowed_maximum is not None and settings.garbage_collection_threshold > 0
        )
        self.max_split = limit(settings.max_split_size)
        self.plain_rounding = not any(settings.roundup_power2_divisions.values())
        # The short search is right as long as only size and tie rule select a block.
        self.plain_search = (
            not settings.expandable_segments and self.max_split == NO_LIMIT and not self.gc_enabled
        )

    def grow(self, size: int) -> None:
        """Count ``size`` more reserved bytes."""
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
            self.active_at_peak = self.active

    def pool(
        self,
        index: int,
        *,
        own_allocator: bool = False,
        no_split: bool = False,
        use_on_oom: bool = False,
    ) -> PrivatePool:
        """The pool with this index, created on first use with these traits."""
        found = self.pools.get(index)
        if found is None:
            found = self.pools[index] = PrivatePool(index, self.tie_rule)
            found.own_allocator = own_allocator
            found.no_split = no_split
            found.use_on_oom = use_on_oom
        return found

    def halves(self) -> list[BlockPool]:
        """The small and large half of every pool."""
        return [half for owner in self.pools.values() for half in (owner.small, owner.large)]

    def order_within(self, block: PoolBlock) -> int:
        """The number of a new block that is part of ``block``."""
        return block.order if self.tie_rule == "segment" else self.next_order()

    def next_order(self) -> int:
        """The number of the next block, in order of registration."""
        self.orders += 1
        return self.orders

    def emit(self, action: int, address: int, size: int, free_list: FreeList) -> None:
        """Report a trace entry to the listener."""
        if self.listener is not None:
            self.listener(action, address, size, free_list.stream, free_list.pool.owner.index)
