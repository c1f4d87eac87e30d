"""The frozen cases of memory causes: small programs, each with its cause and its measured fix.

Each folder of `cause_cases` is a program written after a public thread, and, unless all of its
memory is needed, the thread's fix as a patch. `cause_cases/truths.toml` says of each what is to be
found: frozen before the rules that find it, so no truth is ever changed to fit a rule.

This script checks the set itself: each program and each fixed program ends as the table says, with
the table's peaks, to the byte.

Usage: python benchmarks/cause_cases.py [NAME...]    (Python 3.11 or later)
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import warm_python

FOLDER = Path(__file__).with_suffix("")
GPU = "t4"


@dataclass(frozen=True)
class Peaks:
    """The highest moments of one run, in bytes; ``pinned`` is what the host holds at its end."""

    allocated: int
    reserved: int
    pinned: int

    def text(self) -> str:
        return f"{self.allocated:,} allocated, {self.reserved:,} reserved, {self.pinned:,} pinned"


@dataclass(frozen=True)
class Cause:
    """What is to be found. ``born``: the line where the memory that should not be there is
    allocated; ``keeps``: the line that keeps it, or makes it larger than it need be; ``holder``:
    the path to it as the program names it; ``remedy``: the thread's; ``also``: others that are
    right.

    ``state``: what most of it is at the peak: ``lag`` (not used yet), ``use`` (used again later),
    ``drag`` (never used again), ``void`` (never read, but by its own update), or ``cached`` (free,
    in the allocator's cache). ``figure`` names the figure of `Peaks` that the fix lowers.
    """

    born: int
    keeps: int
    holder: str
    state: str
    remedy: str
    also: tuple[str, ...]
    figure: str
    after: Peaks


@dataclass(frozen=True)
class Case:
    """One program. Without a cause it is a control: all of its memory is needed. ``kind`` is one of
    K1 to K17, the kinds of fault that were seen in reports before, or ``control``; ``thread`` may
    be empty for a control; ``fails``: it runs out of memory, and its fix does not.
    """

    name: str
    kind: str
    mechanism: str
    thread: str
    before: Peaks
    fails: bool
    cause: Cause | None
    frozen: str

    @property
    def program(self) -> Path:
        return FOLDER / self.name / "program.py"

    @property
    def patch(self) -> Path:
        return FOLDER / self.name / "fix.patch"


def cases() -> list[Case]:
    """All cases of the table, by name."""
    table = tomllib.loads((FOLDER / "truths.toml").read_text(encoding="utf-8"))
    return [_case(name, row) for name, row in sorted(table.items())]


def _case(name: str, row: Mapping[str, Any]) -> Case:
    cause = None
    if row["kind"] != "control":
        names = ("born", "keeps", "holder", "state", "remedy", "figure")
        cause = Cause(
            **{key: row[key] for key in names},
            also=tuple(row["also"]),
            after=Peaks(**row["after"]),
        )
    return Case(
        name=name,
        kind=row["kind"],
        mechanism=row["mechanism"],
        thread=row["thread"],
        before=Peaks(**row["before"]),
        fails=row["fails"],
        cause=cause,
        frozen=row["frozen"],
    )


def faults(case: Case) -> Iterator[str]:
    """What is wrong with a case: how its programs end, and their peaks."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        shutil.copy(case.program, folder / "program.py")
        yield from _differences(folder, case.before, fails=case.fails)
        if case.cause:
            command = ["git", "apply", str(case.patch)]
            subprocess.run(command, cwd=folder, check=True)
            for fault in _differences(folder, case.cause.after, fails=False):
                yield f"fixed: {fault}"


def _differences(folder: Path, expected: Peaks, *, fails: bool) -> Iterator[str]:
    code, peaks = measured(folder)
    if (code != 0) != fails:
        yield f"exit code {code}"
    if peaks != expected:
        yield f"{peaks.text()}; expected: {expected.text()}"


def measured(folder: Path) -> tuple[int, Peaks]:
    """How ``folder``'s program ends on the simulated GPU, and its peaks. The values of large
    tensors, which no peak depends on, are not computed.
    """
    options = ("--gpu", GPU, "--compute", "shapes", "--quiet", "--force", "-o", "recording")
    done = warm_python.gpuprobe("run", *options, "program.py", cwd=folder)
    command = [sys.executable, "-m", "gpuprobe", "report", "--json", "recording"]
    shown = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if shown.returncode:
        raise RuntimeError(done.stderr + shown.stderr)
    report = json.loads(shown.stdout)
    (device,) = report["devices"]
    pinned = report["non_tensor_memory"]["pinned"]
    return done.returncode, Peaks(
        allocated=_exact(device["peak_allocated"]),
        reserved=_exact(device["peak_reserved"]),
        pinned=pinned["held"] if pinned else 0,
    )


def _exact(bound: Mapping[str, Any]) -> int:
    if not bound["exact"]:
        raise RuntimeError(f"the peak is between {bound['at_least']} and {bound['at_most']}")
    return int(bound["at_most"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    wrong = 0
    chosen = [case for case in cases() if not args.names or case.name in args.names]
    for case in chosen:
        found = list(faults(case))
        wrong += bool(found)
        print(f"{case.kind:8} {case.name:24} {'; '.join(found) or 'as in the table'}", flush=True)
    print(f"{len(chosen)} cases, {wrong} not as in the table")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
