"""Start-up time of the command line, against bare Python doing the least a tool would.

    python benchmarks/startup.py [--runs 21]

Pairs are interleaved in one run; the table shows medians and the ratio of medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent / "gpuprobe"
CASES = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "argparse, json, dataclasses": [sys.executable, "-c", "import argparse, json, dataclasses"],
    "gpuprobe --version": [str(BIN), "--version"],
    "gpuprobe --help": [str(BIN), "--help"],
    "gpuprobe info --json": [str(BIN), "info", "--json"],
}
REFERENCE = "argparse, json, dataclasses"


def once(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=21)
    runs = parser.parse_args().runs
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(runs):
        for name, command in CASES.items():
            times[name].append(once(command))
    base = statistics.median(times[REFERENCE])
    print(f"{'command':<30}{'median ms':>10}{'ratio':>8}")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:<30}{median * 1e3:>10.1f}{median / base:>8.2f}")


if __name__ == "__main__":
    main()
