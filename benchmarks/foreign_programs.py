"""Programs and libraries of other people's making, on the simulated GPU.

    python benchmarks/foreign_programs.py [--only NAME ...] [--mode cpu,real,shapes] [--again]
    python benchmarks/foreign_programs.py --unchanged [NAME ...]

The corpus (``benchmarks/foreign/corpus.txt``) was frozen before anything was fitted to it: a tiny
model of every architecture of transformers that trains on the CPU when its configuration is
shrunk by one rule, models of timm, a short training loop for each library, and scripts of other
projects. Each program runs in a process of its own, on the CPU for its losses, and on the simulated
GPU with values and in shapes, as `gpuprobe estimate` runs it. Compared are the losses (CPU
and simulated GPU with values) and the peaks, allocated and reserved (both ways of computing).

Needed are the CUDA build of torch and the libraries of the programs that are to run; without a
library its programs count as unavailable. Results are appended to ``--results``, and what lies
there is not run again, unless with ``--again``. ``--table`` only prints; ``--publish`` writes the
results that the page "What runs on the simulated GPU" is generated from.

``--unchanged`` runs some thirty small programs under ``gpuprobe run`` and without it: same output,
same exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from foreign import programs, table

HERE = Path(__file__).resolve().parent
MODES = ("cpu", "real", "shapes")
OF_CUDA = ("cuda",)
"""On this machine's GPU; not together with other modes."""
SECONDS = 240
GIGABYTES = 16
AT_ONCE = 25
"""Programs for one worker: one that a program has damaged is not used for ever."""

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


def run(wanted: list[str], modes: list[str], results: Path, logs: Path, again: bool) -> None:
    """Run what is wanted and is not among the results yet."""
    done = table.read(results)
    logs.mkdir(parents=True, exist_ok=True)
    for family, names in programs.families(wanted):
        jobs = [
            f"{name}={','.join(missing)}"
            for name in names
            if (missing := [mode for mode in modes if again or (name, mode) not in done])
        ]
        while jobs:
            part, jobs = jobs[:AT_ONCE], jobs[AT_ONCE:]
            print(f"{family}: {len(part)} programs", file=sys.stderr)
            work(part, results, logs, family)


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
            print(table.one_line(json.loads(line)), file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="programs or families"
    )
    parser.add_argument("--mode", default=",".join(MODES), help=f"of {', '.join(MODES + OF_CUDA)}")
    parser.add_argument("--results", type=Path, default=Path("foreign-results.jsonl"))
    parser.add_argument("--logs", type=Path, default=Path("foreign-logs"))
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--publish", action="store_true", help="write the results of the page")
    parser.add_argument("--unchanged", nargs="*", default=None, metavar="NAME")
    args = parser.parse_args(argv)
    if args.unchanged is not None:
        from foreign import run_unchanged

        return run_unchanged.main(args.unchanged)
    modes = args.mode.split(",")
    if not set(modes) <= {*MODES, *OF_CUDA}:
        parser.error(f"--mode: of {', '.join(MODES + OF_CUDA)}")
    if not args.table and not args.publish:
        run(args.only, modes, args.results.resolve(), args.logs.resolve(), args.again)
    found = table.read(args.results)
    summary = table.summary(found, programs.names())
    print(table.text(summary))
    if args.publish:
        table.publish(summary)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
