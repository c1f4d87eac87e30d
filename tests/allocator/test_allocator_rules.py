"""One test per rule of the allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from allocator_programs import MIB, pool_of
from streamed_simulator import StreamedSimulator

from gpuprobe.allocator import expandable
from gpuprobe.allocator.driver import ADDRESS_ORDERS, SimulatedDriver
from gpuprobe.allocator.evidence import TieEvidence
from gpuprobe.allocator.layout import segments
from gpuprobe.allocator.rules import allocation_size, round_size
from gpuprobe.allocator.settings import parse_conf
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.errors import InternalError
from gpuprobe.model.memory import BlockState, TraceAction
from gpuprobe.model.trace import AllocatorSettings

KIB = 1024


def simulator(conf: str = "", capacity: int | None = None, **kwargs: object) -> StreamedSimulator:
    memory = kwargs.pop("device_memory", capacity)
    return StreamedSimulator(
        parse_conf(conf),
        SimulatedDriver(capacity, str(kwargs.pop("order", "ascending"))),
        device_memory=memory,  # type: ignore[arg-type]
        **kwargs,  # type: ignore[arg-type]
    )


def take(sim: Simulator, size: int, stream: int = 0, pool: int = 0):
    block = sim.malloc(size, stream, pool)
    assert block is not None
    return block


@pytest.mark.parametrize(
    ("requested", "rounded"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (1024, 1024), (MIB + 1, MIB + 512)],
)
def test_rounding_is_to_512_bytes(requested: int, rounded: int) -> None:
    assert round_size(requested) == rounded


@pytest.mark.parametrize(
    ("requested", "divisions", "rounded"),
    [
        (1200, 4, 1536),  # not above 512 * 4: plain rounding
        (4096, 4, 4096),  # powers of two stay
        (4097, 4, 5120),
        (5120, 4, 5120),
        (7 * MIB + 1, 4, 8 * MIB),
        (5 * MIB, 8, 5 * MIB),
        (5 * MIB + 1, 8, 5 * MIB + 512 * KIB),
        (3 * MIB, 1, 3 * MIB),  # one division is none
    ],
)
def test_power_of_two_divisions(requested: int, divisions: int, rounded: int) -> None:
    table = {1 << i: divisions for i in range(16)}
    settings = AllocatorSettings(roundup_power2_divisions=table)
    assert round_size(requested, settings) == rounded


def test_divisions_depend_on_the_size_class() -> None:
    settings = parse_conf("roundup_power2_divisions:[4:2,16:8,>:1]")
    assert round_size(3 * MIB + 512, settings) == 4 * MIB  # the first interval covers smaller
    assert round_size(5 * MIB, settings) == 6 * MIB
    assert round_size(9 * MIB, settings) == 9 * MIB  # 8 MiB was not named: off
    assert round_size(17 * MIB, settings) == 18 * MIB
    assert round_size(33 * MIB, settings) == 33 * MIB


@pytest.mark.parametrize(
    ("rounded", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_segment_sizes(rounded: int, segment: int) -> None:
    assert allocation_size(rounded, 20 * MIB) == segment


def test_large_segment_size_replaces_20_mib() -> None:
    sim = simulator("large_segment_size_mb:32")
    take(sim, 2 * MIB)
    assert sim.reserved == 32 * MIB


def test_small_and_large_pools_are_apart() -> None:
    sim = simulator()
    large = take(sim, 2 * MIB)
    small = take(sim, MIB)
    assert large.free_list.pool is not small.free_list.pool
    assert sim.reserved == 22 * MIB


def test_best_fit_takes_the_smallest_block_then_the_lowest_address() -> None:
    sim = simulator()
    blocks = [take(sim, size * MIB) for size in (30, 24, 30, 24)]
    for block in blocks:
        sim.free(block)
    lowest = min(blocks[1].address, blocks[3].address)
    assert take(sim, 23 * MIB).address == lowest


def test_ties_by_registration_take_the_older_block() -> None:
    sim = simulator(order="descending", tie_rule="block")
    older, newer = take(sim, 24 * MIB), take(sim, 24 * MIB)
    assert newer.address < older.address
    first = older.address
    sim.free(newer)
    sim.free(older)
    assert take(sim, 24 * MIB).address == first


def test_streams_do_not_share_free_blocks() -> None:
    sim = simulator()
    block = take(sim, 24 * MIB, stream=1)
    sim.free(block)
    assert take(sim, 24 * MIB, stream=2).address != block.address
    assert take(sim, 24 * MIB, stream=1).address == block.address


def test_small_blocks_split_from_512_bytes_on() -> None:
    sim = simulator()
    block = take(sim, MIB)
    assert block.size == MIB
    assert block.next is not None
    assert block.next.size == MIB


def test_large_blocks_split_only_above_a_remainder_of_1_mib() -> None:
    sim = simulator()
    assert take(sim, 19 * MIB).size == 20 * MIB  # cudaMalloc of 20 MiB: remainder 1 MiB stays
    assert take(sim, 9 * MIB).size == 9 * MIB


def test_the_low_part_of_a_split_is_returned() -> None:
    sim = simulator()
    block = take(sim, 4 * MIB)
    assert block.prev is None
    assert block.next is not None
    assert block.next.address == block.address + 4 * MIB


def test_max_split_size_keeps_large_blocks_whole_and_for_large_requests() -> None:
    sim = simulator("max_split_size_mb:32")
    big = take(sim, 40 * MIB)
    sim.free(big)
    assert take(sim, 8 * MIB).address != big.address  # refused: the block is oversize
    assert sim.reserved == 60 * MIB
    assert take(sim, 33 * MIB).address == big.address  # oversize request, within the rounding


def test_max_non_split_rounding_bounds_the_waste() -> None:
    sim = simulator("max_split_size_mb:32,max_non_split_rounding_mb:24")
    big = take(sim, 80 * MIB)
    sim.free(big)
    assert take(sim, 40 * MIB).address != big.address  # 80 >= 40 + 24
    assert take(sim, 60 * MIB).address == big.address


def test_free_blocks_merge_with_both_neighbours() -> None:
    sim = simulator()
    first, second, third = (take(sim, 5 * MIB) for _ in range(3))
    sim.free(first)
    sim.free(third)
    sim.free(second)
    (segment,) = segments(sim)
    assert [b.size for b in segment.blocks] == [20 * MIB]
    assert segment.blocks[0].state is BlockState.INACTIVE


def test_freeing_twice_is_an_error() -> None:
    sim = simulator()
    block = take(sim, 512)
    sim.free(block)
    with pytest.raises(InternalError, match="not allocated"):
        sim.free(block)


def test_record_stream_delays_the_free_until_the_stream_is_done() -> None:
    sim = simulator()
    block = take(sim, 24 * MIB)
    sim.record_stream(block, 7)
    sim.free(block)
    assert (sim.allocated, sim.active) == (0, 24 * MIB)
    other = take(sim, 24 * MIB)
    assert other.address != block.address
    sim.finish(7)
    assert take(sim, 24 * MIB).address == block.address


def test_record_stream_on_its_own_stream_changes_nothing() -> None:
    sim = simulator()
    block = take(sim, 24 * MIB, stream=7)
    sim.record_stream(block, 7)
    sim.free(block)
    assert sim.active == 0


def test_empty_cache_frees_whole_segments_only() -> None:
    sim = simulator()
    kept, whole = take(sim, 4 * MIB), take(sim, 30 * MIB)
    sim.free(whole)
    sim.empty_cache()
    assert sim.reserved == 20 * MIB
    assert sim.device_frees == 1
    sim.free(kept)
    sim.empty_cache()
    assert sim.reserved == 0


def test_out_of_memory_first_flushes_the_cache_and_tries_again() -> None:
    sim = simulator(capacity=64 * MIB)
    sim.free(take(sim, 40 * MIB))
    block = take(sim, 50 * MIB)
    assert block.size == 50 * MIB
    assert (sim.retries, sim.ooms, sim.reserved) == (1, 0, 50 * MIB)


def test_out_of_memory_waits_for_streams_but_does_not_search_again() -> None:
    actions = []
    sim = simulator(capacity=64 * MIB, listener=lambda *event: actions.append(event[0]))
    pinned, block = take(sim, 4 * MIB), take(sim, 12 * MIB)
    sim.record_stream(block, 7)
    sim.free(block)
    assert sim.malloc(60 * MIB) is None
    assert sim.ooms == 1
    assert actions[-1] == TraceAction.OOM.code
    assert sim.active == pinned.size


def test_available_blocks_are_released_only_with_max_split() -> None:
    sim = simulator("max_split_size_mb:32", capacity=100 * MIB)
    small, big = take(sim, 20 * MIB), take(sim, 70 * MIB)
    sim.free(small)
    sim.free(big)
    take(sim, 80 * MIB - 512)
    # Freeing the one oversize block was not enough, so everything was released.
    assert sim.reserved == 80 * MIB
    sim = simulator("max_split_size_mb:32", capacity=140 * MIB)
    small, big = take(sim, 20 * MIB), take(sim, 110 * MIB)
    sim.free(small)
    sim.free(big)
    take(sim, 80 * MIB)
    assert sim.retries == 0  # the oversize block was enough: the small one is still cached
    assert sim.reserved == 100 * MIB


def test_several_oversize_blocks_are_released_together() -> None:
    sim = simulator("max_split_size_mb:32", capacity=200 * MIB)
    held = [take(sim, size * MIB) for size in (20, 40, 60, 70)]
    for block in held:
        sim.free(block)
    take(sim, 120 * MIB)
    # The largest ones, until they are enough; the others are still cached.
    assert sim.retries == 0
    assert sim.reserved == (20 + 40 + 120) * MIB


def test_garbage_collection_frees_the_old_segments() -> None:
    conf = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.99"
    sim = simulator(conf, capacity=200 * MIB)
    old, young = take(sim, 60 * MIB), take(sim, 44 * MIB)
    sim.free(old)
    for _ in range(5):
        sim.free(take(sim, 12 * MIB, stream=3))
    sim.free(young)
    take(sim, 50 * MIB)
    held = {s.address for s in segments(sim)}
    assert old.address not in held
    assert young.address in held


def test_garbage_collection_frees_a_single_cached_segment() -> None:
    """Its age is the mean: as old as that is old enough."""
    conf = "garbage_collection_threshold:0.25,per_process_memory_fraction:0.99"
    sim = simulator(conf, capacity=200 * MIB)
    cached = take(sim, 60 * MIB)
    sim.free(cached)
    take(sim, 70 * MIB, stream=3)
    assert [segment.total_size for segment in segments(sim)] == [70 * MIB]


def test_garbage_collection_continues_until_reserved_is_below_the_threshold() -> None:
    """Round by round, the oldest first: one is not enough here, and a third is not needed."""
    conf = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.99"
    sim = simulator(conf, capacity=200 * MIB)
    take(sim, 4 * MIB, stream=9)  # what else is taken of its segment needs no new one
    take(sim, 20 * MIB)
    kept = [take(sim, 30 * MIB) for _ in range(3)]
    assert sim.reserved == (20 + 20 + 3 * 30) * MIB  # 31 MiB above the threshold of 99
    for block, searches in zip(kept, (7, 1, 0), strict=True):
        sim.free(block)
        for _ in range(searches):
            sim.free(take(sim, 4 * MIB, stream=9))
    take(sim, 40 * MIB)  # the ages are now 9, 2 and 1: only the first is above the mean
    held = {segment.address for segment in segments(sim)}
    assert [block.address in held for block in kept] == [False, False, True]


def test_garbage_collection_needs_a_memory_fraction() -> None:
    sim = simulator("garbage_collection_threshold:0.1", capacity=200 * MIB)
    sim.free(take(sim, 40 * MIB))
    take(sim, 50 * MIB)
    assert sim.device_frees == 0


def test_expandable_segments_grow_page_by_page() -> None:
    sim = simulator("expandable_segments:True", device_memory=1 << 30)
    first = take(sim, 30 * MIB)
    assert sim.reserved == 40 * MIB  # two pages of 20 MiB
    second = take(sim, 30 * MIB)
    assert sim.reserved == 60 * MIB
    assert second.address == first.address + 30 * MIB
    (segment,) = segments(sim)
    assert segment.is_expandable
    assert segment.total_size == 60 * MIB
    take(sim, 512)
    assert sim.reserved == 62 * MIB  # the small pool has pages of 2 MiB


def test_expandable_segments_span_nine_eighths_of_the_device() -> None:
    sim = simulator("expandable_segments:True", device_memory=160 * MIB)
    take(sim, 20 * MIB)
    (free_list,) = sim.pools[0].large.streams.values()
    assert free_list.unmapped[0].size == 160 * MIB  # 180 MiB less the mapped 20


def test_a_block_of_the_limit_is_not_split_for_less() -> None:
    sim = simulator("max_split_size_mb:32")
    large = take(sim, 32 * MIB)
    sim.free(large)
    assert take(sim, 30 * MIB).address != large.address
    assert take(sim, 32 * MIB).address == large.address


def test_an_address_range_is_shortened_at_its_end() -> None:
    """A page of 20 MiB at its begin is mapped; 160 MiB are not."""

    def shortened(size: int, end: int, *, free_page: bool = False) -> int:
        sim = simulator("expandable_segments:True", device_memory=160 * MIB)
        page = take(sim, 20 * MIB)
        (free_list,) = sim.pools[0].large.streams.values()
        (unmapped,) = free_list.unmapped
        assert not expandable.shorten(page, MIB, 0)  # in use
        if free_page:
            sim.free(page)
        start = unmapped.prev if free_page else unmapped
        assert expandable.shorten(start, size * MIB, unmapped.address + end * MIB)
        left = sum(block.size for block in free_list.unmapped)
        assert unmapped.expandable.span == 20 * MIB + left
        return left // MIB

    assert shortened(size=100, end=160) == 80  # the most that is smaller than the request
    assert shortened(size=100, end=40) == 40
    assert shortened(size=100, end=160, free_page=True) == 60  # the run begins with the page
    assert shortened(size=20, end=160) == 0


def test_older_blocks_of_one_size_are_taken_in_the_order_that_the_trace_shows() -> None:
    sim = simulator(tie_rule="block")
    blocks = [take(sim, 20 * MIB) for _ in range(3)]
    addresses = [block.address for block in blocks]
    for block in blocks:
        sim.free(block)
    first, second, third = addresses
    known = TieEvidence()
    known.unknown = max(block.order for block in blocks)
    known.order_by([sim.pools[0].large], [third, first])
    assert [take(sim, 20 * MIB).address for _ in range(3)] == [third, second, first]


@pytest.mark.parametrize("order", ADDRESS_ORDERS)
def test_a_driver_without_limit_has_no_more_than_any_device(order: str) -> None:
    driver = SimulatedDriver(order=order)
    tib = 1 << 40
    assert driver.allocate(4 * tib + 1, 0, 0) is None
    assert driver.reserve(1 << 62, 0, 0) is None
    addresses = [driver.allocate(4 * tib, 0, 0) for _ in range(16)]
    assert None not in addresses
    assert len(set(addresses)) == 16
    assert driver.allocate(1, 0, 0) is None
    assert driver.used == 64 * tib


def test_more_than_an_expandable_segment_can_span_is_out_of_memory() -> None:
    sim = simulator("expandable_segments:True", device_memory=160 * MIB)
    assert sim.malloc(181 * MIB) is None
    assert sim.ooms == 1
    assert sim.malloc(180 * MIB) is not None


def test_expandable_segments_unmap_only_whole_empty_pages() -> None:
    sim = simulator("expandable_segments:True", device_memory=1 << 30)
    kept, freed = take(sim, 30 * MIB), take(sim, 50 * MIB)
    sim.free(freed)
    sim.empty_cache()
    assert sim.reserved == 40 * MIB  # [30, 40) shares a page with the kept block
    again = take(sim, 50 * MIB)
    assert again.address == freed.address  # the lowest place: the rest of the page, then more
    sim.free(kept)
    sim.free(again)
    sim.empty_cache()
    assert sim.reserved == 0


def test_expandable_best_fit_counts_the_room_to_grow() -> None:
    sim = simulator("expandable_segments:True", device_memory=1 << 30)
    first, wall, last = take(sim, 12 * MIB), take(sim, 2 * MIB), take(sim, 6 * MIB)
    bounded = first.address  # splitting a free block moves the part that stays free
    sim.free(first)
    sim.free(last)
    # The last block has 6 MiB and fits best, but it could grow: the bounded hole is taken.
    assert take(sim, 5 * MIB).address == bounded
    assert wall.allocated


def test_expandable_blocks_are_skipped_when_switched_off() -> None:
    sim = simulator("expandable_segments:True", device_memory=1 << 30)
    block = take(sim, 30 * MIB)
    sim.free(block)
    sim.settings = replace(sim.settings, expandable_segments=False)
    assert take(sim, 24 * MIB).expandable is None


def test_private_pools_keep_their_memory_to_themselves() -> None:
    sim = simulator()
    sim.begin_capture(1)
    private = take(sim, 24 * MIB, pool=pool_of(sim, 0))
    sim.free(private)
    sim.end_capture(1)
    assert take(sim, 24 * MIB).address != private.address
    sim.begin_capture(1)
    assert take(sim, 24 * MIB, pool=1).address == private.address


def test_private_pools_are_released_once_they_have_no_owner() -> None:
    sim = simulator()
    sim.begin_capture(1)
    sim.free(take(sim, 24 * MIB, pool=1))
    sim.end_capture(1)
    sim.empty_cache()
    assert sim.reserved == 24 * MIB
    sim.release_pool(1)
    sim.empty_cache()
    assert sim.reserved == 0


def test_the_last_capture_of_a_stream_wins() -> None:
    sim = simulator()
    sim.begin_capture(1)
    sim.begin_capture(2, frozenset({5}))
    assert (pool_of(sim, 5), pool_of(sim, 6)) == (2, 1)
    sim.end_capture(2)
    assert pool_of(sim, 5) == 1
    with pytest.raises(InternalError, match="no capture"):
        sim.end_capture(2)


def test_nothing_is_released_during_a_capture() -> None:
    sim = simulator(capacity=64 * MIB)
    sim.free(take(sim, 40 * MIB))
    sim.begin_capture(1, frozenset({0}))
    assert sim.malloc(50 * MIB, 0, 1) is None
    assert (sim.device_frees, sim.retries) == (0, 0)


def test_streams_outside_of_a_capture_still_make_room() -> None:
    """Two segments are cached; the second request needs the bytes of both."""
    sim = simulator(capacity=64 * MIB)
    for block in [take(sim, 30 * MIB), take(sim, 30 * MIB)]:
        sim.free(block)
    sim.begin_capture(1, frozenset({7}))
    assert take(sim, 50 * MIB).address
    assert (sim.device_frees, sim.retries) == (2, 1)


def test_pools_make_room_as_the_default_one_does() -> None:
    sim = simulator(capacity=64 * MIB)
    sim.free(take(sim, 40 * MIB))
    sim.begin_capture(1)
    assert take(sim, 50 * MIB, pool=1).address
    assert (sim.device_frees, sim.retries) == (1, 1)


def test_frees_during_a_capture_wait_for_its_end() -> None:
    sim = simulator()
    sim.begin_capture(1, frozenset({0}))
    block = take(sim, 24 * MIB, pool=1)
    sim.record_stream(block, 7)
    sim.free(block)
    sim.end_capture(1)
    assert sim.active == 24 * MIB
    take(sim, 512)  # the next request outside of a capture settles it: the use was captured
    assert sim.active == 512


def test_no_split_pools_hand_out_whole_blocks() -> None:
    sim = simulator()
    sim.pool(1, no_split=True)
    assert take(sim, 4 * MIB, pool=1).size == 20 * MIB


def test_pools_marked_use_on_oom_help_out() -> None:
    sim = simulator(capacity=40 * MIB)
    sim.pool(1, use_on_oom=True)
    spare = take(sim, 30 * MIB, pool=1)
    sim.free(spare)
    assert take(sim, 30 * MIB).address == spare.address
    assert sim.retries == 0


def test_what_is_left_of_an_overflow_stays_in_its_pool() -> None:
    sim = simulator(capacity=40 * MIB)
    sim.pool(1, use_on_oom=True)
    sim.free(take(sim, 30 * MIB, pool=1))
    block = take(sim, 20 * MIB)
    assert block.next is not None
    assert block.next.free_list.pool.owner.index == block.free_list.pool.owner.index == 1
    sim.free(block)
    assert take(sim, 30 * MIB, pool=1).address == block.address


def test_custom_allocators_of_pools_use_no_expandable_segments() -> None:
    sim = simulator("expandable_segments:True", device_memory=1 << 30)
    sim.pool(1, own_allocator=True)
    assert take(sim, 24 * MIB, pool=1).expandable is None
    assert take(sim, 24 * MIB).expandable is not None


def test_a_memory_fraction_limits_what_is_reserved() -> None:
    sim = simulator("per_process_memory_fraction:0.5", device_memory=100 * MIB)
    assert sim.malloc(60 * MIB) is None
    take(sim, 50 * MIB)
    assert sim.malloc(2 * MIB) is None
