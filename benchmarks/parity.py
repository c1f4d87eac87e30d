"""What gpuprobe reports of programs on torch's own CUDA code, against the virtual GPU.

Each program runs under ``gpuprobe run --level trace`` in a separate process. ``collect`` writes
the accounts of one engine (a CUDA build of torch takes the native one), and continues a file that
is there; ``compare`` prints a row for each program: peaks, the part of the peak without a line, and
what differs by more than 1% of the peak, with the reason if one is known. Programs: those of
`tests/native/parity_programs.py`, the examples, and the ordinary ones of `tests/hazards`.

Usage: python benchmarks/parity.py collect FILE [--engine native|virtual] [NAME...]
       python benchmarks/parity.py compare NATIVE VIRTUAL
       python benchmarks/parity.py expect VIRTUAL     (writes what the tests compare with)
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "native")]

from parity_account import account_of, differences, nowhere  # noqa: E402
from parity_programs import PROGRAMS  # noqa: E402
from parity_reasons import REASONS, unexplained  # noqa: E402

EXPECTED = ROOT / "tests" / "native" / "parity_virtual.json"


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
    expecting = commands.add_parser("expect")
    expecting.add_argument("virtual", type=Path)
    args = parser.parse_args()
    if args.command == "collect":
        collect(args.engine, args.file, args.names)
    elif args.command == "compare":
        compare(read(args.native), read(args.virtual))
    else:
        found = read(args.virtual)
        kept = {name: found[name] for name in PROGRAMS if "error" not in found[name]}
        EXPECTED.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def programs() -> Iterator[tuple[str, str]]:
    """Names and texts."""
    yield from PROGRAMS.items()
    for name in ("train_gpt", "train_cnn", "memory_leak"):
        path = str(ROOT / "examples" / f"{name}.py")
        text = f"import runpy\n\nrunpy.run_path({path!r}, run_name='__main__')\n"
        yield f"examples/{name}", text
    folder = ROOT / "tests" / "hazards"
    lines = (folder / "ordinary_workloads.py").read_text(encoding="utf-8").splitlines()
    for line, following in itertools.pairwise(lines):
        if line == "@workload":
            name = following.removeprefix("def ").partition("(")[0]
            text = f"import sys\nsys.path.insert(0, {str(folder)!r})\n"
            yield name, f"{text}from ordinary_workloads import {name}\n\n{name}()\n"


def read(path: Path) -> dict[str, Any]:
    return dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}


def collect(engine: str, path: Path, names: list[str]) -> None:
    done = read(path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with path.open("a") as file, tempfile.TemporaryDirectory() as folder:
        for name, text in programs():
            if name in done or (names and name not in names):
                continue
            try:
                found = account_of(text, engine, Path(folder) / name, environment)
            except (RuntimeError, KeyError) as error:  # an error is a difference, too
                found = {"error": str(error)}
            print(json.dumps([name, found]), file=file, flush=True)


def compare(native: dict[str, Any], virtual: dict[str, Any]) -> None:
    equal = explained = failed = 0
    print(f"{'program':42} {'allocated':>24} {'reserved':>24} {'no line':>8}")
    for name, mine in native.items():
        theirs = virtual.get(name)
        if theirs is None:
            continue
        if "error" in mine or "error" in theirs:
            failed += 1
            print(f"{name:42} {mine.get('error', '')[-150:]} / {theirs.get('error', '')[-150:]}")
            continue
        different = differences(mine, theirs)
        unknown = unexplained(name, different)
        equal += not different
        explained += bool(different) and not unknown
        peaks = [f"{mine[what]:,} / {theirs[what]:,}" for what in ("allocated", "reserved")]
        print(f"{name:42} {peaks[0]:>24} {peaks[1]:>24} {nowhere(mine):8.2%}")
        for line in different:
            print(f"    {line}")
        for reason in REASONS.get(name, ()) if different else ():
            print(f"    reason: {reason.text}")
    counts = f"{equal} equal, {explained} different with a reason, {failed} ended by an error"
    print(f"{len(native)} programs: {counts}")


if __name__ == "__main__":
    main()
