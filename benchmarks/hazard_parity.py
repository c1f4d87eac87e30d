"""The hazards of the corpora on torch's own CUDA code, against those on the virtual GPU.

``collect`` runs every program of `tests/hazards` on one engine and writes what is found, a line of
JSON each; in an environment with a CUDA build of torch it takes the native engine. It continues a
file that is there: a program that ended the process counts as crashed. ``compare`` prints, for two
such files, the programs that differ in kinds, lines, messages, fixes or synchronisations.

Usage: python benchmarks/hazard_parity.py collect FILE [--engine native|virtual] [NAME...]
       python benchmarks/hazard_parity.py compare NATIVE VIRTUAL
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hazards")]
warnings.simplefilter("ignore")
GPUS = "2xh100-80gb"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("file", type=Path)
    collecting.add_argument("--engine", choices=("native", "virtual"), default="native")
    collecting.add_argument("names", nargs="*")
    comparing = commands.add_parser("compare")
    comparing.add_argument("native", type=Path)
    comparing.add_argument("virtual", type=Path)
    args = parser.parse_args()
    if args.command == "collect":
        collect(args.engine, args.names, args.file)
    else:
        compare(read(args.native), read(args.virtual))


def read(path: Path) -> dict[str, Any]:
    """By program what was found; of one that ended the process, that it did."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: found or {"error": "crashed"} for name, found in map(json.loads, lines)}


def collect(engine: str, names: list[str], path: Path) -> None:
    """Write what each program gives: its races and synchronisations, or the error that ended it."""
    from gpuprobe.engines.base import Order
    from gpuprobe.engines.choice import prepare, session

    order = Order(GPUS)
    prepare(engine, order)
    with session(engine, order):
        from hazard_case import Case
        from hazard_corpus import CASES
        from test_hazard_corpus import judge
        from upstream_corpus import BUGS, CORRECT

        programs = [(case.name, case, case.text) for case in CASES]
        for bug in BUGS:
            programs += [
                (f"{bug.name} (buggy)", Case(bug.name, "", (), bug.buggy), bug.buggy),
                (f"{bug.name} (mended)", Case(bug.name, "", (), bug.mended), bug.mended),
            ]
        programs += [(f"{one.name} (correct)", one, one.text) for one in CORRECT]
        done = read(path)
        with path.open("a") as file:
            for name, case, text in programs:
                if name in done or (names and name not in names):
                    continue
                print(json.dumps([name, None]), file=file, flush=True)
                try:
                    found = account(judge(Case(case.name, "", (), text), text))
                except Exception as error:  # noqa: BLE001 - a difference like any other
                    found = {"error": f"{type(error).__name__}: {error}"[:300]}
                print(json.dumps([name, found]), file=file, flush=True)


def account(found: Any) -> dict[str, Any]:
    return {
        "races": sorted(
            [
                race.kind,
                race.related[0].line if race.related else 0,
                race.location.line if race.location else 0,
                race.message,
                race.fix.text if race.fix else "",
            ]
            for race in found.races
        ),
        "syncs": sorted(
            [row.reason, row.location.line if row.location else 0, row.count, row.allowed]
            for row in found.syncs
        ),
        "failure": [text for text in found.coverage if "failure" in text],
    }


def compare(native: dict[str, Any], virtual: dict[str, Any]) -> None:
    totals: Counter[str] = Counter()
    for name in virtual:
        if name not in native:
            continue
        mine, theirs = native[name], virtual[name]
        totals["programs"] += 1
        if "error" in mine or "error" in theirs or mine["failure"]:
            totals["ended by an error"] += 1
            print(f"{name}: {mine.get('error', mine.get('failure'))} / {theirs.get('error', '')}")
            continue
        for what, width in (("kinds", 1), ("lines", 3), ("messages", 4), ("fixes", 5)):
            a, b = ([race[:width] for race in one["races"]] for one in (mine, theirs))
            totals[f"same {what}"] += a == b
            if a != b:
                print(f"{name}: {what}\n    native  {a}\n    virtual {b}")
                break
        totals["same synchronisations"] += mine["syncs"] == theirs["syncs"]
        if mine["syncs"] != theirs["syncs"]:
            print(f"{name}: syncs\n    native  {mine['syncs']}\n    virtual {theirs['syncs']}")
    for what, count in totals.items():
        print(f"{count:6} {what}")


if __name__ == "__main__":
    main()
