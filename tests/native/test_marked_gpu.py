"""The tests marked ``gpu``, on two simulated GPUs, and those marked ``simulated``, which choose.

The engine's libraries are loaded before torch, and stay: these tests cannot share a process with
those in which torch sees no device. So each file of the first is run by a pytest of its own; of the
second, whose tests are forks of it, each folder.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

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


def groups() -> Iterator[Any]:
    """The mark, and the files of one pytest, which starts in half a second of processor time."""
    for file in files("gpu"):
        yield pytest.param("gpu", [file], id=f"gpu-{file}")
    for folder, found in groupby(files("simulated"), os.path.dirname):
        yield pytest.param("simulated", [*found], id=f"simulated-{folder or 'others'}")


@pytest.mark.parametrize(("mark", "together"), [*groups()])
def test_files(mark: str, together: list[str]) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    # Without gpuprobe's plugin: it would look for a GPU before a test has chosen one.
    options = ("-m", mark, "-p", "no:cacheprovider", *(("-p", "no:gpuprobe") * (mark != "gpu")))
    done = subprocess.run(
        [warm_python.shared().python, "-m", "pytest", "-q", "-rs", *options, *together],
        cwd=TESTS,
        env={**kept, **SETTINGS[mark]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "no GPU" not in done.stdout, done.stdout  # the reason of what is skipped
