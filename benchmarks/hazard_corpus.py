"""What is found of the corpora of stream bugs, what is left alone, and whether printed fixes hold.

For each bug of a public project: is it found, with the right kind and both lines; does the fixed
version have no findings; is the program clean once every printed fix was applied to its source, and
is it still when the whole step runs on a side stream. Then the programs of `tests/hazards` that
race, for their fixes, and the correct ones.

Usage: python benchmarks/hazard_corpus.py [--own] [NAME...]    (--own: the other corpus, too)
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "hazards"))
warnings.simplefilter("ignore")

from gpuprobe.api.simulated_gpu import load_gpu  # noqa: E402

GPUS = "2xh100-80gb"
load_gpu(GPUS)  # before the programs import torch

from hazard_case import Case  # noqa: E402
from hazard_corpus import CASES  # noqa: E402
from test_hazard_corpus import judge  # noqa: E402
from upstream_corpus import BUGS, CORRECT  # noqa: E402

import gpuprobe  # noqa: E402
from gpuprobe.hazards.findings.code import applied  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--own", action="store_true")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    totals: Counter[str] = Counter()
    with gpuprobe.virtual_gpu(GPUS):
        for bug in BUGS:
            if not args.names or bug.name in args.names:
                found = races(bug.name, bug.buggy)
                totals["bugs"] += 1
                totals["found"] += bool(found)
                places = {(kind, first, second) for kind, first, second in map(place, found)}
                note(totals, "kind and lines", (bug.kind, *bug.lines) in places, bug.name)
                note(totals, "mended silent", not races(bug.name, bug.mended), bug.name)
                apply(totals, bug.name, bug.buggy, found)
        for case in CORRECT:
            if not args.names or case.name in args.names:
                totals["correct"] += 1
                note(totals, "correct silent", not races(case.name, case.text), case.name)
        for case in CASES if args.own else ():
            if case.kinds and (not args.names or case.name in args.names):
                apply(totals, case.name, case.text, races(case.name, case.text))
    print()
    for name, count in totals.items():
        print(f"{count:6} {name}")


def races(name: str, text: str) -> list:
    return judge(Case(name, "", (), text), text).races


def place(race) -> tuple[str, int, int]:
    return race.kind, race.related[0].line if race.related else 0, race.location.line


def note(totals: Counter, what: str, good: bool, name: str) -> None:
    totals[what] += good
    if not good:
        print(f"not {what}: {name}", flush=True)


def with_fixes(text: str, found: list) -> str:
    insertions = [one for race in found for one in race.fix.insertions]
    return "".join(applied(text.splitlines(keepends=True), insertions))


def apply(totals: Counter, name: str, text: str, found: list) -> None:
    """Whether a program is clean with the fixes of its findings in its source."""
    mended = with_fixes(text, found)
    step = (
        "step_stream = cuda.Stream()\nstep_stream.wait_stream(cuda.current_stream())\n"
        "with cuda.stream(step_stream):\n" + textwrap.indent(mended, "    ")
    )
    totals["programs with fixes applied"] += 1
    for what, program in (("clean with fixes", mended), ("clean on a side stream", step)):
        try:
            found = races(name, program)
            if program is step and found and "default_stream()" in text:
                # On another stream the program's own waits for the default one are wrong.
                print(f"fixed twice, as it names the default stream itself: {name}")
                found = races(name, with_fixes(program, found))
            left = [race.message for race in found]
        except Exception as error:  # noqa: BLE001 - an invalid fix counts, too
            left = [repr(error)]
        note(totals, what, not left, name)
        for message in left[:2]:
            print(f"    {message:.160}")


if __name__ == "__main__":
    main()
