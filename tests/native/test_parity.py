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
from parity_reasons import REASONS, unexplained

pytestmark = [pytest.mark.native, pytest.mark.slow]

HERE = Path(__file__).resolve().parent
EXPECTED: dict[str, Any] = json.loads((HERE / "parity_virtual.json").read_text(encoding="utf-8"))


def test_every_program_is_compared() -> None:
    assert set(EXPECTED) == set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_report_is_that_of_the_virtual_gpu(name: str, tmp_path: Path) -> None:
    found = account_of(PROGRAMS[name], "native", tmp_path, environment())
    assert nowhere(found) <= 0.01, found["lines"]
    assert unexplained(name, differences(found, EXPECTED[name])) == []


def test_each_reason_is_of_a_program() -> None:
    assert set(REASONS) <= set(PROGRAMS) | {"lstm_over_packed_sequences"}
    assert unexplained("gpt", ["allocated: 2 / 1"]) == ["allocated: 2 / 1"]
    assert unexplained("gpt_inference", ["reserved: 2 / 1"]) == ["reserved: 2 / 1"]
