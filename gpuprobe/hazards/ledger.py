"""Implicit synchronisations: lines where the host waits for the GPU without an explicit wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpuprobe.hazards.events import Site

REPLACEMENTS: Final = {
    "item": "accumulate on the device and read it every N steps, or copy it with "
    "non_blocking=True and read it later",
    "nonzero": "torch.where with three arguments, or masked arithmetic, keeps the shape fixed",
    "mask": "masked_fill or torch.where in place of indexing with a boolean mask",
    "copy to host": "a pinned buffer, non_blocking=True and an event",
    "copy from pageable memory": "pin_memory() or DataLoader(pin_memory=True), with "
    "non_blocking=True",
    "new tensor from host values": "create it once, outside the loop, or on the device",
    "number assigned to an element": "fill_() of the element, which launches a kernel",
    "unique": "unavoidable: its size depends on values",
    "repeat_interleave": "pass output_size=",
    "empty_cache": "remove it from the loop: it waits for the device and frees memory that the "
    "next step allocates again",
    "check of a matrix": "the variant whose name ends in _ex, such as inv_ex, whose info can be "
    "read later",
    "equal": "compare on the device and read the result later",
}
"""The usual replacement, by reason."""


@dataclass(slots=True)
class SyncEntry:
    """One line's implicit synchronisations, for one reason. ``seconds``: time lost, measured on
    CUDA only; None if unknown.
    """

    reason: str
    site: Site
    count: int = 0
    seconds: float | None = None
    allowed: bool = False


class SyncLedger:
    """All implicit synchronisations, by line and reason."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, Site], SyncEntry] = {}

    def add(
        self, reason: str, site: Site, *, seconds: float | None = None, allowed: bool = False
    ) -> None:
        entry = self.entries.get((reason, site))
        if entry is None:
            entry = self.entries[(reason, site)] = SyncEntry(reason, site, allowed=allowed)
        entry.count += 1
        if seconds is not None:
            entry.seconds = (entry.seconds or 0.0) + seconds

    def lost(self, reason: str, site: Site, seconds: float) -> None:
        """Add the time that the host waited in the synchronisation that was just added."""
        entry = self.entries.get((reason, site))
        if entry is not None:
            entry.seconds = (entry.seconds or 0.0) + seconds

    @property
    def total(self) -> int:
        """Synchronisations that were not allowed."""
        return sum(entry.count for entry in self.entries.values() if not entry.allowed)
