"""Memory that others measured and published, blind: gpuprobe's native engine ran none of these
programs before figures and programs were committed.

    python benchmarks/blind_truth.py run SOURCES --python 2.6.0=PATH --python 2.13.0=PATH ...
    python benchmarks/blind_truth.py table

``blind_truth/sources.json`` has the figures, each as printed, with the repository and commit (or
address), GPU, torch version and arguments that it belongs to; ``blind_truth/programs`` what runs
them: others' own programs, fetched into ``SOURCES``, with less repetition where it changes nothing
(three steps instead of a thousand), and without weights, data sets and tokenizers. Each runs in
``gpuprobe estimate --engine native --compute shapes``, with the torch of its source as far as that
is 2.6 or later (``--python VERSION=INTERPRETER``, each with a build of torch with CUDA), and prints
the figures that its authors print. Packages that the programs import (pandas, einops, einx,
jaxtyping, tabulate, matplotlib, lightning, torchmetrics, torchvision) have to be importable.

``first.json`` are the results of the first run, unmended; ``mended.json`` those of later ones, of
programs that were corrected. A figure is equal if ours, printed as theirs, is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "blind_truth"
SOURCES = FOLDER / "sources.json"
FIRST, MENDED, MENDS = FOLDER / "first.json", FOLDER / "mended.json", FOLDER / "mends.json"
UNITS = {"bytes": 1, "MiB": 2**20, "GiB": 2**30, "GB": 10**9}
NEAR = 0.005
LIMIT = 1200
Row = dict[str, Any]


# -- comparison


def printed(found: float, figure: Row) -> str:
    """Our bytes, printed as the source prints its own."""
    value = found / UNITS[figure["unit"]]
    if figure["format"] == "floor":
        return str(int(value))
    return format(value, figure["format"])


def theirs(figure: Row) -> float:
    return float(figure["printed"]) * UNITS[figure["unit"]]


def judged(figure: Row, found: dict[str, Any]) -> str:
    """``equal``, ``near`` (0.5%), ``off`` or ``missing``; of verdicts ``right`` or ``wrong``."""
    ours = found.get(figure["key"])
    if figure["what"] == "verdict":
        return "missing" if ours is None else "right" if ours == figure["printed"] else "wrong"
    if ours is None or isinstance(ours, str):
        return "missing"
    same = printed(ours, figure) == format(
        float(figure["printed"]), figure["format"].replace("floor", ".0f")
    )
    if same:
        return "equal"
    return "near" if abs(ours / theirs(figure) - 1) <= NEAR else "off"


def is_reserved(figure: Row) -> bool:
    return "reserved" in figure["what"]


def table_of(sources: list[Row], results: dict[str, Row]) -> list[str]:
    """Counts by source, of allocated and reserved figures and of verdicts."""
    lines = ["| source | allocated: equal, within 0.5%, of | reserved | verdicts | missing |"]
    total: dict[str, int] = {}
    for source in sources:
        counts: dict[str, int] = {}
        for program in source["programs"]:
            row = results.get(f"{source['name']}: {program['name']}")
            if row is None:
                continue
            for figure in program["figures"]:
                kind = "v" if figure["what"] == "verdict" else "r" if is_reserved(figure) else "a"
                name = f"{kind} {judged(figure, row['found'])}"
                counts[name] = counts.get(name, 0) + 1
                total[name] = total.get(name, 0) + 1
        if counts:
            lines.append(_line(source["name"], counts))
    return [*lines, _line("all", total)]


def _line(name: str, counts: dict[str, int]) -> str:
    def part(kind: str) -> str:
        equal, near, off = (counts.get(f"{kind} {word}", 0) for word in ("equal", "near", "off"))
        return f"{equal}, {equal + near}, {equal + near + off}" if equal + near + off else "-"

    right, wrong = counts.get("v right", 0), counts.get("v wrong", 0)
    verdicts = f"{right} of {right + wrong}" if right + wrong else "-"
    missing = sum(count for what, count in counts.items() if what.endswith("missing"))
    return f"| {name} | {part('a')} | {part('r')} | {verdicts} | {missing} |"


def differences(sources: list[Row], results: dict[str, Row]) -> list[str]:
    """Each figure that is not equal."""
    lines = []
    for source in sources:
        for program in source["programs"]:
            name = f"{source['name']}: {program['name']}"
            row = results.get(name)
            if row is None:
                continue
            if row["code"]:
                lines.append(f"{name}: exit code {row['code']}: {row['error'][-300:]}")
            for figure in program["figures"]:
                word = judged(figure, row["found"])
                if word in ("near", "off", "wrong"):
                    ours = row["found"][figure["key"]]
                    apart = "" if isinstance(ours, str) else f"{ours / theirs(figure) - 1:+.3%}"
                    mine = ours if isinstance(ours, str) else printed(ours, figure)
                    lines.append(f"{name}: {figure['key']}: {figure['printed']}, {mine} {apart}")
    return lines


# -- running


def fetched(source: Row, folder: Path) -> None:
    """Fetch a repository at its commit, unless it is there."""
    if not source["commit"]:
        return
    into = folder / source["repository"].replace("/", "+")
    if not into.exists():
        address = f"https://github.com/{source['repository']}"
        subprocess.run(["git", "clone", "-q", "--no-checkout", address, str(into)], check=True)
        subprocess.run(["git", "-C", str(into), "checkout", "-q", source["commit"]], check=True)


def mended(program: Row, name: str) -> Row | None:
    """A program with its mends, None if it has none."""
    found = None
    for mend in json.loads(MENDS.read_text(encoding="utf-8"))["programs"]:
        if any(fnmatch(name, pattern) for pattern in mend["names"]):
            before = found or program
            env = {**before.get("env", {}), **mend["settings"].get("env", {})}
            found = {**before, **mend["settings"], "env": env}
    return found


def run(program: Row, python: str, folder: Path, work: Path) -> Row:
    """Run one program on the native engine.

    ``within``: on a GPU that runs out of memory (`gpuprobe run`), instead of `gpuprobe estimate`,
    whose GPU does not.
    """
    within = program.get("within", False)
    words = ["run" if within else "estimate", "--engine", "native"]
    words += ["--compute", program.get("compute", "shapes"), "--gpu", program["gpu"]]
    if "ranks" in program:
        words += ["--ranks", str(program["ranks"])]
    script, *rest = program["run"]
    path = FOLDER / script if "/" in script else FOLDER / "programs" / script
    work.mkdir(parents=True, exist_ok=True)
    if within:
        words += ["--quiet", "--force", "-o", str(work / "run.gpuprobe"), str(path), *rest]
    else:
        words += ["--steps", "1000000", *program.get("words", []), "--json", str(path), "--", *rest]
    env = {
        **os.environ,
        **program.get("env", {}),
        "BLIND_SOURCES": str(folder),
        "BLIND_WORK": str(work),
        "GPUPROBE_GPUS": str(FOLDER / "gpus.json"),
        "PYTHONPATH": os.pathsep.join(
            [str(HERE.parent), str(FOLDER / "programs"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    began = time.monotonic()
    try:
        done = subprocess.run(
            [python, "-m", "gpuprobe", *words],
            env=env,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as ended:
        code, out, err = 124, "", (ended.stderr or b"").decode(errors="replace")
    found: dict[str, Any] = {}
    for key, value in re.findall(r"^FIGURE (\S+) (\S+)$", err, re.MULTILINE):
        found[key] = value if value in ("OOM", "fits") else float(value)
    estimate = json.loads(out) if out.startswith("{") and code in (0, 1) else {}
    return {
        "torch": estimate.get("torch", ""),
        "verdict": estimate.get("verdict", ""),
        "code": 0 if found and code in (0, 1) else code or 3,
        "seconds": round(time.monotonic() - began, 1),
        "error": "" if found and code in (0, 1) else err[-2000:],
        "found": found,
    }


def runs(program: Row) -> list[list[str]]:
    """The command lines of a program: several, if its configurations need a process each."""
    return list(program.get("runs") or [program["run"]])


def joined(rows: list[Row]) -> Row:
    """The results of a program's processes as one."""
    first = next((row for row in rows if row["code"]), rows[0])
    found = {key: value for row in rows for key, value in row["found"].items()}
    return {**first, "seconds": round(sum(row["seconds"] for row in rows), 1), "found": found}


def written(results: dict[str, Row]) -> str:
    rows = [f" {json.dumps(name)}: {json.dumps(row)}" for name, row in results.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("run", "mend", "table"))
    parser.add_argument("sources", type=Path, nargs="?", help="folder of fetched repositories")
    parser.add_argument("--python", action="append", default=[], metavar="VERSION=INTERPRETER")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="starts of names")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--work", type=Path, default=Path("blind-truth"))
    args = parser.parse_args()
    sources = json.loads(SOURCES.read_text(encoding="utf-8"))
    results: dict[str, Row] = {}
    into = MENDED if args.what == "mend" else FIRST
    if into.exists():
        results = json.loads(into.read_text(encoding="utf-8"))
    pythons = dict(word.split("=", 1) for word in args.python)
    for source in sources if args.what != "table" else ():
        if args.sources is None:
            sys.exit(f"{args.what} needs the folder of sources")
        for frozen in source["programs"]:
            name = f"{source['name']}: {frozen['name']}"
            program = mended(frozen, name) if args.what == "mend" else frozen
            if program is None:
                continue
            chosen = not args.only or name.startswith(tuple(args.only))
            version = program.get("torch") or source["torch"]
            if not chosen or (name in results and not args.again) or version not in pythons:
                continue
            fetched(source, args.sources.resolve())
            where = (pythons[version], args.sources.resolve(), args.work.resolve())
            row = joined([run({**program, "run": words}, *where) for words in runs(program)])
            if into.exists():  # also another process's results
                results = json.loads(into.read_text(encoding="utf-8"))
            results[name] = row
            print(f"{name}: {row['code']}, {row['seconds']} s", file=sys.stderr, flush=True)
            into.write_text(written(results), encoding="utf-8")
    for line in [*differences(sources, results), *table_of(sources, results)]:
        print(line)


if __name__ == "__main__":
    main()
