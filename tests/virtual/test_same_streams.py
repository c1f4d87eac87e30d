"""No program's estimate changes when values become known: random programs over torch's operators.

A sample of ``benchmarks/random_programs.py``, which runs as many as wanted. Each program is run
with all values (``compute="real"``), and without, with three limits of what is computed: each call
must allocate and free the same sizes in the same order, and return tensors of the same looks.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from typing import Any

import pytest

if importlib.util.find_spec("expecttest") is None:  # for torch's own tests, which are not run here
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    vars(sys.modules["expecttest"])["TestCase"] = unittest.TestCase

import random_programs
from gpuprobe.virtual.device.virtual_device import VirtualDevice

import gpuprobe

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about the host it runs on

SEEDS = list(range(8))


@pytest.fixture(scope="module")
def table() -> random_programs.Table:
    return random_programs.Table()


def test_what_is_known_changes_nothing(table: random_programs.Table) -> None:
    rows = random_programs.judge(table, SEEDS)
    assert sum(row["calls"] for row in rows) > 50
    for row in rows:
        for name in random_programs.LIMITS:
            assert not row[name], f"program {row['seed']}, {name}"
        assert row["everything: calls"] == row["small: calls"] == row["calls"]


def test_a_difference_is_found(
    table: random_programs.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that allocate more where nothing is computed do not agree."""
    original = VirtualDevice.malloc

    def malloc(device: Any, nbytes: int, *args: Any) -> Any:
        more = 512 if session_is_in_shapes() and nbytes > 4 else 0
        return original(device, nbytes + more, *args)

    def session_is_in_shapes() -> bool:
        return bool(modes and modes[-1] == "shapes")

    modes: list[str] = []
    enter = gpuprobe.virtual_gpu

    def virtual_gpu(gpu: str, compute: str = "real") -> Any:
        modes.append(compute)
        return enter(gpu, compute)

    monkeypatch.setattr(gpuprobe, "virtual_gpu", virtual_gpu)
    monkeypatch.setattr(VirtualDevice, "malloc", malloc)
    rows = random_programs.judge(table, SEEDS[:1])
    assert all("memory" in rows[0][name] for name in random_programs.LIMITS)
