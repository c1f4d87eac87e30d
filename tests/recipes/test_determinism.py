"""A baseline is the same bytes each time: two runs here, ten in the benchmark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_two_runs_give_the_same_bytes() -> None:
    script = ROOT / "benchmarks" / "baseline_determinism.py"
    done = subprocess.run(
        [sys.executable, str(script), "--runs", "2", "--hazards"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 runs, ")
    assert done.stdout.endswith(": 0 differ from the first\n")
