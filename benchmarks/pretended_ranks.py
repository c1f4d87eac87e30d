"""Rank r of N pretended, compared with rank r of N real processes over gloo.

    python benchmarks/pretended_ranks.py [--ranks 2 4] [--programs ddp fsdp2] [--compute shapes]

The programs are those of ``tests/support/rank_programs.py``. Real and pretended ranks all run on a
simulated GPU, the real ones with all values. What is compared is what the allocator counted:
allocations, their bytes, the peaks of allocated and reserved memory. Prints a row for each program
and number of ranks; the exit code is 1 where any rank differs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from rank_programs import PROGRAMS  # noqa: E402

PROGRAM = ROOT / "tests" / "support" / "rank_programs.py"
NAMES = tuple(PROGRAMS)
REAL = """
import runpy, sys
import gpuprobe
sys.argv = sys.argv[1:]
with gpuprobe.virtual_gpu("h100-80gb"):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def real(name: str, ranks: int) -> list[dict[str, int]]:
    """What each of so many real processes counts."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", REAL, str(PROGRAM), name, folder]
        processes = [
            subprocess.Popen(
                words,
                env=environment(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(ranks),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                ),
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        errors = [process.communicate()[1] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit(f"{name}: a real rank failed:\n" + "\n".join(errors)[-4000:])
        return [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(ranks)]


def pretended(name: str, rank: int, ranks: int, compute: str) -> dict[str, Any]:
    """What the one process counts that pretends to be a rank; {"error": …} where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["estimate", "--ranks", str(ranks), "--rank", str(rank), "--steps", "99"]
        words += ["--compute", compute, "--json", str(PROGRAM), "--", name, folder]
        done = subprocess.run(
            [sys.executable, "-m", "gpuprobe", *words],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return {"error": done.stderr[-2000:]}
        found: dict[str, Any] = json.loads((Path(folder) / f"{rank}.json").read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--programs", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--compute", nargs="+", default=["shapes"], choices=["shapes", "real"])
    args = parser.parse_args()
    bad = 0
    for name in args.programs:
        for ranks in args.ranks:
            there = real(name, ranks)
            for compute in args.compute:
                here = [pretended(name, rank, ranks, compute) for rank in range(ranks)]
                same = sum(one == other for one, other in zip(there, here, strict=True))
                peak = max(rank["allocated_bytes.all.peak"] for rank in there)
                print(
                    f"{name:<14} {ranks} ranks, {compute:<6} {same} of {ranks} equal, peak {peak}"
                )
                for rank, (one, other) in enumerate(zip(there, here, strict=True)):
                    if one != other:
                        bad += 1
                        print(f"    rank {rank}: real {one}\n            pretended {other}")
                sys.stdout.flush()
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
