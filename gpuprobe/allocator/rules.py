"""The caching allocator's constants and arithmetic.

Every value and rule is from PyTorch's ``c10/cuda/CUDACachingAllocator.cpp`` and
``c10/core/AllocatorConfig.cpp`` (named per item); all sizes are bytes.
"""

from __future__ import annotations

from gpuprobe.model.trace import AllocatorSettings

MIB = 1 << 20

MIN_BLOCK = 512
"""``kMinBlockSize``: every block is a multiple of this."""

SMALL_LIMIT = MIB
"""``kSmallSize``: rounded sizes up to this come from the small pool."""

SMALL_SEGMENT = 2 * MIB
"""``kSmallBuffer``: size of the segments of the small pool."""

MIN_LARGE = 10 * MIB
"""``kMinLargeAlloc``: below this the large pool allocates a whole ``large_segment_size``."""

ROUND_LARGE = 2 * MIB
"""``kRoundLarge``: from ``MIN_LARGE`` on, segments are multiples of this."""

PAGE_SMALL = SMALL_SEGMENT
"""Pages of an expandable segment in the small pool; in the large pool they are
``large_segment_size`` (``find_expandable_block``)."""

NO_LIMIT = 1 << 62
"""Takes the place of ``numeric_limits<size_t>::max()``: larger than any size, and still fast."""


def limit(value: int) -> int:
    """A size limit as a number; negative values mean no limit."""
    return value if value >= 0 else NO_LIMIT


def round_up(size: int, step: int) -> int:
    """``size`` up to a multiple of ``step``."""
    return (size + step - 1) // step * step


def divisions_for(size: int, settings: AllocatorSettings) -> int:
    """The ``roundup_power2_divisions`` that apply to a request of ``size`` bytes, 0 for none.

    Sixteen classes, by powers of two from 1 MiB to 32 GiB; smaller and larger requests use
    the first and the last (``AcceleratorAllocatorConfig::roundup_power2_divisions``).
    """
    table = settings.roundup_power2_divisions
    if not table:
        return 0
    index = min(max(size.bit_length() - 1 - 20, 0), 15)
    return table.get(1 << index, 0)


def round_size(size: int, settings: AllocatorSettings | None = None) -> int:
    """The block size for a request of ``size`` bytes (``round_size``).

    At least 512 and a multiple of 512, or, with power-of-two divisions, up to the next of
    the equal steps between two powers of two (``roundup_power2_next_division``).
    """
    if size < MIN_BLOCK:
        return MIN_BLOCK
    if settings is not None:
        divisions = divisions_for(size, settings)
        if divisions > 1 and size > MIN_BLOCK * divisions:
            if size & (size - 1) == 0:
                return size
            floor = 1 << (size.bit_length() - 1)
            step = floor >> (divisions.bit_length() - 1)
            return floor << 1 if step == 0 else round_up(size, step)
    return (size + 511) & ~511


def allocation_size(rounded: int, large_segment_size: int) -> int:
    """Bytes of the segment that is allocated for a block of ``rounded`` bytes
    (``get_allocation_size``)."""
    if rounded <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if rounded < MIN_LARGE:
        return large_segment_size
    return round_up(rounded, ROUND_LARGE)


def expandable_span(device_memory: int, page: int) -> int:
    """Address space of one expandable segment: 9/8 of the device's memory, in whole pages
    (``ExpandableSegment``'s constructor)."""
    return round_up(device_memory + device_memory // 8, page)


def max_slack(rounded: int, *, small: bool, expandable: bool, settings: AllocatorSettings) -> int:
    """The most bytes a block may have beyond its rounded size (from ``should_split``).

    A remainder of 512 bytes is split off in the small pool and in expandable segments; in
    the large pool it must exceed 1 MiB, and blocks of at least ``max_split_size`` are never
    split.
    """
    if small or expandable:
        return 0
    if rounded >= limit(settings.max_split_size):
        return NO_LIMIT
    return SMALL_LIMIT
