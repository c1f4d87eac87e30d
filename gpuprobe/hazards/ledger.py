"""Hazards of one line alone: implicit synchronisations, if no other rule is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpuprobe.hazards.events import Site
from gpuprobe.hazards.rules import IMPLICIT_SYNC
from gpuprobe.model.rules import Rule

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
class LineEntry:
    """What one line did against ``rule``, for one reason. ``seconds``: time lost, measured on CUDA
    only; None if unknown. ``allowed``: the program allows it there.
    """

    reason: str
    site: Site
    count: int = 0
    seconds: float | None = None
    allowed: bool = False
    rule: Rule = IMPLICIT_SYNC


class LineLedger:
    """Hazards of one line alone, by line and reason."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, Site], LineEntry] = {}

    def add(
        self, reason: str, site: Site, *, allowed: bool = False, rule: Rule = IMPLICIT_SYNC
    ) -> None:
        """Count one more. A reason belongs to one rule."""
        entry = self.entries.get((reason, site))
        if entry is None:
            entry = LineEntry(reason, site, allowed=allowed, rule=rule)
            self.entries[(reason, site)] = entry
        entry.count += 1

    def lost(self, reason: str, site: Site, seconds: float) -> None:
        """Add the time that the host waited in the synchronisation that was just added."""
        entry = self.entries.get((reason, site))
        if entry is not None:
            entry.seconds = (entry.seconds or 0.0) + seconds
