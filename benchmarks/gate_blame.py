"""How often `gpuprobe check` notices a change that needs more memory, and names its line.

    python benchmarks/gate_blame.py [--only TEXT] [--json FILE]

Each case of `benchmarks/gate_cases` is a program, a change of it, and the lines that a reader of
the change would name. The program is measured on a virtual GPU, changed, and checked, as `gpuprobe
baseline update` and `gpuprobe check` do it, in one process per program. Counted is whether the
check fails, whether the first line that it names is one of those, and whether one of the first
three is. Of harmless changes: whether the check passes.

Each case is also made with ``git``: the unchanged program and its baseline are committed first.

Exit code 1 where a bar is missed: caught 100 %, first 85 %, first three 95 %, harmless 100 %.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate_cases.edits import Case, make
from benchmarks.gate_cases.fresh import FRESH, FRESH_HARMLESS
from benchmarks.gate_cases.harmless import HARMLESS
from benchmarks.gate_cases.planted import PLANTED
from benchmarks.gate_cases.public import PUBLIC

GPU = "a100-40gb"
_ALONG = {**HARMLESS, **FRESH_HARMLESS}
GROUPS = {
    "planted": PLANTED,
    "public": PUBLIC,
    "harmless": HARMLESS,
    "fresh": FRESH,
    "fresh harmless": FRESH_HARMLESS,
}


class Outcome(NamedTuple):
    """``named``: the lines that are named as causes, in order, as ``file:line``; ``rank``: the
    place in it of a line that is right, from 1, 0 for none."""

    caught: bool
    rank: int
    named: tuple[str, ...]
    cause: str


def script_of(name: str, case: Case) -> str:
    return f"{name}.py" if case.program == "public" else "train.py"


def measured(folder: Path, script: str):  # type: ignore[no-untyped-def]
    """What the program in ``folder`` takes, in this process."""
    from gpuprobe.api.check import measure

    here = Path.cwd()
    path = list(sys.path)
    known = set(sys.modules)
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return measure(script, virtual=GPU)
    finally:
        os.chdir(here)
        sys.path[:] = path
        for module in set(sys.modules) - known:
            file = getattr(sys.modules[module], "__file__", None) or ""
            if file.startswith(str(folder)):
                del sys.modules[module]


def named_lines(result) -> tuple[str, ...]:  # type: ignore[no-untyped-def]
    """The lines that a check names, in order."""
    places = [place for metric in result.regressions for place in lines_of(metric) if place]
    return tuple(dict.fromkeys(place.partition(" in ")[0] for place in places))


def lines_of(metric) -> tuple[str, ...]:  # type: ignore[no-untyped-def]
    return tuple(cause.place for cause in metric.causes) or (metric.place,)


_BEFORE: dict[tuple[str, str], bytes] = {}
"""The baselines of the programs as they are, each measured once."""


def outcome(name: str, case: Case, folder: Path, git: bool = False) -> Outcome:
    """Measure the case before and after its change, and compare."""
    from gpuprobe.api.check import compare, read_baseline, write_baseline

    script = script_of(name, case)
    project = make(folder, case.program, ())
    baseline = project / "memory.json"
    if (case.program, script) not in _BEFORE:
        write_baseline(measured(project, script), baseline)
        _BEFORE[case.program, script] = baseline.read_bytes()
    baseline.write_bytes(_BEFORE[case.program, script])
    if git:
        commit(project)
    along = tuple(edit for other in case.along for edit in _ALONG[other].edits)
    edits = along + case.edits
    edited = make(folder / "edited", case.program, edits)
    for file in edited.iterdir():
        (project / file.name).write_bytes(file.read_bytes())
    after = measured(project, script)
    here = Path.cwd()
    os.chdir(project)
    try:
        result = compare(read_baseline("memory.json"), after, path="memory.json")
    finally:
        os.chdir(here)
    named = named_lines(result)
    right = set()
    for file in project.glob("*.py"):
        lines = file.read_text(encoding="utf-8").splitlines()
        right |= {f"{file.name}:{n}" for n, text in enumerate(lines, 1) if text in case.blame}
    rank = next((n for n, place in enumerate(named, 1) if place in right), 0)
    return Outcome(not result.ok, rank, named, result.cause)


def commit(project: Path) -> None:
    """The project and its baseline in a repository of their own."""
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "baseline"]):
        subprocess.run(
            ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *command],
            cwd=project,
            check=True,
        )


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="only cases with this in their name")
    parser.add_argument("--git", action="store_true", help="with the history of a repository")
    parser.add_argument("--json", type=Path, help="write what was found to this file, too")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    found: dict[str, dict[str, Outcome]] = {}
    for group, cases in GROUPS.items():
        found[group] = {}
        print(f"\n{group}")
        for name, case in cases.items():
            if options.only not in f"{group} {name}":
                continue
            with tempfile.TemporaryDirectory(prefix="gate-") as folder:
                result = outcome(name, case, Path(folder).resolve(), options.git)
            found[group][name] = result
            told = f"caught, line {result.rank or '-'}" if result.caught else "passed"
            print(f"  {name:40} {told:16} {result.cause[:150]}", flush=True)
    print()
    bars = []
    larger = ("planted", "public", "fresh")
    both = [outcome for group in larger for outcome in found[group].values()]
    for title, part, least in (
        ("caught", sum(o.caught for o in both), 1.0),
        ("the changed line first", sum(o.rank == 1 for o in both), 0.85),
        ("among the first three", sum(0 < o.rank <= 3 for o in both), 0.95),
    ):
        print(f"{title:28} {share(part, len(both))}")
        bars.append(part >= least * len(both))
    for group in larger:
        one = found[group].values()
        print(f"  {group}: first {share(sum(o.rank == 1 for o in one), len(one))}")
    passed = [
        not o.caught for group in GROUPS if group not in larger for o in found[group].values()
    ]
    print(f"{'harmless changes that pass':28} {share(sum(passed), len(passed))}")
    bars.append(all(passed))
    if options.json:
        options.json.write_text(
            json.dumps({g: {n: o._asdict() for n, o in c.items()} for g, c in found.items()})
        )
    return 0 if all(bars) else 1


if __name__ == "__main__":
    sys.exit(main())
