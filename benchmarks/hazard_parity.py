"""The hazards of the corpora on torch's own CUDA code, against those on the virtual GPU.

``collect`` runs every program of `tests/hazards` on one engine, each in a process, and writes what
is found, a line of JSON each; in an environment with a CUDA build of torch it takes the native
engine. It continues a file that is there. ``compare`` prints, for two such files, the programs that
differ in kinds, lines, messages, fixes or synchronisations, and how many are as expected.

Usage: python benchmarks/hazard_parity.py collect FILE [--engine native|virtual] [NAME...]
       python benchmarks/hazard_parity.py compare NATIVE VIRTUAL
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from hazard_programs import Program, begin, chosen, programs, run, run_each

warnings.simplefilter("ignore")


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
    """By program what was found."""
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(map(json.loads, lines))


def collect(engine: str, names: list[str], path: Path) -> None:
    """Write what each program gives: its races and synchronisations, or the error that ended it."""
    begin(engine)
    done = read(path)
    with path.open("a") as file:
        for program, found in run_each(engine, chosen(names, done), account):
            print(json.dumps([program.name, found]), file=file, flush=True)


def account(program: Program) -> dict[str, Any]:
    """What is found of a program, as data."""
    found = run(program)
    races = [*found.races, *(found.latent if program.latent else ())]
    return {
        "races": sorted(
            [
                race.kind,
                race.related[0].line if race.related else 0,
                race.location.line if race.location else 0,
                race.message,
                race.fix.text if race.fix else "",
            ]
            for race in races
        ),
        "syncs": sorted(
            [row.reason, row.location.line if row.location else 0, row.count, row.allowed]
            for row in found.syncs
        ),
        "failure": [text for text in found.coverage if "failure" in text],
    }


def right(program: Program, found: dict[str, Any]) -> bool:
    """Whether what was found is what the corpus expects."""
    if "error" in found or found["failure"]:
        return False
    races = found["races"]
    if program.kinds is None:
        return [program.kind, *program.lines] in [race[:3] for race in races] or (
            program.latent and [program.kind, program.lines[0]] in [race[:2] for race in races]
        )
    return {race[0] for race in races} == set(program.kinds)


def compare(native: dict[str, Any], virtual: dict[str, Any]) -> None:
    totals: Counter[str] = Counter()
    expected: Counter[tuple[str, str]] = Counter()
    for program in programs():
        name = program.name
        if name not in native or name not in virtual:
            continue
        mine, theirs = native[name], virtual[name]
        expected[program.corpus, "programs"] += 1
        expected[program.corpus, "native"] += right(program, mine)
        expected[program.corpus, "virtual"] += right(program, theirs)
        totals["programs"] += 1
        if "error" in mine or "error" in theirs or mine["failure"]:
            totals["ended by an error"] += 1
            print(f"{name}: {mine.get('error', mine.get('failure'))} / {theirs.get('error', '')}")
            continue
        for what, width in (("kinds", 1), ("lines", 3), ("messages", 4), ("fixes", 5)):
            a, b = ([race[:width] for race in one["races"]] for one in (mine, theirs))
            totals[f"same {what}"] += a == b
        same = mine["races"] == theirs["races"]
        if not same:
            print(f"{name}: races\n    native  {mine['races']}\n    virtual {theirs['races']}")
        totals["same synchronisations"] += mine["syncs"] == theirs["syncs"]
        if mine["syncs"] != theirs["syncs"]:
            print(f"{name}: syncs\n    native  {mine['syncs']}\n    virtual {theirs['syncs']}")
    print()
    for what, count in totals.items():
        print(f"{count:6} {what}")
    print(f"\n{'as expected':24}programs  native  virtual")
    for corpus in dict.fromkeys(corpus for corpus, _ in expected):
        counts = [expected[corpus, what] for what in ("programs", "native", "virtual")]
        print(f"{corpus:24}{counts[0]:8}{counts[1]:8}{counts[2]:9}")


if __name__ == "__main__":
    main()
