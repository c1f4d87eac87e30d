"""The reports of programs on torch's own CUDA code are those of the virtual GPU.

``parity_virtual.json`` has the latter, as ``benchmarks/parity.py`` collects them with a CPU build
of torch; a process has one build of torch only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from parity_account import account_of, differences, environment, nowhere
from parity_programs import PROGRAMS

pytestmark = [pytest.mark.native, pytest.mark.slow]

HERE = Path(__file__).resolve().parent
EXPECTED: dict[str, Any] = json.loads((HERE / "parity_virtual.json").read_text(encoding="utf-8"))
_ALL = ("allocated", "reserved", "categories", "lines", "modules", "step peaks")
DIFFERENT: dict[str, tuple[str, ...]] = {
    # The virtual GPU's model of these kernels takes less: up to 5% of a peak.
    "gru_cell": _ALL,
    "lstm": _ALL,
    "gradient_penalty": _ALL,
    # Replicas run in threads, with a cuBLAS handle each: which of them allocates first differs.
    "data_parallel": ("reserved", "lines", "modules", "step peaks"),
}
"""What may differ, as the beginnings of lines of `differences`."""


def test_every_program_is_compared() -> None:
    assert set(EXPECTED) == set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_report_is_that_of_the_virtual_gpu(name: str, tmp_path: Path) -> None:
    found = account_of(PROGRAMS[name], "native", tmp_path, environment())
    assert nowhere(found) <= 0.01, found["lines"]
    allowed = DIFFERENT.get(name, ())
    assert [
        line for line in differences(found, EXPECTED[name]) if not line.startswith(allowed)
    ] == []
