"""What a recording's chunks may describe: far more than those that gpuprobe writes do."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprobe.errors import DataError
from gpuprobe.model.io.budget import LIMITS, ChunkBudget, amounts, refuse_bomb
from gpuprobe.recording.chunks import decode_chunk

CHUNKS = sorted((Path(__file__).parent.parent / "recorded").rglob("*.cols"))


def test_chunks_describe_a_fifth_of_what_they_may_for_each_byte() -> None:
    assert len(CHUNKS) > 20
    for path in CHUNKS:
        data = path.read_bytes()
        found = amounts(decode_chunk(data, path.name))
        assert found["frames"] > 1
        # The first frame, stack and name are the empty ones of every table.
        for name, count in found.items():
            assert 5 * (count - 1) <= LIMITS[name].per_byte * len(data), f"{path}: {name}"


@pytest.mark.parametrize("name", LIMITS)
def test_chunks_are_counted_together(name: str) -> None:
    limit = LIMITS[name]
    budget = ChunkBudget()
    budget.spend({name: limit.free}, 0)
    budget.spend({name: int(limit.per_byte * 1600)}, 1600)
    with pytest.raises(DataError, match=f"more {name} than a file of its size holds"):
        budget.spend({name: 1}, 0)


@pytest.mark.parametrize("row", ["[],", "{},", '"",'])
def test_tables_are_counted_before_they_are_parsed(row: str) -> None:
    refuse_bomb(row.encode() * 1_000_000, 0)
    with pytest.raises(DataError, match="more rows in its tables"):
        refuse_bomb(row.encode() * 13_000_000, 0)
