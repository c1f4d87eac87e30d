"""Why the clocks of a GPU are below their maximum, by NVML."""

from __future__ import annotations

# nvml.h, nvmlClocksEventReasons. Some are normal: see the rule GP120.
THROTTLE_REASONS = {
    0x001: "idle",
    0x002: "application clocks setting",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal slowdown (software)",
    0x040: "thermal slowdown (hardware)",
    0x080: "power brake (hardware)",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability limit",
}


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """The reasons in a mask of `THROTTLE_REASONS`, in words."""
    reasons = [reason for bit, reason in THROTTLE_REASONS.items() if mask & bit]
    unknown = mask & ~sum(THROTTLE_REASONS)
    return tuple(reasons + ([f"reason {unknown:#x}"] if unknown else []))
