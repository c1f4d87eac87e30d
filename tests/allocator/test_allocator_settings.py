"""PYTORCH_CUDA_ALLOC_CONF: what torch takes is taken, what it refuses is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.allocator.settings import differences, memory_fraction, parse_conf, to_conf
from gpuprobe.errors import ConfigError
from gpuprobe.model.trace import AllocatorSettings

MIB = 1 << 20


def test_nothing_set_is_torchs_defaults() -> None:
    assert parse_conf("") == AllocatorSettings()
    assert to_conf(AllocatorSettings()) == ""


def test_every_key_is_read() -> None:
    found = parse_conf(
        "expandable_segments:True, max_split_size_mb:128,max_non_split_rounding_mb:40,"
        "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2,>:4],"
        "large_segment_size_mb:32,per_process_memory_fraction:0.5,backend:native"
    )
    assert found.expandable_segments
    assert found.max_split_size == 128 * MIB
    assert found.max_non_split_rounding == 40 * MIB
    assert found.garbage_collection_threshold == 0.8
    assert found.large_segment_size == 32 * MIB
    assert memory_fraction(found) == 0.5
    table = found.roundup_power2_divisions
    assert [table.get(1 << i, 0) for i in range(16)] == [1] * 9 + [2] + [4] * 6


def test_one_number_of_divisions_covers_all_sizes() -> None:
    assert parse_conf("roundup_power2_divisions:4").roundup_power2_divisions == {
        1 << i: 4 for i in range(16)
    }


def test_the_non_split_rounding_follows_the_segment_size() -> None:
    assert parse_conf("large_segment_size_mb:32").max_non_split_rounding == 32 * MIB


def test_settings_are_added_to_the_ones_in_force() -> None:
    base = parse_conf("max_split_size_mb:64")
    both = parse_conf("expandable_segments:True", base)
    assert both.expandable_segments
    assert both.max_split_size == 64 * MIB
    assert differences(base, both) == "expandable_segments:True"
    assert differences(base, base) == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("foo:1", "unknown allocator setting 'foo'"),
        ("expandable_segments", "not KEY:VALUE"),
        ("expandable_segments:", "not KEY:VALUE"),
        ("expandable_segments:yes", "True or False"),
        ("max_split_size_mb:1", "at least 20"),
        ("max_split_size_mb:1.5", "expected an integer"),
        ("max_split_size_mb:-1", "expected an integer"),
        ("max_non_split_rounding_mb:4", "at least 20"),
        ("max_split_size_mb:24,large_segment_size_mb:32", "at least 32"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:x", "number"),
        ("garbage_collection_threshold:nan", "between 0 and 1"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[3:2]", "power of two"),
        ("roundup_power2_divisions:[4]", "SIZE:DIVISIONS"),
        ("large_segment_size_mb:10", "more than 10"),
        ("per_process_memory_fraction:1.5", "between 0 and 1"),
    ],
)
def test_what_torch_refuses_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_conf(text)


confs = st.fixed_dictionaries(
    {},
    optional={
        "expandable_segments": st.just("True"),
        "max_split_size_mb": st.integers(64, 4096).map(str),
        "max_non_split_rounding_mb": st.integers(64, 128).map(str),
        "garbage_collection_threshold": st.sampled_from(("0.25", "0.5", "0.8")),
        "large_segment_size_mb": st.integers(11, 64).map(str),
        "roundup_power2_divisions": st.sampled_from(("2", "16", "[4:2,16:8,>:1]", "[1:0,>:4]")),
    },
).map(lambda pairs: ",".join(f"{k}:{v}" for k, v in pairs.items()))


@given(confs)
def test_settings_survive_a_round_trip(text: str) -> None:
    found = parse_conf(text)
    again = parse_conf(to_conf(found))
    assert to_conf(again) == to_conf(found)
    assert again.roundup_power2_divisions == found.roundup_power2_divisions
    assert again.max_non_split_rounding == found.max_non_split_rounding
