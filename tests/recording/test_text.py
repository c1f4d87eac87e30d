"""Sizes and durations as people read them, at the edges of their units."""

from __future__ import annotations

import pytest

from gpuprobe.model.text import human_bytes, human_delta, human_ns, ranges

UNITS = ("KiB", "MiB", "GiB", "TiB")


@pytest.mark.parametrize("power", [1, 2, 3])
def test_a_size_that_would_be_shown_as_1024_is_of_the_next_unit(power: int) -> None:
    unit = 1024**power
    edge = -(-unit * 102395 // 100)  # the first size of at least 1023.95 units
    assert human_bytes(edge - 1) == f"1023.9 {UNITS[power - 1]}"
    assert human_bytes(edge) == f"1.0 {UNITS[power]}"
    assert human_bytes(-edge) == f"-1.0 {UNITS[power]}"
    assert human_delta(edge) == f"+1.0 {UNITS[power]}"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (-1023, "-1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**4 * 5000, "5000.0 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (999, "999 ns"),
        (1_000, "1.0 µs"),
        (999_999, "1000.0 µs"),
        (1_000_000, "1.0 ms"),
        (1_000_000_000, "1.00 s"),
    ],
)
def test_durations(duration: int, text: str) -> None:
    assert human_ns(duration) == text


def test_numbers_in_ranges() -> None:
    assert ranges([8, 0, 1, 2, 2, 10, 11]) == "0-2, 8, 10-11"
    assert ranges((3, 1), ",") == "1,3"
    assert ranges([]) == ""
