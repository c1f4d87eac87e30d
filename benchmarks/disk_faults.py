"""Record programs on a disk that fails at each call which writes the recording.

    python benchmarks/disk_faults.py [--gpu t4] [--every 1] [--programs 1 2 3] [--levels trace]

For each program (on its own, as two ranks, and one that forks a process), level, error (ENOSPC,
EIO, EROFS, EDQUOT, short writes) and call: that call fails, once and together with all that follow.
The program's exit code and output must be what they are without a fault, the recording must be
readable, and no check of it may pass, unless nothing was lost (after short writes it must). Where
the directory or the stream cannot be created, gpuprobe has to refuse before the program runs.
Prints a row for each program and level; exits with 1 if anything was wrong. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

import disk_faults as faults  # noqa: E402

PROGRAMS = (("trains", 1), ("trains", 2), ("forks", 1))
LEVELS = ("counters", "trace")


def cases(program: str, ranks: int, level: str, calls: int) -> Iterator[faults.Case]:
    """Every fault of one program at one level, which makes so many calls."""
    for first in range(1, calls + 1):
        for count in (1, faults.FOR_EVER):
            for error in faults.ERRORS:
                yield faults.Case(program, level, ranks, error, first, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gpu", default="", help="on the native engine (default: on the CPU)")
    parser.add_argument("--every", type=int, default=1, help="of the faults, only each N-th")
    parser.add_argument("--programs", nargs="+", type=int, metavar="NUMBER", help="only these (1…)")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    args = parser.parse_args()
    wrong = total = 0
    with tempfile.TemporaryDirectory() as text:
        library = faults.compiled(Path(text))
        if library is None:
            raise SystemExit("there is no C compiler")
        with faults.running(library, args.gpu) as run:
            chosen = args.programs or range(1, len(PROGRAMS) + 1)
            for (program, ranks), level in product(
                [PROGRAMS[at - 1] for at in chosen], args.levels
            ):
                calm = run(faults.Case(program, level, ranks, first=0, count=0))
                states: Counter[str] = Counter()
                for case in islice(cases(program, ranks, level, calm.calls), 0, None, args.every):
                    outcome = run(case)
                    states[state(outcome)] += 1
                    for problem in faults.problems(case, outcome, calm):
                        wrong += 1
                        print(f"  {case}: {problem}", flush=True)
                total += states.total()
                print(
                    f"{program}, {ranks} rank(s), {level}: {calm.calls} calls, "
                    f"{states.total()} faults: {dict(states)}",
                    flush=True,
                )
    print(f"{total} faults, {wrong} problems")
    raise SystemExit(1 if wrong else 0)


def state(outcome: faults.Outcome) -> str:
    if outcome.refused:
        return "refused at the start"
    if outcome.steps is None:
        return "no session"
    return "complete" if outcome.passes else "incomplete"


if __name__ == "__main__":
    main()
