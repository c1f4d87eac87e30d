"""Memory that others measured and published, blind: gpuprobe's native engine ran none of these
programs before figures and programs were committed.

    python benchmarks/blind_truth.py run SOURCES --python 2.6.0=PATH --python 2.13.0=PATH ...
    python benchmarks/blind_truth.py table

``blind_truth/sources.json`` has the figures, each as printed, with the repository and commit (or
address), GPU, torch version and arguments that it belongs to; ``blind_truth/programs`` what runs
them: others' own programs, fetched into ``SOURCES``, with less repetition where it changes nothing
(three steps instead of a thousand), and without weights, data sets and tokenizers. Each runs in
``gpuprobe estimate --compute shapes``, with the torch of its source as far as that
is 2.6 or later (``--python VERSION=INTERPRETER``, each with a build of torch with CUDA), and prints
the figures that its authors print. Packages that the programs import (transformers, einops,
jaxtyping, pandas) have to be importable.

``first.json`` are the results of the first run, of which only messages of errors were shortened
since; ``mended.json`` those of later ones, of what ``mends.json`` lists (``mend SOURCES --python
…``). A figure is equal if ours, printed as theirs, is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "blind_truth"
PROGRAMS = FOLDER / "programs"
UNITS = {"bytes": 1, "MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}
NEAR = 0.005
LIMIT = 1200
Row = dict[str, Any]


def read(name: str) -> Any:
    """One of the JSON files: sources, mends, first, mended."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


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


def of_source(row: Row | None, program: Row, figure: Row) -> str:
    """`judged`, and of a program with one verdict the estimate's own: whose GPU has no end, so the
    program itself does not run out of memory there.
    """
    if row is None:
        return "missing"
    verdicts = [one for one in program["figures"] if one["what"] == "verdict"]
    if figure["what"] == "verdict" and len(verdicts) == 1 and row["verdict"]:
        ours = "OOM" if row["verdict"] == "does not fit" else "fits"
        return "right" if ours == figure["printed"] else "wrong"
    return judged(figure, row["found"])


def words_of(sources: list[Row], results: dict[str, Row]) -> dict[str, dict[str, str]]:
    """By source, each figure's name and `of_source`; the names begin with its kind."""
    found: dict[str, dict[str, str]] = {}
    for source in sources:
        rows = found.setdefault(source["name"], {})
        for program in source["programs"]:
            name = f"{source['name']}: {program['name']}"
            for figure in program["figures"]:
                kind = "v" if figure["what"] == "verdict" else "r" if is_reserved(figure) else "a"
                rows[f"{kind} {name}: {figure['key']}"] = of_source(
                    results.get(name), program, figure
                )
    return found


def counted(words: dict[str, str], kind: str) -> str:
    """How many of all are equal, and how many within 0.5%; of verdicts ``right of all``."""
    rows = [word for name, word in words.items() if name[0] == kind]
    if not rows:
        return "–"
    if kind == "v":
        return f"{rows.count('right')} of {len(rows)}"
    equal = rows.count("equal")
    return f"{equal} equal and {equal + rows.count('near')} within 0.5% of {len(rows)}"


def cells(words: dict[str, str]) -> list[str]:
    return [counted(words, kind) for kind in "arv"]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def page() -> str:
    """The counts as Markdown: `docs/verification/blind-truth.md` has them."""
    sources, first = read("sources"), read("first")
    words = words_of(sources, {**first, **read("mended")})
    apart = _apart_by_kind(words, read("mends")["explanations"])
    counts = ", ".join(f"{KINDS[kind]} {count}" for kind, count in apart.most_common())
    return "\n\n".join(
        [
            _counts(sources, words_of(sources, first), words)[0],
            f"Figures that still differ, by what explains them: {counts}.",
        ]
    )


def details() -> str:
    """`page`, how each source was run, and each correction and difference, as Markdown."""
    sources, mends = read("sources"), read("mends")
    both = {**read("first"), **read("mended")}
    return "\n\n".join(
        [
            page(),
            _counts(sources, words_of(sources, read("first")), words_of(sources, both))[1],
            _settings(sources, mends),
            "### What was corrected",
            _mends(mends["programs"], both),
            "### What still differs",
            _apart(sources, both, mends["explanations"]),
        ]
    )


def _apart_by_kind(words: dict[str, dict[str, str]], explanations: list[Row]) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in words.values():
        for name, word in one.items():
            if word not in ("equal", "right"):
                index = _explained(name[2:], explanations)
                found[explanations[index]["kind"] if index >= 0 else "unexplained"] += 1
    return found


def _settings(sources: list[Row], mends: Row) -> str:
    rows = []
    for source in sources:
        versions = {p.get("torch") or source["torch"] for p in source["programs"]}
        gpus = sorted({p["gpu"] for p in source["programs"]})
        rows.append(
            [
                source["name"],
                mends["stated"].get(source["name"], source["stated"]),
                f"{', '.join(gpus)}; torch {', '.join(sorted(versions, key=_number))}",
            ]
        )
    return markdown(["source", "its GPU and torch, as stated", "run as"], rows)


def _counts(sources: list[Row], first: Any, last: Any) -> list[str]:
    rows = []
    for source in sources:
        name, where = source["name"], source["repository"]
        link = f"{name}: [{where}](https://github.com/{where})"
        rows.append([link, *cells(first[name]), *cells(last[name])])
    whole = [{k: v for rows in found.values() for k, v in rows.items()} for found in (first, last)]
    rows.append(["all", *cells(whole[0]), *cells(whole[1])])
    head = ["source"]
    for run_name in ("first run", "corrected"):
        head += [f"{run_name}: allocated", "reserved", "verdicts"]
    ran = {name: word for name, word in whole[0].items() if word != "missing"}
    total = len(whole[0])
    sentence = (
        f"Of {total} figures the first run gave {len(ran)}: allocated {counted(ran, 'a')}, "
        f"reserved {counted(ran, 'r')}, verdicts {counted(ran, 'v')}. The other "
        f"{total - len(ran)} are of programs that ended with an error; after corrections "
        f"{sum(word == 'missing' for word in whole[1].values())} are left. "
        "Corrected: allocated "
        f"{counted(whole[1], 'a')}, reserved {counted(whole[1], 'r')}, verdicts "
        f"{counted(whole[1], 'v')}."
    )
    return [sentence, markdown(head, rows)]


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


KINDS = {
    "restated": "the program differed from its source",
    "runner": "the run",
    "engine": "gpuprobe",
    "library": "workspaces of libraries",
    "source": "the source",
    "unexplained": "unexplained",
    "not run": "not run",
}


def _mends(mends: list[Row], both: dict[str, Row]) -> str:
    done: dict[tuple[str, str], list[str]] = {}
    for mend in mends:
        for name in both:
            if any(fnmatch(name, pattern) for pattern in mend["names"]):
                done.setdefault((mend["kind"], mend["why"]), []).append(name)
    return markdown(
        ["programs", "what was wrong", "how"],
        [[", ".join(names), KINDS[kind], why] for (kind, why), names in done.items()],
    )


def _apart(sources: list[Row], both: dict[str, Row], explanations: list[Row]) -> str:
    """Each figure that is not equal, by the explanation that is given for it."""
    groups: dict[int, list[tuple[str, str, float]]] = {}
    for source in sources:
        for program in source["programs"]:
            name = f"{source['name']}: {program['name']}"
            row = both.get(name)
            for figure in program["figures"]:
                word = of_source(row, program, figure)
                if word in ("equal", "right"):
                    continue
                whole = f"{name}: {figure['key']}"
                ours = (row or {"found": {}})["found"].get(figure["key"])
                apart = ours / theirs(figure) - 1 if word in ("near", "off") else 0.0
                groups.setdefault(_explained(whole, explanations), []).append((whole, word, apart))
    rows = []
    for index in sorted(groups, key=lambda index: index % (len(explanations) + 1)):
        one = explanations[index] if index >= 0 else {"kind": "unexplained", "why": ""}
        found = groups[index]
        names = ", ".join(dict.fromkeys(name.rsplit(": ", 1)[0] for name, _, _ in found))
        values = sorted(apart for _, word, apart in found if word in ("near", "off"))
        ends = list(dict.fromkeys(f"{value:+.2%}" for value in values[:1] + values[-1:]))
        rows.append([names, str(len(found)), " to ".join(ends), KINDS[one["kind"]], one["why"]])
    return markdown(["programs", "figures", "ours against theirs", "kind", "why"], rows)


def _explained(name: str, explanations: list[Row]) -> int:
    """The number of the first explanation that a figure has, -1 if none."""
    for index, one in enumerate(explanations):
        if any(fnmatch(name, pattern) for pattern in one["figures"]):
            return index
    return -1


def frozen_digest() -> str:
    """Of what was committed before the first run: figures and programs."""
    digest = hashlib.sha256()
    for path in (FOLDER / "sources.json", *sorted(PROGRAMS.glob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


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
    for mend in read("mends")["programs"]:
        if any(fnmatch(name, pattern) for pattern in mend["names"]):
            found = {**(found or program), **mend["settings"]}
    return found


def run(program: Row, python: str, folder: Path, work: Path) -> Row:
    """Run one program on the native engine.

    ``within``: on a GPU that runs out of memory (`gpuprobe run`), instead of `gpuprobe estimate`,
    whose GPU does not.
    """
    within = program.get("within", False)
    words = ["run" if within else "estimate", "--compute", "shapes", "--gpu", program["gpu"]]
    if "ranks" in program:
        words += ["--ranks", str(program["ranks"])]
    script, *rest = program["run"]
    path = PROGRAMS / script
    work.mkdir(parents=True, exist_ok=True)
    if within:
        words += ["--quiet", "--force", "-o", str(work / "run.gpuprobe"), str(path), *rest]
    else:
        words += ["--steps", "1000000", "--json", str(path), "--", *rest]
    env = {
        **os.environ,
        "BLIND_SOURCES": str(folder),
        "BLIND_WORK": str(work),
        "GPUPROBE_GPUS": str(FOLDER / "gpus.json"),
        "PYTHONPATH": os.pathsep.join(
            [str(HERE.parent), str(FOLDER), os.environ.get("PYTHONPATH", "")]
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
        "error": "" if found and code in (0, 1) else without_paths(err[-1000:]),
        "found": found,
    }


def without_paths(text: str) -> str:
    """A message without the folders of the machine that it is from."""
    return re.sub(r"(?<![\w.])(/[\w.+@~-]+)+/", "", text)


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
    if args.what == "table":
        print(details())
        return
    if args.sources is None:
        sys.exit(f"{args.what} needs the folder of sources")
    into = FOLDER / ("mended.json" if args.what == "mend" else "first.json")
    results: dict[str, Row] = read(into.stem)
    pythons = dict(word.split("=", 1) for word in args.python)
    for source in read("sources"):
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
            results = read(into.stem)  # also another process's results
            results[name] = row
            print(f"{name}: {row['code']}, {row['seconds']} s", file=sys.stderr, flush=True)
            into.write_text(written(results), encoding="utf-8")


if __name__ == "__main__":
    main()
