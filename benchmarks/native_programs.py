"""Whole programs of other people's making on the simulated GPU.

    python benchmarks/native_programs.py [--only NAME ...] [--mode cpu,real,shapes] [--again]

The programs are those of ``foreign/programs.txt``: of transformers, timm, torchvision, diffusers,
peft and others. Each runs in a separate process, forked from one that has imported its libraries:
on the CPU for its losses, and as ``gpuprobe estimate`` runs it, with all values and in shapes.
``--mode cuda`` runs them on this machine's GPU, not together with other modes. Printed are what
does not run, losses that differ from the CPU's, and the counts.

Needed are torch's build with CUDA (no GPU, none of NVIDIA's packages) and the libraries of the
programs. Results are appended to ``--results``; what is there is not run again, unless with
``--again``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from foreign.programs import families, names

HERE = Path(__file__).resolve().parent
MODES = ("cpu", "real", "shapes")
SECONDS = 240
GIGABYTES = 16
AT_ONCE = 25
"""Programs for one worker: one that a program has damaged is not used forever."""

QUIET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_DISABLED": "true",
    "YOLO_OFFLINE": "true",
    "CUDA_VISIBLE_DEVICES": "0",
    "MPLBACKEND": "agg",
    "PYTHONHASHSEED": "0",
    "PYTHONWARNINGS": "ignore",
}


TOLERANCE = 1e-3
"""Of a loss, relatively: float32 on two paths (a fused kernel and its parts) after a few steps of
an optimizer. Losses below it are compared absolutely."""

Results = dict[tuple[str, str], dict[str, Any]]


def read(path: Path) -> Results:
    """The newest result of each program and mode."""
    found: Results = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            found[row["name"], row["mode"]] = row
    return found


def one_line(row: dict[str, Any]) -> str:
    text = f"  {row['name']:50} {row['mode']:7} {row['status']:12} {row.get('seconds', 0):6} s"
    if row["status"] == "ran":
        return text
    return f"{text}  {row.get('kind', '')} {row.get('cause') or row.get('error', '')}"[:240]


def equal(ours: list[float], theirs: list[float]) -> bool:
    """Whether losses are the same to `TOLERANCE`, NaN and infinity included."""
    if len(ours) != len(theirs):
        return False
    return all(
        (math.isnan(a) and math.isnan(b))
        or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for a, b in zip(ours, theirs, strict=True)
    )


def work(jobs: list[str], results: Path, logs: Path, name: str) -> None:
    """Run jobs, ``PROGRAM=MODE,...``, in one worker, and append what it finds to ``results``.
    ``name``: of the worker, in the name of its log.
    """
    folders = (str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, folders))
    limits = [str(logs), str(SECONDS), str(GIGABYTES)]
    with (
        (logs / f"worker.{name}.txt").open("w") as errors,
        results.open("a", encoding="utf-8") as stream,
        subprocess.Popen(
            [sys.executable, "-m", "foreign.worker", *limits, *jobs],
            env={**os.environ, **QUIET, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            stream.write(line)
            stream.flush()
            print(one_line(json.loads(line)), file=sys.stderr, flush=True)


def run(requested: set[str], mode: str, results: Path, logs: Path) -> None:
    """Run programs in one mode, of a family at a time."""
    logs.mkdir(parents=True, exist_ok=True)
    for family, found in families().items():
        jobs = [f"{name}={mode}" for name in found if name in requested]
        while jobs:
            part, jobs = jobs[:AT_ONCE], jobs[AT_ONCE:]
            work(part, results, logs, f"{family}.{mode}")


def summary(requested: list[str], found: Results) -> list[str]:
    """What does not run, losses that differ, and the counts."""
    lines = []
    counts = dict.fromkeys(("ran with values", "ran in shapes", "equal losses", "compared"), 0)
    for name in requested:
        for mode, what in (("real", "ran with values"), ("shapes", "ran in shapes")):
            row = found.get((name, mode), {"status": "not run"})
            if row["status"] == "ran":
                counts[what] += 1
            else:
                why = row.get("cause") or row.get("error", "")
                lines.append(f"{name} {mode}: {row['status']}: {why}"[:300])
        cpu, real = found.get((name, "cpu"), {}), found.get((name, "real"), {})
        # What draws its numbers on the device draws others than on the CPU.
        if cpu.get("status") == real.get("status") == "ran" and not real["drawn"]:
            counts["compared"] += 1
            if equal(real["losses"], cpu["losses"]):
                counts["equal losses"] += 1
            else:
                lines.append(f"{name}: losses {real['losses'][:3]}, on the CPU {cpu['losses'][:3]}")
    figures = [f"{what} {count}" for what, count in counts.items()]
    return [*lines, f"{len(requested)} programs: {', '.join(figures)}"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--mode", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--results", type=Path, default=Path("native-programs.jsonl"))
    parser.add_argument("--logs", type=Path, default=Path("native-programs-logs"))
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    chosen = [name for name in names() if not args.only or name.startswith(tuple(args.only))]
    for mode in () if args.table else args.mode.split(","):
        done = read(args.results)
        missing = [name for name in chosen if args.again or (name, mode) not in done]
        if missing:
            run(set(missing), mode, args.results.resolve(), args.logs.resolve())
    print("\n".join(summary(chosen, read(args.results))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
