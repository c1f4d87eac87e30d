"""Published peaks of sharded training, and what `gpuprobe estimate --ranks` makes of the same job.

    python benchmarks/torchtitan_rows.py [--results FOLDER] [--ranks 8 128] [--gpu NAME]

The rows are torchtitan's, measured on H100 GPUs with 96 GB: Llama 3.1 8B, FSDP2 on 8 and on 128
GPUs, eager, local batch size 2, sequence length 8192, selective activation checkpointing; the
memory is the most that torch had reserved on any GPU. Source: pytorch/torchtitan,
``benchmarks/llama3_h100_202412_torchtitan.md`` (torch 1963fc8, torchtitan 9dec370). That torch is
of December 2024, when 2.6 was branched: run this with torch 2.6.

The program is ``torchtitan_llama.py``. Prints a row for each number of ranks: the published figure,
the estimate, its error, its range, and whether the range includes the figure, which was published
with one decimal. The exit code is 1 if an error is more than 3% or a range does not include it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "benchmarks" / "torchtitan_llama.py"
GIB = 2**30
PUBLISHED = {8: 82.4, 128: 67.0}
"""GiB reserved, by number of GPUs: tables 1 and 3, rows "FSDP"."""
ROUNDED = 0.05
GPU = {
    "name": "h100-96gb",
    "title": "NVIDIA H100",
    "like": "h100-80gb",
    "total_memory": 95 * GIB,
}
"""Of the page's hardware: H100 with 96 GB of HBM2e, of which about 95 GiB can be used."""


def estimated(ranks: int, gpu: str, folder: Path) -> dict[str, Any]:
    """The JSON document of the estimate, from ``folder`` if it is there already."""
    kept = folder / f"torchtitan-{ranks}.json"
    if not kept.exists():
        catalogue = folder / "gpus.json"
        catalogue.write_text(json.dumps({"schema_version": 1, "gpus": [GPU]}))
        words = ["--gpu", gpu, "--ranks", str(ranks), "--json", str(PROGRAM)]
        done = subprocess.run(
            [sys.executable, "-m", "gpuprobe", "estimate", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "GPUPROBE_GPUS": str(catalogue)},
            stdout=subprocess.PIPE,
            check=False,
        )
        if done.returncode not in (0, 1):
            raise SystemExit(f"the estimate for {ranks} ranks failed")
        kept.write_bytes(done.stdout)
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(PUBLISHED))
    parser.add_argument("--gpu", default=f"8x{GPU['name']}")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.results or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print("ranks  published  estimated  error  allocated  range            within  verdict")
        for ranks in args.ranks:
            found = estimated(ranks, args.gpu, folder)
            truth = PUBLISHED[ranks]
            reserved = found["peak_reserved"] / GIB
            low, high = (found["reserved"][key] / GIB for key in ("at_least", "at_most"))
            error = reserved / truth - 1
            within = low - ROUNDED <= truth <= high + ROUNDED
            bad += not within or abs(error) > 0.03
            print(
                f"{ranks:>5}  {truth:>5.1f} GiB  {reserved:>5.1f} GiB  {error:>+5.1%}  "
                f"{found['peak_allocated'] / GIB:>5.1f} GiB  {low:.1f} to {high:.1f} GiB  "
                f"{'yes' if within else 'no':<6}  {found['verdict']}"
            )
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
