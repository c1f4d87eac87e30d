"""What finding the cause of a failed check costs, next to the check itself.

    python benchmarks/gate_time.py [--every N] [--only TEXT] [--json FILE [--resume]]

Each costly edit of `benchmarks/gate_cases` is checked as a user does it, by separate processes:

* ``once``: `gpuprobe check --no-blame --repeat 1`, which runs the program one time. It is what a
  check that passes costs.
* ``check``: `gpuprobe check --no-blame`. Memory grew, so the program is run a second time.
* ``blame``: `gpuprobe check`, which also runs the program with parts of the change taken back.

Compared are processor times, of a process and all that it starts, which other work on the machine
does not change much. The ratios are blame / check and blame / once. OpenMP has one thread: its
threads wait for each other in loops, which costs processor time on a busy machine.

Exit code 1 where the median of blame / check is above 3.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate_cases import SCRIPT, Case, cases

BAR = 3.0
WAYS = {"once": ("--no-blame", "--repeat", "1"), "check": ("--no-blame",), "blame": ()}


def seconds(command: list[str], folder: Path, expected: int) -> tuple[float, float]:
    """Processor time and the clock's, of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - start
    if done.returncode != expected:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def times(case: Case, baselines: dict[str, bytes]) -> dict[str, tuple[float, float]]:
    """Of each way, for one change. ``baselines``: of programs that are measured already."""
    gpuprobe = [sys.executable, "-m", "gpuprobe"]
    with tempfile.TemporaryDirectory(prefix="gate-time-") as name:
        folder = Path(name) / case.program
        case.write(folder)
        baseline = folder / "memory.json"
        if case.program not in baselines:
            update = ["baseline", "update", SCRIPT, "--gpu", "a100-40gb", "--baseline"]
            seconds([*gpuprobe, *update, str(baseline)], folder, 0)
            baselines[case.program] = baseline.read_bytes()
        case.apply(folder)
        baseline.write_bytes(baselines[case.program])
        check = [*gpuprobe, "check", "--baseline", str(baseline)]
        return {way: seconds([*check, *more], folder, 1) for way, more in WAYS.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth change only")
    parser.add_argument("--only", default="", help="only changes with this in their name")
    parser.add_argument("--json", type=Path, help="write the times to this file, too")
    parser.add_argument("--resume", action="store_true", help="skip the changes of that file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, dict[str, tuple[float, float]]] = {}
    if options.resume and options.json.exists():
        found = json.loads(options.json.read_text())
    baselines: dict[str, bytes] = {}
    costly = {case.name: case for case in cases() if case.lines and options.only in case.name}
    for name in list(costly)[:: options.every]:
        if name not in found:
            found[name] = times(costly[name], baselines)
            if options.json:
                options.json.write_text(json.dumps(found))
        row = {way: used for way, (used, _) in found[name].items()}
        print(
            f"{name[:50]:50} once {row['once']:5.1f} s, check {row['check']:5.1f} s, "
            f"blame {row['blame']:5.1f} s: {row['blame'] / row['check']:.2f}, "
            f"{row['blame'] / row['once']:.2f}",
            flush=True,
        )
    middle = {}
    for at, kind in enumerate(("processor", "clock")):
        for way in ("check", "once"):
            middle[kind, way] = ratios = [row["blame"][at] / row[way][at] for row in found.values()]
            print(
                f"blame / {way}, {kind}: median {statistics.median(ratios):.2f}, "
                f"largest {max(ratios):.2f}"
            )
    return 0 if statistics.median(middle["processor", "check"]) <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
