"""Other people's tools run on the fake fleets: whatever calls `pynvml` does."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import runpy, sys
from gpuprobe.testing import fake_fleet

fleet, tool, *options = sys.argv[1:]
with fake_fleet(fleet):
    sys.argv = [tool, *options]
    runpy.run_module(tool, run_name="__main__")
"""

FLEETS = ("8xh100", "denied", "ecc", "lost-gpu", "reordered", "throttled", "unified")


@pytest.mark.parametrize("tool", [("nvitop", "-1"), ("gpustat",)], ids=" ".join)
@pytest.mark.parametrize("fleet", FLEETS)
def test_runs_on_a_fake_fleet(fleet: str, tool: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, fleet, *tool], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert any(maker in done.stdout for maker in ("NVIDIA", "H100", "A100", "GB10", "P100"))
