"""The tests marked ``gpu``, on two simulated GPUs.

The engine's libraries are loaded before torch, and stay: these tests cannot share a process with
those in which torch sees no device. So each of their files is run by a pytest of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
MARK = re.compile(r"^.*\bpytest\.mark\.gpu\b", re.MULTILINE)


def files() -> list[str]:
    return sorted(
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("test_*.py")
        if path != Path(__file__) and MARK.search(path.read_text(encoding="utf-8"))
    )


@pytest.mark.parametrize("file", files())
def test_file(file: str) -> None:
    settings = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", file],
        cwd=TESTS,
        env={**settings, "GPUPROBE_TEST_NATIVE": "2xh100-80gb"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout
