"""How often `gpuprobe check` notices a change that needs more memory, and names its line.

    python benchmarks/gate_blame.py [--only TEXT] [--json FILE [--resume]]

Each case of `benchmarks/gate_cases` is a program, a change, and the lines that a reader of
the change would name. The program is measured on a simulated GPU, changed, and checked, as
`gpuprobe baseline update` and `gpuprobe check` do it, in one process per program. Counted is
whether the check fails, whether the first line that it names is one of those, and whether one of
the first three is. Of harmless changes: whether the check passes.

Of the frozen set it also counts how often the printed share of a cause is within 2 % of the
bytes at the peak that taking the cause back saves, in `truth.json`.

Each is compared three times: with the sources that the baseline keeps; with a baseline of digests
alone, in a repository in which it and the unchanged program were committed first; and so without
running anything for the cause, by rules. With ``--resume``, cases that are in FILE
are not run again.

Exit code 1 where a bar is missed: caught 95 %, harmless 100 %, first three 95 %, first 92 % in the
repository and 85 % with the baseline's sources.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate_cases.edits import Case, make
from benchmarks.gate_cases.fresh import FRESH, FRESH_HARMLESS
from benchmarks.gate_cases.frozen import case as frozen
from benchmarks.gate_cases.frozen.cases import COSTLY as FROZEN
from benchmarks.gate_cases.frozen.cases import HARMLESS as FROZEN_HARMLESS
from benchmarks.gate_cases.harmless import HARMLESS
from benchmarks.gate_cases.planted import PLANTED
from benchmarks.gate_cases.public import PUBLIC

GPU = "a100-40gb"
TRUTH = Path(frozen.__file__).with_name("truth.json")
_ALONG = {**HARMLESS, **FRESH_HARMLESS}
GROUPS = {
    "planted": PLANTED,
    "public": PUBLIC,
    "harmless": HARMLESS,
    "fresh": FRESH,
    "fresh harmless": FRESH_HARMLESS,
    "frozen": FROZEN,
    "frozen harmless": FROZEN_HARMLESS,
}


class Outcome(NamedTuple):
    """``named``: the lines that are named as causes, in order, as ``file:line``; ``rank``: the
    place in it of a line that is right, from 1, 0 for none. ``runs``: with parts taken back.
    ``shares``: the causes of the peak, with what each saves; ``together``: what all of them do."""

    caught: bool
    rank: int
    named: tuple[str, ...]
    cause: str
    runs: int = 0
    saved: int | None = None
    metric: str = ""
    trials: str = ""
    before: float = 0.0
    spent: float = 0.0
    shares: tuple[tuple[str, int], ...] = ()
    together: int = 0


def script_of(name: str, case: Case | frozen.Case) -> str:
    return f"{name}.py" if case.program == "public" else "train.py"


def plan_of(script: str):  # type: ignore[no-untyped-def]
    from gpuprobe.api.check import plan

    return plan([script], gpu=GPU)


def measured(folder: Path, script: str):  # type: ignore[no-untyped-def]
    """What the program in ``folder`` takes, in this process."""
    from gpuprobe.api.check import measure_as_planned

    with inside(folder), contextlib.redirect_stdout(io.StringIO()):
        return measure_as_planned(plan_of(script))


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """In a folder, and without the modules that were imported from it afterwards."""
    here = Path.cwd()
    path = list(sys.path)
    known = set(sys.modules)
    os.chdir(folder)
    try:
        yield
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


def shares_of(result) -> tuple[tuple[tuple[str, int], ...], int]:  # type: ignore[no-untyped-def]
    """What is printed of the peak: the causes' shares, and what they save together."""
    peak = next((item for item in result.regressions if item.name == "peak_allocated"), None)
    if peak is None or peak.unexplained is None:
        return (), 0
    causes = [(cause.place.partition(" in ")[0], cause.saved) for cause in peak.causes]
    shares = tuple((place, saved) for place, saved in causes if place and saved is not None)
    return shares, peak.delta - peak.unexplained


@functools.cache
def measured_effects() -> dict[str, Any]:
    """What `truth.json` has of each change."""
    found: dict[str, Any] = json.loads(TRUTH.read_text(encoding="utf-8"))
    return found


def off_by(name: str, outcome: Outcome) -> float | None:
    """How far the shares are from the measured effect, at most; None where none is printed. The
    effect is that of a cause with what it needs, and so are the lines whose shares are counted."""
    truth = measured_effects()[name]
    case = FROZEN[name]
    worst = None
    for letter, cause in zip(case.causes, truth["causes"], strict=True):
        lines = {
            f"{part.file}:{line}"
            for part in frozen.lines_of(case, letter, only_named=False)
            for line in range(part.first, part.last + 1)
        }
        mine = [saved for place, saved in outcome.shares if place in lines]
        if not mine:
            continue
        several = len(mine) > 1 and len(truth["causes"]) == 1
        told = outcome.together if several else sum(mine)
        worst = max(worst or 0.0, abs(told - cause["saves"]) / cause["saves"])
    return worst


_BEFORE: dict[tuple[str, str], bytes] = {}
"""The baselines of the programs as they are, each measured once."""


WAYS = ("baseline", "repository", "rules")
FIRST = {"baseline": 0.85, "repository": 0.92, "rules": 0.0}
"""The bar of the first name, as a share."""


BASELINES = ("memory.json", "digests.json")


def unchanged(case: Case | frozen.Case, folder: Path) -> Path:
    """The case's program as it was, in a new folder."""
    if isinstance(case, Case):
        return make(folder, case.program, ())
    frozen.write(folder / case.program, frozen.files_of(case.program))
    return folder / case.program


def change(case: Case | frozen.Case, project: Path, folder: Path) -> set[str]:
    """Make the case's change; the lines that are right to name, as ``file:line``."""
    if isinstance(case, frozen.Case):
        kept = {path: path.read_bytes() for path in map(project.joinpath, BASELINES)}
        frozen.write(project, frozen.changed(case))
        for path, data in kept.items():
            path.write_bytes(data)
        lines = [part for cause in case.causes for part in frozen.lines_of(case, cause)]
        return {f"{part.file}:{n}" for part in lines for n in range(part.first, part.last + 1)}
    along = tuple(edit for other in case.along for edit in _ALONG[other].edits)
    edited = make(folder / "edited", case.program, along + case.edits)
    for file in edited.iterdir():
        (project / file.name).write_bytes(file.read_bytes())
    right = set()
    for file in project.glob("*.py"):
        texts = file.read_text(encoding="utf-8").splitlines()
        right |= {f"{file.name}:{n}" for n, text in enumerate(texts, 1) if text in case.blame}
    return right


def outcome(name: str, case: Case | frozen.Case, folder: Path) -> dict[str, Outcome]:
    """Measure the case before and after its change, and compare, in each way."""
    from gpuprobe.api.blame import BlameOptions
    from gpuprobe.api.check import (
        compare_as_planned,
        read_baseline,
        without_texts,
        write_baseline,
    )

    script = script_of(name, case)
    project = unchanged(case, folder)
    baseline = project / "memory.json"
    if (case.program, script) not in _BEFORE:
        write_baseline(measured(project, script), baseline)
        _BEFORE[case.program, script] = baseline.read_bytes()
    baseline.write_bytes(_BEFORE[case.program, script])
    write_baseline(without_texts(read_baseline(baseline)), project / "digests.json")
    commit(project)
    right = change(case, project, folder)
    began = time.monotonic()
    after = measured(project, script)
    found = {}
    with inside(project), remembered_runs():
        for way in WAYS:
            path = BASELINES[way != "baseline"]
            begun = time.monotonic()
            result = compare_as_planned(
                read_baseline(path),
                after,
                plan_of(script),
                path=None if way == "baseline" else path,
                blame=None if way == "rules" else BlameOptions(began=began),
            )
            named = named_lines(result)
            rank = next((n for n, place in enumerate(named, 1) if place in right), 0)
            runs = int(result.trials.split()[0]) if result.trials[:1].isdigit() else 0
            saved = next((c.saved for m in result.regressions for c in m.causes[:1]), None)
            metric = next((m.name for m in result.regressions), "")
            spent = round(begun - began, 2), round(time.monotonic() - begun, 2)
            found[way] = Outcome(
                not result.ok,
                rank,
                named,
                result.cause,
                runs,
                saved,
                metric,
                result.trials,
                *spent,
                *shares_of(result),
            )
    return found


@contextlib.contextmanager
def remembered_runs() -> Iterator[None]:
    """Inside, a program with the same texts is run once, whichever way finds them."""
    from gpuprobe.api.trials import Trials

    known: dict[frozenset[tuple[str, str | None]], object] = {}
    original = Trials.run

    def run(self, texts, seconds):  # type: ignore[no-untyped-def]
        key = frozenset(texts.items())
        if key not in known:
            known[key] = original(self, texts, seconds)
        return known[key]

    Trials.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trials.run = original  # type: ignore[method-assign]


def commit(project: Path) -> None:
    """Commit the project and its baseline to a new repository."""
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "baseline"]):
        subprocess.run(
            ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *command],
            cwd=project,
            check=True,
        )


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "none"


LARGER = ("planted", "public", "fresh", "frozen")
Found = dict[str, dict[str, dict[str, Outcome]]]
"""By group, case and way."""


def told(found: Found, way: str) -> bool:
    """Print what was found in one way; whether every bar is met."""
    larger = {group: [case[way] for case in found[group].values()] for group in LARGER}
    both = [outcome for outcomes in larger.values() for outcome in outcomes]
    print(f"\nby {way}")
    bars = []
    for title, part, least in (
        ("caught", sum(o.caught for o in both), 0.95),
        ("the changed line first", sum(o.rank == 1 for o in both), FIRST[way]),
        ("among the first three", sum(0 < o.rank <= 3 for o in both), 0.95),
    ):
        print(f"{title:28} {share(part, len(both))}")
        bars.append(part >= least * len(both))
    for group, one in larger.items():
        caught, first = (sum(o.caught for o in one), sum(o.rank == 1 for o in one))
        print(f"  {group}: caught {share(caught, len(one))}, first {share(first, len(one))}")
    others = [
        case[way] for group in GROUPS if group not in LARGER for case in found[group].values()
    ]
    passed = sum(not o.caught for o in others)
    print(f"{'harmless changes that pass':28} {share(passed, len(others))}")
    errors = {
        name: error
        for name, case in found["frozen"].items()
        if (error := off_by(name, case[way])) is not None
    }
    if errors:
        near = sum(error <= 0.02 for error in errors.values())
        print(f"{'shares within 2%':28} {share(near, len(errors))}")
        for name, error in errors.items():
            if error > 0.02:
                print(f"  {name}: {error:.1%} off")
    return all(bars) and passed == len(others)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="only cases with this in their name")
    parser.add_argument("--json", type=Path, help="write what was found to this file, too")
    parser.add_argument("--resume", action="store_true", help="skip the cases of that file")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    found: Found = {group: {} for group in GROUPS}
    if options.resume and options.json.exists():
        for group, cases in json.loads(options.json.read_text()).items():
            for name, ways in cases.items():
                found[group][name] = {way: Outcome(**row) for way, row in ways.items()}
    for group, cases in GROUPS.items():
        print(f"\n{group}", flush=True)
        for name, case in cases.items():
            if options.only not in f"{group} {name}":
                continue
            if name not in found[group]:
                with tempfile.TemporaryDirectory(prefix="gate-") as folder:
                    found[group][name] = outcome(name, case, Path(folder).resolve())
                if options.json:
                    rows = {
                        g: {n: {way: o._asdict() for way, o in w.items()} for n, w in c.items()}
                        for g, c in found.items()
                    }
                    options.json.write_text(json.dumps(rows))
            each = [found[group][name][way] for way in WAYS]
            ranks = "/".join(str(o.rank or "-") for o in each)
            text = f"caught, line {ranks}, {each[0].runs} runs" if each[0].caught else "passed"
            print(f"  {name:40} {text:26} {each[0].cause[:190]}", flush=True)
    good = {way: told(found, way) for way in WAYS}
    return 0 if good["baseline"] and good["repository"] else 1


if __name__ == "__main__":
    sys.exit(main())
