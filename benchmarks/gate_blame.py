"""How often `gpuprobe check` notices an edit that needs more memory, and names its line.

    python benchmarks/gate_blame.py [--only TEXT]

Each case of `benchmarks/gate_cases` is a program, an edit, and the lines that a reader of the edit
would name. The program is measured on a simulated GPU, edited, and checked, as `gpuprobe baseline
update` and `gpuprobe check` do it. Counted is whether the check fails, whether the first line that
it names is one of those, and whether one of the first three is. Of harmless edits: whether the
check passes.

Each is compared three times: with the sources that the baseline keeps; with a baseline of digests
alone, in a repository in which it and the unchanged program were committed first; and so without
running anything for the cause, by rules.

Exit code 1 where a bar is missed: with the baseline's sources and in the repository, all costly
edits fail, nine of ten name the right line first, and all harmless ones pass.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate_cases import SCRIPT, Case, cases

GPU = "a100-40gb"
BASELINES = {"baseline": "memory.json", "repository": "digests.json", "rules": "digests.json"}
"""The baseline of each of the three comparisons."""


class Outcome(NamedTuple):
    """``rank``: the place of the first right line among those named, from 1; 0 for none."""

    failed: bool
    rank: int
    cause: str


def plan_of():  # type: ignore[no-untyped-def]
    from gpuprobe.gate.plan import plan

    return plan([SCRIPT], gpu=GPU)


def measured(folder: Path):  # type: ignore[no-untyped-def]
    """The memory of the program in ``folder``, in this process."""
    from gpuprobe.api.check import measure_as_planned

    with inside(folder), contextlib.redirect_stdout(io.StringIO()):
        return measure_as_planned(plan_of())


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
    places = [place for metric in result.regressions for place in _lines_of(metric) if place]
    return tuple(dict.fromkeys(place.partition(" in ")[0] for place in places))


def _lines_of(metric) -> tuple[str, ...]:  # type: ignore[no-untyped-def]
    return tuple(cause.place for cause in metric.causes) or (metric.place,)


def commit(project: Path) -> None:
    """Commit the project and its baseline to a new repository."""
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "baseline"]):
        subprocess.run(
            ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *command],
            cwd=project,
            check=True,
        )


def outcomes(case: Case, folder: Path) -> dict[str, Outcome]:
    """Measure the case before and after its edit, and compare in each of the three ways."""
    from gpuprobe.api.blame import BlameOptions
    from gpuprobe.api.check import compare_as_planned, without_texts
    from gpuprobe.gate.files import read_baseline, write_baseline

    project = folder / case.program
    case.write(project)
    write_baseline(measured(project), project / "memory.json")
    digests = without_texts(read_baseline(project / "memory.json"))
    write_baseline(digests, project / "digests.json")
    commit(project)
    case.apply(project)
    right = frozenset().union(*case.lines)
    after = measured(project)
    found = {}
    with inside(project):
        for way, file in BASELINES.items():
            result = compare_as_planned(
                read_baseline(project / file),
                after,
                plan_of(),
                path=None if way == "baseline" else project / file,
                blame=None if way == "rules" else BlameOptions(),
            )
            lines = named_lines(result)
            rank = next((n for n, line in enumerate(lines, 1) if line in right), 0)
            found[way] = Outcome(not result.ok, rank, result.cause)
    return found


def share(part: int, whole: int) -> str:
    return f"{part} of {whole}"


def summary(way: str, costly: list[Outcome], harmless: list[Outcome]) -> bool:
    """Print the figures of one comparison; whether its bars are met."""
    failed = sum(one.failed for one in costly)
    first = sum(one.rank == 1 for one in costly)
    near = sum(0 < one.rank <= 3 for one in costly)
    passed = sum(not one.failed for one in harmless)
    print(f"\nby {way}")
    print(f"{'costly edits that fail':28} {share(failed, len(costly))}")
    print(f"{'the right line first':28} {share(first, len(costly))}")
    print(f"{'among the first three':28} {share(near, len(costly))}")
    print(f"{'harmless edits that pass':28} {share(passed, len(harmless))}")
    return failed == len(costly) and first >= 0.9 * len(costly) and passed == len(harmless)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="only cases with this in their name")
    options = parser.parse_args()
    from gpuprobe.catalogue.gpus import parse_spec
    from gpuprobe.native.process import load

    load(parse_spec(GPU))  # before torch
    import torch

    torch.set_num_threads(1)
    costly: list[dict[str, Outcome]] = []
    harmless: list[dict[str, Outcome]] = []
    for case in cases():
        if options.only not in case.name:
            continue
        with tempfile.TemporaryDirectory(prefix="gate-") as folder:
            found = outcomes(case, Path(folder).resolve())
        (costly if case.lines else harmless).append(found)
        ranks = "/".join(str(one.rank or "-") for one in found.values())
        one = found["baseline"]
        text = f"failed, line {ranks}" if one.failed else "passed"
        print(f"{case.name:52} {text:22} {one.cause[:190]}", flush=True)
    good = {
        way: summary(way, [one[way] for one in costly], [one[way] for one in harmless])
        for way in BASELINES
    }
    return 0 if good["baseline"] and good["repository"] else 1


if __name__ == "__main__":
    sys.exit(main())
