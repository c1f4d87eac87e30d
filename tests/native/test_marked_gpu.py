"""The tests marked ``gpu``, on two simulated GPUs, and those marked ``simulated``, which choose.

The engine's libraries are loaded before torch, and stay: these tests cannot share a process with
those in which torch sees no device. So each of their files is run by a pytest of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import warm_python

TESTS = Path(__file__).resolve().parents[1]
SETTINGS = {
    "gpu": {"GPUPROBE_TEST_NATIVE": "2xh100-80gb"},
    "simulated": {"GPUPROBE_TEST_SIMULATED": "1"},
}


def files(mark: str) -> list[str]:
    """The files with tests that have this mark."""
    used = re.compile(rf"\bpytest\.mark\.{mark}\b")
    return sorted(
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("test_*.py")
        if used.search(path.read_text(encoding="utf-8"))
    )


@pytest.mark.parametrize(
    ("mark", "file"), [(mark, file) for mark in SETTINGS for file in files(mark)]
)
def test_file(mark: str, file: str) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    # Without gpuprobe's plugin: it would look for a GPU before a test has chosen one.
    options = ("-m", mark, "-p", "no:cacheprovider", *(("-p", "no:gpuprobe") * (mark != "gpu")))
    done = subprocess.run(
        [warm_python.shared().python, "-m", "pytest", "-q", "-rs", *options, file],
        cwd=TESTS,
        env={**kept, **SETTINGS[mark]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "no GPU" not in done.stdout, done.stdout  # the reason of what is skipped
