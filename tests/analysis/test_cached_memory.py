"""Which line reserved the segments of the allocator's cache."""

from __future__ import annotations

from analysis_programs import Script

from gpuprobe.causes.cache import Cache
from gpuprobe.model.actions import SEGMENT_ALLOC
from gpuprobe.model.memory import Segment
from gpuprobe.model.place import NoPlace, Place

LOAD, TRAIN = Place("train.py", 3, "load"), Place("train.py", 9, "train")


def test_a_segment_was_reserved_in_an_earlier_step() -> None:
    early, late = Script("cuda:0"), Script("cuda:0")
    for address, place in ((0x1000, LOAD), (0x9000, TRAIN)):
        frames = [(one.file, one.line, one.function) for one in dict.fromkeys((place, TRAIN))]
        early.trace.events.append(
            SEGMENT_ALLOC, address, 0x2000, 0, early.tick(), stack=early.stack(*frames)
        )
    small = Segment(0, 0x9000, 0x2000, 0, "small")
    large = Segment(0, 0x1000, 0x4000, 0, "large")
    unknown = Segment(0, 0xF000, 0x2000, 0, "large")
    late.trace.segments = (small, large, unknown)

    cache = Cache([early.trace, late.trace], 0x8000, 0x1000)
    assert cache.line([small]) == TRAIN
    assert cache.line([small, large]) == LOAD  # most of the bytes
    assert isinstance(cache.line([unknown]), NoPlace)
    assert cache.common_lines([small, large]) == (TRAIN,)
    assert cache.common_lines([small, unknown]) == ()
