"""The predicted time of a test's work against its baseline, in real pytest processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_gpu_memory_marker import run_pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gpu_memory")]

TESTS = """\
import pytest
import torch

pytestmark = pytest.mark.gpu_memory(step_time="2%")


def work(times):
    x = torch.ones(2048, 2048, device="cuda")
    for _ in range(times):
        x = x @ x


def test_steady():
    work(4)


def test_slower():
    work(4)  # changed


def test_nothing():
    torch.empty(1024, device="cuda")
"""


def test_a_longer_time_fails_a_test(tmp_path: Path) -> None:
    tests = tmp_path / "test_work.py"
    tests.write_text(TESTS, encoding="utf-8")
    options = ("--gpuprobe-gpu", "a100-40gb", "--gpuprobe-blame", "0")
    assert run_pytest(tmp_path, *options, "--gpuprobe-update-baseline").code == 0
    tests.write_text(TESTS.replace("work(4)  # changed", "work(5)"), encoding="utf-8")
    done = run_pytest(tmp_path, *options)
    assert done.outcomes == {
        "test_steady": "PASSED",
        "test_slower": "FAILED",
        "test_nothing": "FAILED",
    }, done.text
    why = done.why("test_slower")
    assert "step_time " in why
    assert re.search(r" ms \(\+2\d%\) above the baseline \(2% accepted\)\n  first cause: ", why)
    assert "step_time: the time of this test is not predicted: gpuprobe report" in done.why(
        "test_nothing"
    )
