"""How often `gpuprobe check` notices a change that costs time, and names its line.

    python benchmarks/step_time_gate.py [--only TEXT,...] [--json FILE]

Each case of `benchmarks/step_time_cases` is a program, a change, and the lines that a reader of the
change would blame; all were committed before any was run. The program's baseline is written once.
Each change is made in a temporary folder and checked on a simulated GPU, by the commands. Counted
is whether the check fails with ``step_time`` above its limit, and whether the first line that it
names as the cause of that metric is one of those. Of harmless changes: whether the check passes.
Data parallel programs are recorded on two simulated GPUs, and their recordings compared, so that no
change is tried out.

Exit code 1 where a bar is missed: caught 95 %, first line 90 %, harmless 100 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.step_time_cases.case import Case
from benchmarks.step_time_cases.costly import COSTLY
from benchmarks.step_time_cases.harmless import HARMLESS

PROGRAMS = Path(__file__).parent / "step_time_cases" / "programs"
_GPU = {"ddp": "2xt4"}
_COMMAND = [sys.executable, "-m", "gpuprobe"]
_RECORDING = "run.gpuprobe"


def ran(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [*_COMMAND, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
    )


def recorded(program: str, folder: Path) -> list[str]:
    """What the commands measure in a folder: a script, or the recording of its ranks."""
    if program != "ddp":
        return ["train.py", "--gpu", _GPU.get(program, "h100-80gb")]
    launch = ["torchrun", "--nproc-per-node", "2", "train.py"]
    options = ["--gpu", _GPU[program], "--level", "trace", "-o", _RECORDING]
    done = ran(["run", *options, "--", *launch], folder)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return [_RECORDING]


def write_baseline(program: str, folder: Path) -> Path:
    source = (PROGRAMS / f"{program}.py").read_text(encoding="utf-8")
    (folder / "train.py").write_text(source, encoding="utf-8")
    done = ran(
        ["baseline", "update", *recorded(program, folder), "--baseline", "memory.json"], folder
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return folder / "memory.json"


def checked(name: str, case: Case, baseline: Path, folder: Path) -> dict[str, Any]:
    """The outcome of a case."""
    source = (PROGRAMS / f"{case.program}.py").read_text(encoding="utf-8")
    changed = case.applied(source)
    (folder / "train.py").write_text(changed, encoding="utf-8")
    start = time.monotonic()
    target = recorded(case.program, folder)
    done = ran(["check", *target, "--baseline", str(baseline), "--json"], folder)
    took = time.monotonic() - start
    try:
        document = json.loads(done.stdout)
    except ValueError:
        document = {"error": done.stderr[-500:]}
    metrics = {row["name"]: row for row in document.get("metrics", ())}
    row = metrics.get("step_time", {})
    above = [m["name"] for m in document.get("metrics", ()) if m["after"] > m["limit"]]
    named = [cause["place"] for cause in row.get("causes", ())] or [row.get("place", "")]
    first = line_of(named[0], changed) if named and named[0] else ""
    return {
        "caught": done.returncode == 1 and "step_time" in above,
        "right": any(text in first for text in case.lines),
        "silent": done.returncode == 0,
        "exit": done.returncode,
        "above": above,
        "before_ms": round(row.get("before", 0) / 1e6, 4),
        "after_ms": round(row.get("after", 0) / 1e6, 4),
        "first": f"{named[0]}: {first}" if first else "",
        "cause": row.get("cause", ""),
        "seconds": round(took, 1),
        **({"error": document["error"]} if "error" in document else {}),
    }


def line_of(place: str, source: str) -> str:
    """The text of the line of a place, ``file:line in function``."""
    number = place.partition(" in ")[0].rpartition(":")[2]
    lines = source.splitlines()
    if not number.isdigit() or int(number) > len(lines):
        return place
    return lines[int(number) - 1].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="cases whose name has one of these texts")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    cases = {
        name: case
        for name, case in {**COSTLY, **HARMLESS}.items()
        if any(text in name for text in options.only.split(","))
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as top:
        baselines: dict[str, Path] = {}
        for name, case in cases.items():
            if case.program not in baselines:
                folder = Path(top) / case.program
                folder.mkdir()
                baselines[case.program] = write_baseline(case.program, folder)
            folder = Path(top) / name
            folder.mkdir()
            result = results[name] = checked(name, case, baselines[case.program], folder)
            good = (result["caught"] and result["right"]) if name in COSTLY else result["silent"]
            times = f"{result['before_ms']:.3f} -> {result['after_ms']:.3f} ms"
            print(f"{'good ' if good else 'WRONG'} {result['seconds']:5.1f} s  {name:30} {times}")
            if name in COSTLY or not good:
                print(f"{'':8}{result['cause'] or result.get('error', '')}")
                print(f"{'':8}first: {result['first']}; above: {', '.join(result['above'])}")
            sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return summary(results)


def summary(results: dict[str, Any]) -> int:
    costly = [row for name, row in results.items() if name in COSTLY]
    harmless = [row for name, row in results.items() if name in HARMLESS]
    caught = sum(row["caught"] for row in costly)
    right = sum(row["caught"] and row["right"] for row in costly)
    silent = sum(row["silent"] for row in harmless)
    print(f"caught {caught} of {len(costly)}, first line right {right} of {len(costly)}")
    print(f"harmless that pass {silent} of {len(harmless)}")
    good = caught >= 0.95 * len(costly) and right >= 0.9 * len(costly) and silent == len(harmless)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
