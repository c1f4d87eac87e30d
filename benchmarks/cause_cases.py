"""The frozen cases of memory causes: small programs, each with its cause and its measured fix.

Each folder of `cause_cases` is a program written after a public thread, and, unless all of its
memory is needed, the thread's fix as a patch. `cause_cases/truths.toml` says of each what is to be
found: frozen before the rules that find it, so no truth is ever changed to fit a rule.

Without options, this script checks the set itself: each program and each fixed program ends as the
table says, with the table's peaks, to the byte. With ``--explain`` it runs `gpuprobe explain` on
each program and judges the first cause:

* its *line*: where the memory was allocated, or what keeps it;
* its *holder*: it has the first name of the table's, of ``self.x`` the attribute;
* its *remedy*: a word of the table's remedies, for each rule (`_WORDS`);
* its *effect*: the peak that it gives, against that of the program with the thread's fix, or with
  `printed.patch`: the fix that is printed, by hand, in cases where that is another one. What is
  printed as tried is compared with a run of its patch.

With ``--folder benchmarks/fresh_cases_8`` (or ``_7``) it does so with cases that were frozen after
the rules were written. Once rules are written with a set in view, a new one replaces the older.

Usage: python benchmarks/cause_cases.py [--folder FOLDER] [--explain] [NAME...]
(Python 3.11 or later)
"""

from __future__ import annotations

import argparse
import json
import re
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
    folder: Path
    kind: str
    mechanism: str
    thread: str
    before: Peaks
    fails: bool
    cause: Cause | None
    frozen: str

    @property
    def program(self) -> Path:
        return self.folder / "program.py"

    @property
    def patch(self) -> Path:
        return self.folder / "fix.patch"

    @property
    def printed(self) -> Path:
        """The fix that is printed, by hand; there is none if it is the thread's."""
        return self.folder / "printed.patch"


def cases(folder: Path = FOLDER) -> list[Case]:
    """All cases of the table in ``folder``, by name."""
    table = tomllib.loads((folder / "truths.toml").read_text(encoding="utf-8"))
    return [_case(name, folder / name, row) for name, row in sorted(table.items())]


def _case(name: str, folder: Path, row: Mapping[str, Any]) -> Case:
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
        folder=folder,
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
    tensors, which no peak depends on, are not computed. The table has cuBLAS's workspaces, which
    torch 2.15 does not keep by itself.
    """
    options = ("--gpu", GPU, "--compute", "shapes", "--quiet", "--force", "-o", "recording")
    kept = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}
    done = warm_python.gpuprobe("run", *options, "program.py", cwd=folder, environment=kept)
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


def after_printed(case: Case) -> Peaks:
    """The peaks with the fix that is printed. Raises ValueError for a control."""
    if case.cause is None:
        raise ValueError(case.name)
    if not case.printed.exists():
        return case.cause.after
    return with_patch(case, case.printed.read_text(encoding="utf-8"))


def with_patch(case: Case, patch: str) -> Peaks:
    """The peaks of the changed program."""
    with tempfile.TemporaryDirectory() as base:
        shutil.copy(case.program, Path(base, "program.py"))
        command = ["git", "apply", "-"]
        subprocess.run(command, input=patch, text=True, cwd=base, check=True)
        return measured(Path(base))[1]


def _exact(bound: Mapping[str, Any]) -> int:
    if not bound["exact"]:
        raise RuntimeError(f"the peak is between {bound['at_least']} and {bound['at_most']}")
    return int(bound["at_most"])


_WORDS = {
    "kept-graphs": ("detach", "item", "no_grad"),
    "kept-graph": ("detach", "item", "no_grad"),
    "retained-graph": ("retain_graph",),
    "evaluation-with-graph": ("no_grad",),
    "gradient-graph": ("autograd.grad", "none", "create_graph"),
    "loaded-file": ("map_location", "del the loaded"),
    "live-variable": ("del", "drop"),
    "kept-tensors": ("drop", "cpu", "clear", "keep", "remove", "detach", "delete", "free"),
    "cached-results": ("limit the cache", "do not cache"),
    "cycle": ("cycle", "weak", "save_for_backward", "collect", "capture", "callbacks"),
    "handled-exception": ("except", "keep the message"),
    "autocast-cache": ("cache_enabled",),
    "unread-gradients": ("requires_grad", "no_grad", "freeze", "detach", "autograd.grad"),
    "late-zero-grad": ("zero_grad",),
    "stale-optimizer-state": ("optimizer",),
    "too-early": ("when it is used", "when used", "fewer batches", "cpu"),
    "ddp-unused-parameters": ("find_unused",),
    "ddp-buckets": ("bucket",),
    "repeated-values": ("expand", "broadcast", "group the queries", "enable_gqa"),
    "broadcast-intermediate": ("chunks", "cdist", "matrix product"),
    "reduced-later": ("chunk", "argmax", "topk"),
    "dense-embedding-gradient": ("sparse",),
    "grown-by-joining": ("preallocate", "argmax", "cpu"),
    "joined-with-parts": ("preallocated", "bucket", "running", "cpu"),
    "resident-data": ("when it is used", "when used"),
    "view-keeps-base": ("clone",),
    "computed-in-whole": ("last position", "completion only", "only the chosen"),
    "widened": ("widen",),
    "narrowed-later": ("half before", "build in half"),
    "one-hot": ("class indices",),
    "foreach-temporaries": ("foreach", "fused"),
    "zeroed-gradients": ("set_to_none",),
    "whole-checkpoint": ("each block",),
    "whole-vmap": ("chunk_size",),
    "summed-losses": ("each loss",),
    "padding": ("longest",),
    "saved-twice": ("input only", "silu", "gelu", "checkpoint"),
    "log-probabilities-of-all": ("logsumexp",),
    "saved-log-probabilities": ("logsumexp",),
    "attention-weights": ("need_weights", "scaled_dot_product_attention"),
    "unpacked-weights": ("autograd function", "checkpoint"),
    "saved-unread": ("sparse matrix", "scatter_add", "chunks"),
    "old-streams": ("reuse the stream",),
    "pinned-rounding": ("power of two", "one pinned block", "reuse the pinned buffer"),
    "private-pools": ("largest first", "shared graph pool"),
    "evaluation": ("no_grad", "inference_mode"),
    "growth": ("detach", "numbers", "cpu", "drop"),
    "unneeded": (),  # it names no holder, so no remedy is right
    "fragments": ("expandable_segments:true", "no max_split_size"),
}
"""By rule of `gpuprobe.causes`, words of the remedies that are the same as the rule's."""


_FREED = "with what only this holder keeps freed"


@dataclass(frozen=True)
class Effect:
    """The peak that a cause gives for its fix, ``printed``, and the ``measured`` one, in bytes.
    ``how``: tried, freed earlier or smaller (replayed), with ``bound``.
    """

    how: str
    bound: str
    printed: int
    measured: int

    @property
    def share(self) -> float:
        return self.printed / self.measured - 1

    @property
    def holds(self) -> bool:
        """Whether the measured peak is on the side of the bound, or within 2%."""
        return abs(self.share) <= 0.02 or (self.share < 0) == (self.bound == "or_more")

    def text(self) -> str:
        bound = "" if self.bound == "exact" else f", {self.bound.replace('_', ' ')}"
        return f"{self.how}{bound}: {self.printed:,} of {self.measured:,} ({self.share:+.1%})"


def effect_of(case: Case, cause: Mapping[str, Any]) -> Effect | None:
    """The effect of a cause; None if it has no figure."""
    effect = cause["effect"]
    if effect["certainty"] == "untried" or not isinstance(effect["after"], int):
        return None
    how = "tried"
    if effect["certainty"] == "tried" and not effect["patch"]:
        return None  # settings of the allocator, in the environment
    if effect["certainty"] == "replayed":
        how = "freed earlier" if effect["assumed"].startswith(_FREED) else "smaller"
    after = after_printed(case) if how != "tried" else with_patch(case, effect["patch"])
    figure = after.reserved if effect["reserved"] else after.allocated
    return Effect(how, effect["bound"], effect["after"], figure)


@dataclass(frozen=True)
class Judgement:
    """What is right about the first cause of a program; ``named``: there is one at all."""

    named: bool
    line: bool = False
    holder: bool = False
    remedy: bool = False
    rule: str = ""
    effect: Effect | None = None

    def text(self) -> str:
        if not self.named:
            return "no cause"
        parts = {"line": self.line, "holder": self.holder, "remedy": self.remedy}
        wrong = [name for name, right in parts.items() if not right]
        effect = "" if self.effect is None else f"; {self.effect.text()}"
        return f"{self.rule}: {'right' if not wrong else 'not right: ' + ', '.join(wrong)}{effect}"


def _name(holder: str) -> str:
    """The name of a holder that an answer must have. Methods call their object ``self``, callers
    call it something else: of ``self.outputs[…]``, that is the attribute.
    """
    names = re.split(r"[.\[( ]", holder)
    return f".{names[1]}" if names[0] == "self" and len(names) > 1 else names[0]


def judge(case: Case, answer: Mapping[str, Any]) -> Judgement:
    """Compare the first cause of ``gpuprobe explain --json`` with the table."""
    if not answer["causes"]:
        return Judgement(named=False)
    first = answer["causes"][0]
    if case.cause is None:
        return Judgement(named=True, rule=first["rule"])
    lines = {(first[key] or {}).get("line") for key in ("made_at", "kept_at")}
    name = _name(case.cause.holder)
    remedies = " ".join((case.cause.remedy, *case.cause.also)).lower()
    return Judgement(
        named=True,
        line=bool(lines & {case.cause.born, case.cause.keeps}),
        holder=name == "none" or name in f"{first['holder']} {first['sentence']}",
        remedy=any(word in remedies for word in _WORDS[first["rule"]]),
        rule=first["rule"],
        effect=effect_of(case, first),
    )


_SECONDS = 240
"""For each explanation: the causes are judged, not the machine's speed."""


def explained(case: Case) -> Mapping[str, Any]:
    """The document of ``gpuprobe explain``. Raises RuntimeError where there is none."""
    with tempfile.TemporaryDirectory() as base:
        shutil.copy(case.program, Path(base, "program.py"))
        options = ("--gpu", GPU, "--compute", "shapes", "--json", "--max-seconds", str(_SECONDS))
        done = warm_python.gpuprobe("explain", *options, "program.py", cwd=Path(base))
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr)
    answer: Mapping[str, Any] = json.loads(done.stdout)
    return answer


def explain_all(chosen: list[Case]) -> None:
    """Explain each program, and print what is right, in sum by the state of the memory."""
    sums: dict[str, list[int]] = {}
    effects: list[Effect] = []
    for case in chosen:
        found = judge(case, explained(case))
        state = "control" if case.cause is None else case.cause.state
        right = not found.named if case.cause is None else found.line
        row = sums.setdefault(state, [0, 0, 0, 0])
        for at, value in enumerate((True, right, found.holder, found.remedy)):
            row[at] += value
        effects += [found.effect] if found.effect is not None else []
        print(f"{case.kind:8} {case.name:24} {state:8} {found.text()}", flush=True)
    for state, (count, line, holder, remedy) in sorted(sums.items()):
        if state == "control":
            print(f"controls: {line} of {count} silent")
        else:
            print(f"{state}: line {line}, holder {holder}, remedy {remedy} of {count}")
    for how in sorted({one.how for one in effects}):
        exact = [one.share for one in effects if (one.how, one.bound) == (how, "exact")]
        most = {limit: sum(abs(share) <= limit for share in exact) for limit in (0.02, 0.1)}
        print(f"{how}: {most[0.02]} within 2%, {most[0.1]} within 10% of {len(exact)}")
        bounds = [one for one in effects if one.how == how and one.bound != "exact"]
        right = [one for one in bounds if one.holds]
        print(f"{how}, at least or at most: {len(right)} of {len(bounds)} hold")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--explain", action="store_true", help="run gpuprobe explain on each")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="the cases' folder")
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    wrong = 0
    folder = args.folder.resolve()
    chosen = [case for case in cases(folder) if not args.names or case.name in args.names]
    if args.explain:
        explain_all(chosen)
        return
    for case in chosen:
        found = list(faults(case))
        wrong += bool(found)
        print(f"{case.kind:8} {case.name:24} {'; '.join(found) or 'as in the table'}", flush=True)
    print(f"{len(chosen)} cases, {wrong} not as in the table")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
