"""The model of links against published times of nccl-tests on H100 GPUs.

    python benchmarks/link_model.py

The times and their sources are in ``nccl_tests_h100.json``: of each size the shorter one of out of
place and in place, since the first operation of a size can include setting up its connections.
Runs "for fit" gave the model its constants (`gpuprobe.model.plans.links`), runs "for check" did
not.
Prints the geometric-mean error of each run, and how many times are in the range; the exit code is 1
if the error of all runs for checking is above 10%.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gpuprobe.model.plans.links import HIGH, LOW, Links, seconds  # noqa: E402

DATA = ROOT / "benchmarks" / "nccl_tests_h100.json"
LIMIT = 0.10
H100 = Links(reduce=480.0, nvlink=370.0, network=45.0)
"""Of an all-reduce that NVSwitch adds up, and other operations: issue 212 of
github.com/NVIDIA/nccl-tests; of 400 Gb/s InfiniBand: issue 290 has 46 to 48."""


def ratios(run: dict[str, Any]) -> list[float]:
    """Model divided by published, for each size."""
    nodes = run["nodes"]
    return [
        seconds("all_reduce", int(size), 8 * nodes, nodes, 8, H100) / (min(times) * 1e-6)
        for size, times in run["microseconds"].items()
    ]


def error(found: list[float]) -> float:
    """Geometric mean of by how much the larger of the two is above the smaller."""
    return math.exp(sum(abs(math.log(ratio)) for ratio in found) / len(found)) - 1


def main() -> int:
    runs = json.loads(DATA.read_text())["runs"]
    print("run       nodes  for    figures  error  in the range")
    for purpose in ("fit", "check"):
        together: list[float] = []
        for run in runs:
            if run["for"] == purpose:
                found = ratios(run)
                together += found
                print(line(run["name"], run["nodes"], purpose, found))
        print(line("all", "", purpose, together))
    return 1 if error(together) > LIMIT else 0


def line(name: str, nodes: object, purpose: str, found: list[float]) -> str:
    inside = sum(LOW <= 1 / ratio <= HIGH for ratio in found)
    return (
        f"{name:<9} {nodes!s:>5}  {purpose:<5}  {len(found):>7}  {error(found):>5.1%}  "
        f"{inside} of {len(found)}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
