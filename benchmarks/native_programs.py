"""Whole programs of other people's making on the simulated GPU.

    python benchmarks/native_programs.py [--only NAME ...] [--mode cpu,real,shapes] [--again]

The programs are those of ``native_programs.txt``: of transformers, timm, torchvision, diffusers,
peft and others, from the corpus of ``benchmarks/foreign``, which describes them. Each runs in a
separate process, forked from one that has imported its libraries: on the CPU for its losses, and
as ``gpuprobe estimate`` runs it, with all values and in shapes. Printed are what
does not run, losses that differ from the CPU's, and the counts.

Needed is torch's build with CUDA (no GPU, none of NVIDIA's packages). Results are appended to
``--results``; what is there is not run again, unless with ``--again``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from foreign import table
from foreign.programs import families
from foreign_programs import AT_ONCE, work

HERE = Path(__file__).resolve().parent
FROZEN = HERE / "native_programs.txt"
MODES = ("cpu", "real", "shapes")


def frozen() -> list[str]:
    """The names of the list."""
    lines = FROZEN.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def run(names: list[str], mode: str, results: Path, logs: Path) -> None:
    """Run programs in one mode, of a family at a time."""
    logs.mkdir(parents=True, exist_ok=True)
    requested = set(names)
    for family, found in families(names):
        jobs = [f"{name}={mode}" for name in found if name in requested]
        while jobs:
            part, jobs = jobs[:AT_ONCE], jobs[AT_ONCE:]
            work(part, results, logs, f"{family}.{mode}")


def summary(names: list[str], found: table.Results) -> list[str]:
    """What does not run, losses that differ, and the counts."""
    lines = []
    counts = dict.fromkeys(("ran with values", "ran in shapes", "equal losses", "compared"), 0)
    for name in names:
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
            if table.equal(real["losses"], cpu["losses"]):
                counts["equal losses"] += 1
            else:
                lines.append(f"{name}: losses {real['losses'][:3]}, on the CPU {cpu['losses'][:3]}")
    figures = [f"{what} {count}" for what, count in counts.items()]
    return [*lines, f"{len(names)} programs: {', '.join(figures)}"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--mode", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--all", action="store_true", help="all programs of the foreign corpus")
    parser.add_argument("--results", type=Path, default=Path("native-programs.jsonl"))
    parser.add_argument("--logs", type=Path, default=Path("native-programs-logs"))
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    chosen = [name for _, found in families([]) for name in found] if args.all else frozen()
    names = [name for name in chosen if not args.only or name.startswith(tuple(args.only))]
    for mode in () if args.table else args.mode.split(","):
        done = table.read(args.results)
        missing = [name for name in names if args.again or (name, mode) not in done]
        if missing:
            run(missing, mode, args.results.resolve(), args.logs.resolve())
    print("\n".join(summary(names, table.read(args.results))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
